"""Runs tests with one module changed: `python forge.py` reads a mutant a line, in JSON, and answers each.

What the tests import from elsewhere is imported once; each mutant gets a fork of this process, where the module is
compiled from the changed text. Nothing is written, neither sources nor bytecode. An answer is {"status", "output"}:
pytest's exit status, negative for a signal (after `LIMIT_S` the alarm's), `NOT_LOADED` if the tests never imported the
module.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import CodeType, ModuleType

import pytest
from hypothesis import Phase, settings

ROOT = Path(__file__).resolve().parents[2]
COMMON = ("gguf", "hypothesis.stateful", "jinja2", "safetensors.torch", "scipy.stats", "tokenizers")
LIMIT_S = 120
NOT_LOADED = 99


class Mutant(SourceFileLoader, MetaPathFinder):
    """Finds one module, and loads it with ``text`` replaced."""

    def __init__(self, file: str, text: str, replacement: str) -> None:
        super().__init__(file.removesuffix(".py").replace("/", "."), str(ROOT / file))
        self.text, self.replacement = text, replacement

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return spec_from_file_location(fullname, self.path, loader=self) if fullname == self.name else None

    def get_code(self, fullname: str) -> CodeType:
        """Past any cached bytecode."""
        source = Path(self.path).read_text()
        return self.source_to_code(source.replace(self.text, self.replacement), self.path)


class FirstFailure:
    """It will do, however long its example."""

    def pytest_sessionstart(self) -> None:
        settings.register_profile("mutant", phases=[Phase.explicit, Phase.generate], report_multiple_bugs=False)
        settings.load_profile("mutant")


def run(mutant: Mutant | None, nodes: Sequence[str]) -> int:
    """pytest's exit status."""
    if mutant is not None:
        faulthandler.register(signal.SIGALRM, os.dup(2), chain=True)  # where it hung, past pytest's capture
        signal.alarm(LIMIT_S)
        sys.meta_path.insert(0, mutant)
    # Plain: on CI pytest explains an unequal pair by a full diff, which takes minutes for lists of hundreds of items.
    options = ["-q", "-x", "-o", "addopts=", "-p", "no:cacheprovider", "--assert=plain"]
    status = pytest.main([*options, *(str(ROOT / "tests" / node) for node in nodes)], [FirstFailure()])
    return NOT_LOADED if mutant is not None and mutant.name not in sys.modules else int(status)


def main() -> None:
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # a fork takes one thread along: this process must not have more
    for name in COMMON:
        import_module(name)
    sys.path.insert(0, str(ROOT))
    os.chdir(ROOT)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # loading them takes as long as most of the tests
    for line in sys.stdin:
        job = json.loads(line)
        with tempfile.TemporaryFile() as output:
            if not (child := os.fork()):
                for stream in (1, 2):
                    os.dup2(output.fileno(), stream)
                status = 3  # what pytest calls an internal error
                try:
                    status = run(Mutant(*job["change"]) if job["change"] else None, job["nodes"])
                finally:
                    sys.stdout.flush()
                    sys.stderr.flush()
                    os._exit(status)
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            output.seek(0)
            print(json.dumps({"status": status, "output": output.read().decode(errors="replace")[-6000:]}), flush=True)


if __name__ == "__main__":
    main()
