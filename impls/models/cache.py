"""The user's cache: files appear whole or not at all, and one process at a time makes them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock

from impls.models.errors import ModelError


@contextmanager
def making(target: Path) -> Iterator[Path | None]:
    """Yield the temporary path to write ``target`` to, or None if it is there already (another process made it).

    As `replacing` otherwise.
    """
    with replacing(target) as partial:
        yield None if target.exists() else partial


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Yield a temporary path while nobody else makes ``target``; what is written there becomes ``target``.

    The temporary file is renamed if the block ends well, and removed if it does not. ModelError if the cache cannot be
    written.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(target.with_name(target.name + ".lock"))
        lock.acquire()
    except OSError as error:
        raise ModelError(f"cannot write the cache {target.parent} ({error.strerror}): set HARNESS_CACHE") from error
    partial = target.with_name(target.name + ".partial")
    try:
        partial.unlink(missing_ok=True)  # under the lock: what a killed process left
        yield partial
        if partial.exists():
            os.replace(partial, target)
    except OSError as error:
        raise ModelError(
            f"cannot write {target} ({error.strerror or error}): free space or set HARNESS_CACHE"
        ) from error
    finally:
        partial.unlink(missing_ok=True)
        lock.release()
