"""What a draft head's work, weights and memory count for: FLOPs and bytes of a step, the KV budget, the fit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from head_testing import SOURCE, head_file, outputs

from harness.arm import resolve_study, validate_arm
from harness.compose import compose_arm
from harness.limits import ResidentModel, cost_of_step, forward_cost, observe_cost, resident_models
from impls.decoding.proposers.eagle import EagleProposer
from impls.decoding.proposers.medusa import MedusaProposer
from impls.seams import DraftForward, ModelShape, StepStats

KINDS = ("eagle", "medusa")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("heads")
    return {kind: head_file(folder, kind) for kind in KINDS}


def test_a_head_costs_by_its_own_weights_and_reads_the_targets_rows() -> None:
    # One layer of hidden 4, FFN 8: q, o 16 each, k and v 8 each -> 48 + 96, and fc 32: 176; head 3 x 4.
    shape = ModelShape(3, 4, 8, 1, 2, 1, 2, 64, tie_embeddings=True)
    head = ResidentModel(shape, 376, 24, 0, kv_bytes_per_token=8, row_parameters=176, observe_parameters=48)
    cost = forward_cost(head, [1, 1], [5, 3], num_logits_rows=2)
    assert cost.flops == 2 * 2 * 176 + 2 * 2 * 12 + 4 * (5 + 3) * 4
    assert cost.bytes == 352 + (8 + 2) * 8 + 24
    assert observe_cost(head, 7).flops == 2 * 7 * 48
    assert observe_cost(head, 7).bytes == 352 * 48 // 176 + 7 * 8
    target = ResidentModel(ModelShape(10, 4, 8, 2, 2, 1, 2, 64), 656, 80, 0, 16)
    stats = StepStats(0.0, query_lens=[1, 2], kv_lens=[5, 2], num_logits_rows=2)
    plain, drafted = (
        cost_of_step(models, replace(stats, draft_forwards=forwards))
        for models, forwards in (
            ({"target": target}, []),
            ({"target": target, "head": head}, [DraftForward("head", None, [1, 1], [5, 3])]),
        )
    )
    assert drafted.flops - plain.flops == cost.flops + observe_cost(head, 3).flops
    assert drafted.bytes - plain.bytes == cost.bytes + observe_cost(head, 3).bytes


@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_says_what_its_head_is_and_ran(kind: str, files: dict[str, Path]) -> None:
    _, results, engine = outputs(files[kind])
    models = resident_models(engine, 4)
    head = models["head"]
    eagle = 2 * 64 * 64 + 64 * 64 * 2 + 64 * 64 + 3 * 64 * 128  # fc, q and o, k and v of two heads of 16, FFN
    assert head.row_parameters == (eagle if kind == "eagle" else 64 * 64)
    assert head.observe_parameters == (2 * 64 * 64 + 64 * 64 if kind == "eagle" else 0)
    assert head.kv_bytes_per_token == (2 * 2 * 16 * 4 if kind == "eagle" else 0)
    assert head.table_bytes == 256 * 64 * 4
    assert sum(model.weights_bytes for model in models.values()) == engine.weights_bytes
    step = next(r.stats for r in results if r.stats and r.stats.running == 6 and len(r.stats.draft_forwards) > 0)
    forwards = step.draft_forwards
    assert [len(f.query_lens) for f in forwards] == ([6, 6, 6] if kind == "eagle" else [18])
    without = cost_of_step({"target": models["target"]}, replace(step, draft_forwards=[]))
    assert cost_of_step(models, step).flops > without.flops


def test_states_and_scales_are_part_of_a_positions_bytes() -> None:
    shape = SOURCE.shape  # two K/V heads of 16, hidden size 64
    assert EagleProposer.kv_bytes_per_token(shape, 4) == 2 * 2 * 16 * 4 + 64 * 4
    assert EagleProposer.kv_bytes_per_token(shape, 2) == 2 * 2 * 16 * 2 + 64 * 2
    assert EagleProposer.kv_bytes_per_token(shape, 1) == 2 * 2 * (16 + 2) + 64 * 2
    assert MedusaProposer.kv_bytes_per_token(shape, 2) == 0


def resolved(path: Path, *overrides: str) -> dict[str, Any]:
    base = ("study=none", "model=tiny", "device=cpu", "attention=sdpa", "kv_cache.budget=4096tokens")
    own = ("decoding=speculative", f"proposer={path.stem}", f"proposer.head={path}")
    return resolve_study({"arm": compose_arm([*base, *own, *overrides])})["arm"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_heads_weights_must_fit_too(kind: str, files: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    config = resolved(files[kind])
    needed = 0

    def memory(device: str) -> int:
        return needed

    monkeypatch.setattr("harness.limits.memory_total_bytes", memory)
    needed = 10**12
    assert validate_arm(config) == []
    target = 2 * (73_728 + 2 * 32_768)  # BF16: projections, two tables
    activations = 2048 * 4 * 2 * (64 + 128)
    head = files[kind].stat().st_size + 256 * 64 * 2
    needed = target + activations + config["kv_cache"]["budget_bytes"] + head
    assert validate_arm(config) == []
    needed -= 1
    assert [why[:5] for why in validate_arm(config)] == ["needs"]


def test_eagles_keys_do_not_come_along_with_a_hand_over(files: dict[str, Path]) -> None:
    [reason] = validate_arm(resolved(files["eagle"], "topology=disaggregated"))
    assert reason.startswith("proposer=eagle: topology=disaggregated hands over the target's keys and values alone")
    assert validate_arm(resolved(files["eagle"], "topology=replicas")) == []
    assert validate_arm(resolved(files["medusa"], "topology=disaggregated")) == []
