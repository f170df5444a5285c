"""Runs triton_split_cases.py once in a process of its own: the interpreter must be chosen before Triton is imported."""

from __future__ import annotations

from pathlib import Path

import case_scripts
import pytest

SCRIPT = Path(__file__).with_name("triton_split_cases.py")


@pytest.mark.parametrize("name", case_scripts.case_names(SCRIPT))
def test_splits(outcomes, name):
    assert outcomes[name] == "", outcomes[name]
