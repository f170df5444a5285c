"""Medusa's heads in the engine: each draft is its own head's, from the state of the last token that was computed."""

from __future__ import annotations

from pathlib import Path

import engine_testing as arms
import pytest
import torch
from head_testing import CASES, HIDDEN, MEDUSA_HEADS, SOURCE, head_file, outputs, target_states
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from impls.build import describe_arm, validate_axes
from impls.decoding.proposers.medusa import MedusaProposer
from impls.models.draft_heads import find_head, permuted
from impls.models.medusa_heads import MedusaHeads
from impls.models.tensors import HEAD
from impls.precision.fp32 import Fp32

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return head_file(tmp_path_factory.mktemp("head"), "medusa")


def by_the_book(path: Path, state: torch.Tensor) -> torch.Tensor:
    """[heads, draft vocabulary]: one head after another."""
    tensors = find_head("medusa", str(path), SOURCE.fingerprint).tensors()
    rows = SOURCE.weights()[HEAD][tensors["token_ids"]]
    layers = zip(tensors["weight"], tensors["bias"], strict=True)
    return torch.stack([rows @ (state + torch.nn.functional.silu(w @ state + b)) for w, b in layers])


@pytest.mark.parametrize("case", ["plain", "chunked", "preempted", "hash_chain", "static"])
def test_drafts_are_those_of_the_heads_one_by_one(case: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through rejections, chunks, hits, preemptions and rows that others left."""
    seen: list[tuple[list[int], list[int]]] = []
    original = MedusaProposer.propose

    def watched(self, sequences, k, runner):  # type: ignore[no-untyped-def]
        drafts = original(self, sequences, k, runner)
        assert {i: len(d.token_ids) for i, d in drafts.items()} == {i: count for i, count in k.items() if count}
        seen.extend((list(s.token_ids), list(drafts[s.seq_id].token_ids)) for s in sequences)
        return drafts

    monkeypatch.setattr(MedusaProposer, "propose", watched)
    outputs(path, **CASES[case])
    assert len(seen) > 50
    states, compared = target_states(), 0
    for tokens, drafts in seen[::7]:
        logits = by_the_book(path, states(tokens[:-1])[-1])
        best = logits.topk(2).values
        for head, draft in enumerate(drafts):
            if best[head, 0] - best[head, 1] > 1e-3:
                assert draft == 2 * int(logits[head].argmax())
                compared += 1
    assert compared > 20


def test_more_drafts_than_heads_and_a_wrong_draft_sampling_are_refused(path: Path) -> None:
    def reasons(**options: object) -> list[str]:
        config = arms.arm_config(
            budget_tokens=500, source=SOURCE, max_model_len=128, model="tiny", decoding="speculative",
            proposer=("medusa", {"head": str(path), **options}),
        )  # fmt: skip
        return validate_axes(describe_arm(config, SOURCE))

    assert reasons(num_draft_tokens=MEDUSA_HEADS) == []
    assert reasons(num_draft_tokens=MEDUSA_HEADS + 1) == [
        "proposer=medusa: proposer.num_draft_tokens=5: must be at most 4, one head a draft"
    ]
    assert "must be one of request, greedy" in reasons(draft_sampling="beam")[0]


def test_permuted_heads_are_the_same_heads(path: Path) -> None:
    tensors = find_head("medusa", str(path), SOURCE.fingerprint).tensors()
    tensors["lm_head.weight"] = torch.randn(len(tensors["token_ids"]), HIDDEN)
    order = torch.randperm(HIDDEN, generator=torch.Generator().manual_seed(2))
    states = torch.randn(5, HIDDEN)
    plain = MedusaHeads(tensors, SOURCE.shape, Fp32(CPU), CPU, 3)
    moved = MedusaHeads(permuted(tensors, order), SOURCE.shape, Fp32(CPU), CPU, 3)
    found = [heads.logits(heads.forward(x).flatten(0, 1)) for heads, x in ((plain, states), (moved, states[:, order]))]
    torch.testing.assert_close(*found, atol=1e-4, rtol=1e-4)


def test_logits_that_are_not_finite_end_a_sequences_drafts(path: Path, tmp_path: Path) -> None:
    tensors = load_file(path)
    tensors["bias"][1] = torch.nan
    with safe_open(path, "pt") as file:
        save_file(tensors, tmp_path / path.name, file.metadata())
    alone, _, _ = outputs(None)
    found, results, _ = outputs(tmp_path / path.name)
    assert found == alone
    drafted = [n for r in results if r.stats for n, _ in r.stats.drafted.values()]
    assert drafted and set(drafted) == {1}
