"""Scripts of cases that a test runs once in a process of its own: Triton's interpreter is chosen before it is imported.

A script names its cases in ``CASES`` and ends in `run`; the tests ask for `case_names` and `outcomes`.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from packaging.version import Version

TESTS = Path(__file__).resolve().parent


def case_names(script: Path) -> list[str]:
    """Without running the script, which would import Triton."""
    (cases,) = [
        node.value
        for node in ast.parse(script.read_text()).body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == "CASES"
    ]
    assert isinstance(cases, ast.List)
    return [element.id for element in cases.elts if isinstance(element, ast.Name)]


def outcomes(script: Path) -> dict[str, str]:
    """Case name -> "", or the traceback. With CUDA the kernels run compiled, else interpreted."""
    path = os.pathsep.join(str(each) for each in (TESTS.parent, TESTS, script.parent))
    environment = dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=path)
    if not torch.cuda.is_available():
        environment["TRITON_INTERPRET"] = "1"
        if Version(version("triton")) < Version("3.7") and Version(version("numpy")) >= Version("2.4"):
            pytest.skip("the interpreter of Triton before 3.7 turns arrays into numbers as NumPy 2.4 no longer does")
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


def run(cases: Sequence[Callable[[], None]]) -> None:
    """In the script: print what `outcomes` reads, and how long each case took to stderr."""
    torch.set_num_threads(1)
    results = {}
    for case in cases:
        start = time.perf_counter()
        try:
            case()
            results[case.__name__] = ""
        except Exception:
            results[case.__name__] = traceback.format_exc()
        print(f"{time.perf_counter() - start:6.2f} s  {case.__name__}", file=sys.stderr)
    print(json.dumps(results))
