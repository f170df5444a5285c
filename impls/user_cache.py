"""Where everything lies that is kept for a user between runs: models, compiled kernels, measured peaks."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def cache_dir() -> Path:
    """``HARNESS_CACHE`` if set, else a folder where this platform keeps caches."""
    if own := os.environ.get("HARNESS_CACHE"):
        return Path(own).expanduser()
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg).expanduser() / "llm-harness"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData/Local")) / "llm-harness"
    return Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "llm-harness"
