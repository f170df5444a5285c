"""Locks that processes share, and who holds them: one run in a folder, one trial at a time on a device."""

from __future__ import annotations

import fcntl
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# Where any user may make a file and nobody can remove another's (mode 1777). Not the temporary folder: that is a
# session's own (TMPDIR), and two sessions that lock two files measure at once on one device.
SHARED = ("/run/lock", "/var/tmp")
LONGEST = 4096  # bytes of what a holder says of itself


@contextmanager
def held(path: Path, holder: str, on_busy: Callable[[str], None], *, shared: bool = False) -> Iterator[None]:
    """Hold the lock of this file. Where another has it, ``on_busy`` is told the ``holder`` that that one gave, and may
    raise; else it is waited for. ``shared``: any user of the machine may hold it.

    Plain `flock`: the kernel gives it back whenever its process ends, and the file may be another user's (filelock
    refuses such a one in a shared folder). The file stays: were it removed, one that waits would get a lock that nobody
    else sees.
    """
    file = _open(path, shared)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_busy(os.pread(file, LONGEST, 0).decode(errors="replace") or "a process that has just begun")
            fcntl.flock(file, fcntl.LOCK_EX)
        os.ftruncate(file, 0)
        os.pwrite(file, holder.encode(errors="replace")[:LONGEST], 0)
        yield
    finally:
        os.close(file)


def shared_folder() -> Path:
    """Where the locks of this machine's devices lie: the same for each of its processes, whoever runs them.

    ``HARNESS_LOCKS`` if set. Every process judges the folders of `SHARED` by their mode and so comes to the same one;
    on a machine that has none of them, the temporary folder.
    """
    if own := os.environ.get("HARNESS_LOCKS"):
        return Path(own).expanduser()
    for folder in map(Path, SHARED):
        with suppress(OSError):
            if stat.S_IMODE(folder.stat().st_mode) == 0o1777:
                return folder
    return Path(tempfile.gettempdir())


def _open(path: Path, shared: bool) -> int:
    while True:
        try:
            return os.open(path, os.O_RDWR | os.O_NOFOLLOW)
        except FileNotFoundError:
            # Not O_CREAT alone: Linux refuses it for another user's file in such a folder (fs.protected_regular).
            with suppress(FileExistsError):
                file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
                if shared:
                    os.fchmod(file, 0o666)  # whatever the umask says
                return file
