"""The process that trials are forked from, and others that must not compute in this one."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import forkserver, util
from multiprocessing.context import ForkServerContext, SpawnContext
from pathlib import Path
from typing import TypeVar

ROOT = str(Path(__file__).resolve().parent.parent)
STOPS = (signal.SIGINT, signal.SIGTERM)
# Every trial is forked from one server that has imported torch and neither computed nor opened a GPU context: a trial
# is a new process without the seconds of its imports. Where forking loaded libraries is unsafe, it starts from nothing.
HAS_SERVER = sys.platform == "linux"
PRELOAD = ["harness.trial"]
LONGEST_FOLDER = 107 - len("/pymp-12345678/listener-12345678")  # bytes: a socket's path is bounded, and its folder so

T = TypeVar("T")


def import_ahead() -> None:
    """Start the imports of the first trial now, beside whatever else is to be done before it. Returns at once.

    The server is deaf to Ctrl-C and SIGTERM from its first moment on, for they are sent to whole groups of processes
    too (by `timeout`, `scancel`): who started it has to answer them, and without it a trial could not tell its end.
    """
    if not HAS_SERVER:
        return
    _make_socket_folder()
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOAD)
    own = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [ROOT, own]))  # the server is to find us from any folder
    is_main = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in STOPS} if is_main else {}
    try:
        forkserver.ensure_running()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if own is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = own


def _make_socket_folder() -> None:
    """Where the server's socket will lie: multiprocessing's own choice, unless TMPDIR is too long for a socket."""
    own = tempfile.gettempdir()
    if len(os.fsencode(own)) <= LONGEST_FOLDER:
        return
    tempfile.tempdir = "/tmp"
    try:
        util.get_temp_dir()  # made once, and remembered by this process and its children
    finally:
        tempfile.tempdir = own


def process_context() -> ForkServerContext | SpawnContext:
    return multiprocessing.get_context("forkserver") if HAS_SERVER else multiprocessing.get_context("spawn")


def in_another_process(function: Callable[[], T]) -> T:
    """What ``function`` returns or raises, in a process that ends with it."""
    import_ahead()
    hear = partial(signal.signal, signal.SIGTERM, signal.SIG_DFL)  # the server it is forked from does not
    with ProcessPoolExecutor(1, mp_context=process_context(), initializer=hear) as pool:
        return pool.submit(function).result()
