"""On a GPU the host must not wait for what a step computes. Meta tensors have no values: whoever asks for one fails."""

from __future__ import annotations

import pytest
import torch

from impls.decoding.autoregressive import AutoregressiveDecoder
from impls.execution.overlap import overlap_reasons
from impls.request import Request, SamplingParams
from impls.seams import Arm
from impls.upload import upload

META = torch.device("meta")
VOCAB = 512  # at most the nucleus's first guess, beyond which it is asked whether that sufficed


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """How tensors came to the device; pinning needs a GPU and is left out."""
    seen: list[str] = []
    move = torch.Tensor.to

    def pinned(tensor: torch.Tensor) -> torch.Tensor:
        seen.append("pinned")
        return tensor

    def to(tensor: torch.Tensor, *given: object, **options: object) -> torch.Tensor:
        if tensor.device.type == "cpu":  # others are converted where they are
            seen.append("queued" if options.get("non_blocking") else "waited for")
        return move(tensor, *given, **options)

    monkeypatch.setattr(torch.Tensor, "pin_memory", pinned)
    monkeypatch.setattr(torch.Tensor, "to", to)
    return seen


def test_what_the_host_makes_is_pinned_and_its_copy_queued(copies: list[str]) -> None:
    there = upload([[1, 2], [3, 4]], META)
    assert copies == ["pinned", "queued"]
    assert there.device.type == "meta" and there.shape == (2, 2) and there.dtype == torch.int64


def test_on_a_cpu_nothing_is_copied(copies: list[str]) -> None:
    here = upload([0.5, 2], torch.device("cpu"), torch.float64)
    assert here.tolist() == [0.5, 2.0] and here.dtype == torch.float64 and copies == []


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.0},
        {"temperature": 0.7},
        {"temperature": 0.7, "top_k": 5},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 0.7, "top_p": 0.9, "top_k": 50},
    ],
    ids=str,
)
def test_a_sampled_batch_is_not_waited_for(sampling: dict[str, float], copies: list[str]) -> None:
    params = [SamplingParams(max_tokens=4, **sampling), SamplingParams(max_tokens=4)]  # type: ignore[arg-type]
    requests = [Request(str(i), (1, 2), each) for i, each in enumerate(params)]
    tokens = AutoregressiveDecoder(vocab_size=VOCAB).sample(requests, [2, 2], torch.empty(2, VOCAB, device=META))
    assert tokens.device.type == "meta" and tokens.shape == (2,)
    assert "waited for" not in copies


@pytest.mark.parametrize(
    ("device", "attention", "refused"),
    [("cuda", "sdpa", True), ("cuda", "reference", True), ("cuda", "triton", False), ("cpu", "sdpa", False)],
)
def test_attention_that_waits_is_refused_on_a_gpu(device: str, attention: str, refused: bool) -> None:
    names = {"attention": attention, "decoding": "autoregressive", "batching": "continuous"}
    arm = Arm({axis: {"name": name} for axis, name in names.items()}, None, 128, device, 1)  # type: ignore[arg-type]
    reasons = overlap_reasons(arm, "on")
    assert bool(reasons) == refused
    assert all(f"attention={attention}" in reason for reason in reasons)
    assert overlap_reasons(arm, "off") == []
