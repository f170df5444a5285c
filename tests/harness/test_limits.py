"""Roofline figures against arithmetic done by hand."""

import math
from dataclasses import replace

import pytest

from harness.arm import draft_options, option, weight_bits
from harness.drive import RealClock
from harness.limits import (
    Peaks,
    ResidentModel,
    attended_positions,
    cost_of_step,
    datasheet_peaks,
    does_not_fit,
    forward_cost,
    head_parameters,
    linear_parameters,
    resident_models,
    utilisation,
    weights_bytes,
)
from harness.recorder import Recorder
from impls.build import build_engine
from impls.models.source import open_model
from impls.request import Request, SamplingParams
from impls.seams import DraftForward, ModelShape, StepResult, StepStats

SMOLLM2 = ModelShape(49152, 576, 1536, 30, 9, 3, 64, 8192, tie_embeddings=True)
ARM = {
    **{"model": "tiny", "batching": "continuous", "kv_cache": "paged", "kv_dtype": "auto", "decoding": "speculative"},
    **{"precision": "fp32", "attention": "reference", "execution": "eager", "prefix": "off"},
}
LLAMA_405B = ModelShape(128256, 16384, 53248, 126, 128, 8, 128, 131072)


def test_parameters_of_published_models():
    # SmolLM2-135M: 134.5 M parameters of which 28.3 M are the tied table; norms (61 x 576) are not counted here.
    assert linear_parameters(SMOLLM2) == 106_168_320
    assert head_parameters(SMOLLM2) == 28_311_552
    # Llama-3.1-405B: 405.9 B in all with both tables.
    assert linear_parameters(LLAMA_405B) + 2 * head_parameters(LLAMA_405B) == pytest.approx(405.85e9, rel=1e-3)
    assert weights_bytes(LLAMA_405B, 16) == pytest.approx(811.7e9, rel=1e-3)


def test_attended_positions_of_prefill_chunk_and_decode():
    assert attended_positions([3], [3]) == 1 + 2 + 3
    assert attended_positions([2], [5]) == 4 + 5
    assert attended_positions([1, 1], [7, 9]) == 16


# One layer: q,k,v = 4 x (4 + 2 + 2), o = 4 x 4, FFN = 3 x 4 x 8 -> 32 + 16 + 96 = 144; two layers 288; head 40.
# K/V: 2 layers x K and V x 1 head of 2 x two bytes = 16. Weights in BF16: 576 + 80 of the tied table = 656.
TINY = ModelShape(10, 4, 8, 2, 2, 1, 2, 64, tie_embeddings=True)
TARGET = ResidentModel(TINY, weights_bytes=656, table_bytes=80, lookup_bytes=0, kv_bytes_per_token=16)
STATS = {"query_lens": [1, 2], "kv_lens": [5, 2], "num_logits_rows": 2, "gathered_bytes": 8}
PAIRS = 5 + (1 + 2)


def test_step_cost_by_hand():
    cost = cost_of_step({"target": TARGET}, StepStats(0.0, **STATS))
    assert cost.flops == 2 * 3 * 288 + 2 * 2 * 40 + 4 * PAIRS * 2 * 2 * 2
    assert cost.bytes == 656 + (7 + 3) * 16 + 2 * 8


def test_untied_embedding_table_is_not_read_in_a_step():
    untied = replace(TARGET, lookup_bytes=80, weights_bytes=656 + 80)
    costs = [forward_cost(model, [1], [1], num_logits_rows=1) for model in (TARGET, untied)]
    assert costs[0] == costs[1]


def test_the_first_layers_drafting_cost_their_share_and_a_whole_head():
    stats = StepStats(0.0, **STATS, draft_forwards=[DraftForward("target", 1, [1, 1], [6, 3], gathered_bytes=20)])
    plain, drafted = (cost_of_step({"target": TARGET}, s) for s in (StepStats(0.0, **STATS), stats))
    assert drafted.flops - plain.flops == 2 * 2 * 144 + 2 * 2 * 40 + 4 * (6 + 3) * 1 * 2 * 2
    assert drafted.bytes - plain.bytes == 288 + 80 + (9 + 2) * 8 + 2 * 10


def test_a_draft_model_costs_by_its_own_shape_and_bytes_in_every_forward():
    # One layer of one head: q,k,v = 2 x 3 x 2, o = 4, FFN = 3 x 2 x 4 -> 40; head 20. INT8 layers, BF16 untied tables.
    shape = ModelShape(10, 2, 4, 1, 1, 1, 2, 64, tie_embeddings=False)
    draft = ResidentModel(shape, weights_bytes=40 + 40 + 40, table_bytes=40, lookup_bytes=40, kv_bytes_per_token=8)
    forwards = [DraftForward("draft", None, [3, 1], [4, 2]), DraftForward("draft", None, [1], [5])]
    stats = StepStats(0.0, **STATS, draft_forwards=forwards)
    plain = cost_of_step({"target": TARGET}, StepStats(0.0, **STATS))
    drafted = cost_of_step({"target": TARGET, "draft": draft}, stats)
    first = 2 * 4 * 40 + 2 * 2 * 20 + 4 * (2 + 3 + 4 + 2) * 2
    second = 2 * 1 * 40 + 2 * 1 * 20 + 4 * 5 * 2
    assert drafted.flops - plain.flops == first + second
    assert drafted.bytes - plain.bytes == 2 * (40 + 40) + (6 + 4) * 8 + (5 + 1) * 8


def test_the_recorder_hands_on_each_steps_drafting():
    drafting = StepStats(0.0, 1.0, **STATS, draft_forwards=[DraftForward("target", 1, [1, 1], [6, 3])])
    plain = StepStats(1.0, 2.0, **STATS)
    recorder = Recorder()
    for stats in (plain, drafting, plain):
        recorder.step(StepResult([], stats))
    models = {"target": TARGET}
    steps = recorder.steps(lambda stats: cost_of_step(models, stats))
    costs = [cost_of_step(models, stats) for stats in (plain, drafting, plain)]
    assert steps["flops"].tolist() == [cost.flops for cost in costs] and costs[1].flops > costs[0].flops
    assert steps["bytes"].tolist() == [cost.bytes for cost in costs]


@pytest.mark.parametrize(
    ("proposer", "options"),
    [
        ("draft_model", {"model": "tiny", "precision": "fp32", "num_draft_tokens": 3}),
        ("layer_skip", {"num_layers": 1, "num_draft_tokens": 3}),
    ],
)
def test_an_engine_records_what_its_drafting_ran(proposer, options):
    source = open_model(option("model", "tiny"))
    config = {group: option(group, name) for group, name in ARM.items()} | {"device": {"name": "cpu"}}
    config["proposer"] = {**option("proposer", proposer), **options}
    config["batching"] |= {"max_num_seqs": 2, "max_num_batched_tokens": 2048}
    config["kv_cache"] = {**config["kv_cache"], "budget_bytes": 10**6}
    if draft := draft_options(config):
        config["draft"] = draft
    engine = build_engine(config, source, RealClock())
    engine.add_request(Request("a", (1, 2, 3, 4, 5), SamplingParams(max_tokens=16)))
    prefill, decode = (engine.step(math.inf).stats for _ in range(2))
    name, layers = ("draft", None) if proposer == "draft_model" else ("target", 1)
    # A draft model first reads the prompt and the first token; the target's layers have read all but that token.
    rows = 6 if proposer == "draft_model" else 1
    seen = [(f.model, f.num_layers, f.query_lens, f.kv_lens) for f in prefill.draft_forwards]
    assert seen == [(name, layers, [rows], [6]), (name, layers, [1], [7]), (name, layers, [1], [8])]
    assert len(decode.draft_forwards) == 3  # each step's own
    models = resident_models(engine, 4)
    assert list(models) == (["target", "draft"] if proposer == "draft_model" else ["target"])
    assert sum(model.weights_bytes for model in models.values()) == engine.weights_bytes
    assert models["target"].table_bytes == 512 * 64 * 4 and models[name].kv_bytes_per_token == 2 * 2 * 2 * 16 * 4
    without = cost_of_step(models, replace(prefill, draft_forwards=[]))
    assert cost_of_step(models, prefill).flops > without.flops


def test_fit_names_both_sizes():
    reason = does_not_fit([(LLAMA_405B, 16.0)], 0, 1, "cpu")
    assert reason is not None and reason.startswith("needs 812 GB, has ")
    assert does_not_fit([(SMOLLM2, 16.0)], 10**6, 2048, "cpu") is None


def test_fit_counts_every_model_and_the_wider_ones_activations(monkeypatch):
    # SmolLM2 in BF16: 134,479,872 weights of two bytes; as its own INT8 draft 106,168,320 + 2 x 28,311,552.
    # Activations of 1000 rows: 4 bytes x 2 x (576 + 1536).
    needed = 268_959_744 + 162_791_424 + 5_000 + 1000 * 16_896
    models = [(SMOLLM2, weight_bits(option("precision", name))) for name in ("bf16", "int8")]
    for memory, fits in ((needed, True), (needed - 1, False)):
        monkeypatch.setattr("harness.limits.memory_total_bytes", lambda device, has=memory: has)
        assert (does_not_fit(models, 5_000, 1000, "cpu") is None) is fits


def test_utilisation_is_null_without_a_peak():
    assert utilisation(100, 40, Peaks(1000.0, 100.0, "measured"), 2.0) == {"mfu": 0.05, "mbu": 0.2}
    assert utilisation(100, 40, Peaks(None, None, "unknown"), 2.0) == {"mfu": None, "mbu": None}


@pytest.mark.parametrize(
    "name",
    [
        *("NVIDIA L40S", "NVIDIA L40", "NVIDIA GH200 480GB", "NVIDIA GB200", "NVIDIA H200 MIG 1g.18gb"),
        *("NVIDIA H200 NVL MIG 1g.18gb", "NVIDIA H200-141C", "NVIDIA L4-24Q", "NVIDIA B200 NVL"),
        *("NVIDIA H100 PCIe", "NVIDIA H100 NVL", "NVIDIA A100 80GB PCIe", "GRID A100-SXM4-80GB"),
    ],
)
def test_a_gpu_of_another_name_and_a_slice_of_one_are_in_no_datasheet(name):
    assert datasheet_peaks(name, "bf16") is None


@pytest.mark.parametrize(
    ("name", "flops", "bandwidth"),
    [
        ("NVIDIA L4", 121e12, 300e9),
        ("NVIDIA H200", 989.4e12, 4800e9),
        ("NVIDIA H200 NVL", 835.5e12, 4800e9),
        ("NVIDIA B200", 2250e12, 8e12),
        ("NVIDIA A100-SXM4-80GB", 312e12, 2039e9),
        ("A100-SXM4-40GB", 312e12, 1555e9),  # as drivers before 460 name it
    ],
)
def test_a_gpu_of_the_datasheet_has_its_peaks(name, flops, bandwidth):
    assert datasheet_peaks(name, "bf16") == Peaks(flops, bandwidth, "datasheet")
