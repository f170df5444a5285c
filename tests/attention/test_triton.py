"""Runs triton_cases.py once in a process of its own (the interpreter must be chosen before Triton is imported)."""

from __future__ import annotations

import ast
from pathlib import Path

import case_scripts
import pytest
import torch

from impls.attention.auto import resolve_attention
from impls.attention.triton_paged import TritonAttention, next_power_of_2, tile
from impls.seams import Arm

SCRIPT = Path(__file__).with_name("triton_cases.py")


@pytest.mark.parametrize("name", case_scripts.case_names(SCRIPT))
def test_kernel(outcomes, name):
    assert outcomes[name] == "", outcomes[name]


def test_no_case_is_left_out():
    defined = {
        node.name
        for node in ast.parse(SCRIPT.read_text()).body
        if isinstance(node, ast.FunctionDef) and not node.args.args and node.name != "main"
    }
    assert defined == set(case_scripts.case_names(SCRIPT))


def arm(device: str, num_splits: int = 16) -> Arm:
    return Arm({"attention": {"name": "triton", "num_splits": num_splits}}, None, 128, device, 1)


def test_validate_gives_its_reasons():
    assert TritonAttention.validate(arm("cpu")) == ["needs CUDA (set TRITON_INTERPRET=1 only for tests)"]
    assert any("power of two" in reason for reason in TritonAttention.validate(arm("cuda", 12)))


@pytest.mark.parametrize("group", [1, 3, 4, 8, 71])
@pytest.mark.parametrize("max_query_len", [1, 2, 500])
@pytest.mark.parametrize(("head_dim", "element_bytes"), [(64, 2), (128, 2), (128, 4), (256, 4)])
def test_a_tile_holds_a_whole_group_and_suits_the_tensor_cores(group, max_query_len, head_dim, element_bytes):
    rows, keys, _ = tile(max_query_len, group, head_dim, element_bytes)
    assert rows >= 16
    assert rows >= group
    assert rows == next_power_of_2(rows)
    resident = (rows + 2 * 2 * keys) * next_power_of_2(head_dim) * element_bytes
    assert group > 16 or head_dim > 128 or resident <= 100 * 1024


def test_auto_never_names_what_the_device_cannot_run():
    assert resolve_attention("cuda") in ("triton", "sdpa")
    assert resolve_attention(torch.device("cpu")) in ("native", "sdpa")
