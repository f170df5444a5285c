"""Where everything lies that is kept for a user between runs: models, compiled kernels, measured peaks."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from tempfile import TemporaryFile


def cache_dir() -> Path:
    """``HARNESS_CACHE`` if set, else a folder where this platform keeps caches."""
    if own := os.environ.get("HARNESS_CACHE"):
        return Path(own).expanduser()
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg).expanduser() / "llm-harness"
    return Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "llm-harness"


def make_cache() -> Path:
    """The folder of `cache_dir`, there and writable. OSError, one line that names the way out, if it cannot be."""
    try:
        folder = cache_dir()
    except RuntimeError as error:  # no home
        raise OSError(f"no place for a cache ({error}); set HARNESS_CACHE=<a folder>") from error
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):  # whether one may write is known by writing: root may even where nobody can
            return folder
    except OSError as error:
        named = f"HARNESS_CACHE={folder}" if os.environ.get("HARNESS_CACHE") else f"the cache {folder}"
        raise OSError(
            f"{named}: cannot be written ({error.strerror}); allowed: HARNESS_CACHE=<a folder that can be>"
        ) from error
