"""A headless chromium driven over its debugging pipe: what a page draws, logs and asks the network for."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
QUIET = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--remote-debugging-pipe"),
    # A mouse, as on a desk: without one Plotly shows its buttons all the time.
    "--blink-settings=primaryHoverType=2,availableHoverTypes=2,primaryPointerType=4,availablePointerTypes=4",
)
LAUNCH = "import os, sys; r, w, *c = sys.argv[1:]; os.dup2(int(r), 3); os.dup2(int(w), 4); os.execvp(c[0], c)"


def find_browser() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Navigated(AssertionError):
    """The page left while it was asked: its answer went with it."""


LEFT = (
    "Inspected target navigated or closed",
    "Execution context was destroyed.",
    "Cannot find default execution context",
)


class Page:
    """One open page. ``console``: messages of level error or warning and uncaught exceptions; ``requests``: URLs."""

    def __init__(self, read: int, write: int, pid: int) -> None:
        self._read, self._write, self._buffer, self._last = read, write, b"", 0
        self._process = psutil.Process(pid)
        self.console: list[str] = []
        self.requests: list[str] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self._call(f"{domain}.enable")

    _session: str | None = None  # until the page is attached, calls go to the browser

    def open(self, path: Path, width: int = 1400, height: int = 3400) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._call("Emulation.setDeviceMetricsOverride", **size)
        self.prefer("light")
        self._call("Page.navigate", url=path.as_uri())
        self.wait_for(f"location.href === {json.dumps(path.as_uri())} && document.readyState === 'complete'")

    def reload(self) -> None:
        self.evaluate("window.isOld = true")  # the old page answers until the new one is there
        self._call("Page.reload")
        self.wait_for("!window.isOld && document.readyState === 'complete'")

    def prefer(self, theme: str) -> None:
        """What the system says that its user prefers: light or dark."""
        self._call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])

    def evaluate(self, expression: str) -> Any:
        """The JSON value of an expression, a promise's once it is settled."""
        found = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise AssertionError(f"{expression}: {found['exceptionDetails']}")
        return found["result"].get("value")

    def wait_for(self, condition: str, seconds: float = 45.0) -> None:
        end = time.monotonic() + seconds
        while not self._holds(condition):
            if time.monotonic() > end:
                raise AssertionError(f"not within {seconds} s: {condition}; console: {self.console}")
            time.sleep(0.1)

    def _holds(self, condition: str) -> bool:
        try:
            return bool(self.evaluate(f"!!({condition})"))
        except Navigated:
            return False

    def cpu_seconds(self) -> float:
        """Of all the browser's processes so far."""
        times = [process.cpu_times() for process in (self._process, *self._process.children(recursive=True))]
        return sum(each.user + each.system for each in times)

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._call("Page.captureScreenshot", format="png")["data"]))

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._last += 1
        message: dict[str, Any] = {"id": self._last, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._last:
                if "error" in answer:
                    left = answer["error"].get("message") in LEFT
                    raise (Navigated if left else AssertionError)(f"{method}: {answer['error']}")
                return dict(answer["result"])
            self._note(answer)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            if not select.select([self._read], [], [], 60)[0]:
                raise AssertionError("the browser does not answer")
            part = os.read(self._read, 1 << 20)
            if not part:
                raise AssertionError("the browser has gone")
            self._buffer += part
        message, self._buffer = self._buffer.split(b"\0", 1)
        return dict(json.loads(message))

    def _note(self, event: dict[str, Any]) -> None:
        method, params = event.get("method"), event.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.console.append(str(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.console.append(str([arg.get("value", arg.get("description")) for arg in params["args"]]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.console.append(params["entry"]["text"])


def _above_4(fd: int) -> int:
    """The same end of a pipe under a number that does not collide with the 3 and 4 that chromium wants."""
    moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(fd)
    return moved


@contextlib.contextmanager
def open_browser(program: str) -> Iterator[Page]:
    """A browser with an empty profile; ended, and its profile removed, when the block ends."""
    theirs_read, ours_write, ours_read, theirs_write = (_above_4(fd) for fd in (*os.pipe(), *os.pipe()))
    profile = tempfile.mkdtemp(prefix="report-browser-")
    command = [program, *QUIET, f"--user-data-dir={profile}", "about:blank"]
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCH, str(theirs_read), str(theirs_write), *command],
        pass_fds=(theirs_read, theirs_write),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(theirs_read)
    os.close(theirs_write)
    try:
        yield Page(ours_read, ours_write, process.pid)
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(ours_read)
        os.close(ours_write)
        shutil.rmtree(profile, ignore_errors=True)
