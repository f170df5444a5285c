from __future__ import annotations

import importlib.util

import pytest
import torch

from impls.attention.auto import resolve_attention
from impls.attention.triton_paged import TritonAttention
from impls.seams import Arm

ARM = Arm({"attention": {"name": "triton", "num_splits": 16}}, None, 128, "cuda", 1)


@pytest.mark.parametrize(
    ("capability", "installed", "name", "reason"),
    [
        ((8, 0), True, "triton", None),
        ((9, 0), True, "triton", None),
        ((7, 5), True, "sdpa", "compute capability 8.0"),
        ((9, 0), False, "sdpa", "package triton"),
    ],
)
def test_auto_and_validate_agree_on_what_a_gpu_can_run(monkeypatch, capability, installed, name, reason):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(importlib.util, "find_spec", lambda package: object() if installed else None)
    assert resolve_attention("cuda") == name
    reasons = TritonAttention.validate(ARM)
    assert [reason in each for each in reasons] == ([True] if reason else [])
