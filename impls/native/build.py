"""Compiles the kernels with the system's C compiler on first use and loads them; without one, says why not."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch

from impls.user_cache import cache_dir

SOURCE = Path(__file__).parent / "src"
FLAGS = ("-O3", "-march=native", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-shared",
         "-fvisibility=hidden", "-std=gnu11", "-w")  # fmt: skip
COMPILERS = ("cc", "gcc", "clang")
COMPILE_LIMIT_S = 180.0  # ten seconds alone, more beside other work


class NativeUnavailable(RuntimeError):
    """The kernels cannot be built or loaded here; the message says why."""


def _cpu_identity() -> str:
    """What -march=native depends on: a cache shared between machines must not serve one CPU's code to another."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    wanted = ("model name", "flags", "Features", "CPU implementer", "CPU part")
    found = {line.split(":")[0].strip(): line for line in reversed(lines) if line.startswith(wanted)}
    return " ".join([platform.machine(), *(found[key] for key in sorted(found))])


def _compiler() -> str:
    for name in filter(None, (os.environ.get("CC"), *COMPILERS)):
        if path := shutil.which(name):
            return path
    raise NativeUnavailable(f"no C compiler found (looked for {', '.join(COMPILERS)})")


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_LIMIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeUnavailable(f"{command[0]} could not be run: {error}") from error
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()[-1]
        raise NativeUnavailable(f"{command[0]} failed with status {done.returncode}: {last}")
    return done.stdout


def library_path(compiler: str, folder: Path) -> Path:
    """Where the library of these sources, flags, compiler and CPU is kept."""
    parts = [_run([compiler, "--version"]), _cpu_identity(), " ".join(FLAGS)]
    parts += [file.read_text() for file in sorted(SOURCE.iterdir()) if file.suffix in (".c", ".h")]
    return folder / f"kernels-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:24]}.so"


def compile_library(folder: Path | None = None) -> Path:
    """The shared library for this CPU, from the cache if it is there. NativeUnavailable if it cannot be made."""
    compiler, folder = _compiler(), folder or cache_dir() / "native"
    library = library_path(compiler, folder)
    if library.exists():
        return library
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, unfinished = tempfile.mkstemp(suffix=".so", dir=folder)
        os.close(handle)
    except OSError as error:
        raise NativeUnavailable(f"cannot write to {folder}: {error.strerror}") from error
    try:
        _run([compiler, *FLAGS, *map(str, sorted(SOURCE.glob("*.c"))), "-o", unfinished, "-lm"])
        os.replace(unfinished, library)  # another process may have been faster: either file is the same
    finally:
        Path(unfinished).unlink(missing_ok=True)
    return library


@cache
def _load() -> ctypes.CDLL | NativeUnavailable:
    if os.name != "posix":
        return NativeUnavailable("the kernels are built on POSIX systems only")
    try:
        return ctypes.CDLL(str(compile_library()))
    except NativeUnavailable as error:
        return error
    except OSError as error:
        return NativeUnavailable(f"the compiled kernels could not be loaded: {error}")


def load() -> ctypes.CDLL:
    """The loaded library; NativeUnavailable with the reason if there is none. Tried once a process."""
    found = _load()
    if isinstance(found, NativeUnavailable):
        raise found
    return found


def why_unavailable() -> str | None:
    """Why the kernels cannot run on this machine; None if they can."""
    found = _load()
    return str(found) if isinstance(found, NativeUnavailable) else None


def available() -> bool:
    """Whether there are C kernels here; asked first, it builds them."""
    return why_unavailable() is None


def num_threads() -> int:
    """The kernels follow torch's own setting."""
    return torch.get_num_threads()
