"""Roofline figures against arithmetic done by hand."""

import pytest

from harness.limits import (
    Peaks,
    attended_positions,
    does_not_fit,
    head_parameters,
    linear_parameters,
    step_cost,
    utilisation,
    weights_bytes,
)
from impls.seams import ModelShape, StepStats

SMOLLM2 = ModelShape(49152, 576, 1536, 30, 9, 3, 64, 8192, tie_embeddings=True)
LLAMA_405B = ModelShape(128256, 16384, 53248, 126, 128, 8, 128, 131072)


def test_parameters_of_published_models():
    # SmolLM2-135M: 134.5 M parameters of which 28.3 M are the tied table; norms (61 x 576) are not counted here.
    assert linear_parameters(SMOLLM2) == 106_168_320
    assert head_parameters(SMOLLM2) == 28_311_552
    # Llama-3.1-405B: 405.9 B in all with both tables.
    assert linear_parameters(LLAMA_405B) + 2 * head_parameters(LLAMA_405B) == pytest.approx(405.85e9, rel=1e-3)
    assert weights_bytes(LLAMA_405B, "bf16") == pytest.approx(811.7e9, rel=1e-3)


def test_attended_positions_of_prefill_chunk_and_decode():
    assert attended_positions([3], [3]) == 1 + 2 + 3
    assert attended_positions([2], [5]) == 4 + 5
    assert attended_positions([1, 1], [7, 9]) == 16


def test_step_cost_by_hand():
    shape = ModelShape(10, 4, 8, 2, 2, 1, 2, 64, tie_embeddings=True)
    # One layer: q,k,v = 4 x (4 + 2 + 2), o = 4 x 4, FFN = 3 x 4 x 8 -> 32 + 16 + 96 = 144; two layers 288; head 40.
    stats = StepStats(0.0, query_lens=[1, 2], kv_lens=[5, 2], num_logits_rows=2, gathered_bytes=7)
    cost = step_cost(shape, stats, resident_bytes=1000, kv_bytes_per_token=16)
    pairs = 5 + (1 + 2)
    assert cost.flops == 2 * 3 * 288 + 2 * 2 * 40 + 4 * pairs * 2 * 2 * 2
    assert cost.bytes == 1000 + (7 + 3) * 16 + 2 * 7


def test_untied_embedding_table_is_not_read_in_a_step():
    tied = ModelShape(10, 4, 8, 2, 2, 1, 2, 64, tie_embeddings=True)
    untied = ModelShape(10, 4, 8, 2, 2, 1, 2, 64, tie_embeddings=False)
    stats = StepStats(0.0, query_lens=[1], kv_lens=[1], num_logits_rows=1)
    costs = [step_cost(s, stats, resident_bytes=1000, kv_bytes_per_token=16).bytes for s in (tied, untied)]
    assert costs[0] - costs[1] == 2 * 10 * 4


def test_fit_names_both_sizes():
    reason = does_not_fit(LLAMA_405B, "bf16", 0, 1, "cpu")
    assert reason is not None and reason.startswith("needs 812 GB, has ")
    assert does_not_fit(SMOLLM2, "bf16", 10**6, 2048, "cpu") is None


def test_utilisation_is_null_without_a_peak():
    steps = [{"flops": 50, "bytes": 10}, {"flops": 50, "bytes": 30}]
    assert utilisation(steps, Peaks(1000.0, 100.0, "measured"), 2.0) == {"mfu": 0.05, "mbu": 0.2}
    assert utilisation(steps, Peaks(None, None, "unknown"), 2.0) == {"mfu": None, "mbu": None}
