"""EAGLE's head in the engine: random weights must not change a token, whatever happens to the blocks they lie in."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import engine_testing as arms
import pytest
import torch
from head_testing import CASES, HIDDEN, SOURCE, head_file, outputs, target_states

from impls.build import describe_arm, validate_axes
from impls.decoding.proposers.eagle import EagleProposer
from impls.models.draft_heads import find_head, permuted
from impls.models.eagle_head import EagleHead
from impls.precision.fp32 import Fp32


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return head_file(tmp_path_factory.mktemp("head"), "eagle")


@pytest.mark.parametrize(
    ("case", "kind"), [*((case, "eagle") for case in CASES), ("static", "medusa"), ("preempted", "medusa")]
)
def test_greedy_tokens_are_those_without_drafts(case: str, kind: str, tmp_path: Path) -> None:
    choices = dict(CASES[case])
    alone, _, _ = outputs(None, shared=int(choices.get("shared", 0)))
    found, results, _ = outputs(head_file(tmp_path, kind), **choices)
    assert found == alone
    stats = [result.stats for result in results if result.stats]
    assert sum(s.draft_tokens for s in stats) > 100
    if case in ("preempted", "swapped"):
        assert sum(s.preempted for s in stats) > 0
    if "shared" in choices:
        assert sum(sum(s.cached_prompt_tokens.values()) for s in stats) > 0


def reference(head: EagleHead, tokens: list[int], states: torch.Tensor) -> torch.Tensor:
    """Predicted states of every row from one causal pass over the whole sequence; states: [n - 1, hidden]."""
    shape = head.shape
    before = torch.cat((torch.zeros(1, HIDDEN), states))
    ids = torch.tensor(tokens)

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        groups = shape.num_heads // shape.num_kv_heads
        k, v = (each.repeat_interleave(groups, 1).transpose(0, 1) for each in (k, v))
        attended = torch.nn.functional.scaled_dot_product_attention(q.transpose(0, 1), k, v, is_causal=True)
        return attended.transpose(0, 1)

    return head.forward(ids, before, torch.arange(len(tokens)), attend)


@pytest.mark.parametrize("case", ["plain", "chunked", "preempted", "swapped", "hash_chain", "static"])
def test_drafts_are_those_of_one_pass_over_the_whole_sequence(
    case: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Incremental keys, values and states equal the full ones, through rejections, chunks, hits and preemptions; and a
    later draft reads what the one before it predicted."""
    states = target_states()
    seen: list[tuple[list[int], int, torch.Tensor]] = []  # tokens with drafts, how many of them are drafts, logits
    original = EagleProposer.propose

    def watched(self, sequences, k, runner):  # type: ignore[no-untyped-def]
        chains = {s.seq_id: list(s.token_ids) for s in sequences}
        lengths = {s.seq_id: s.num_tokens for s in sequences}
        forward = self._forward

        def kept(tokens, starts, run):  # type: ignore[no-untyped-def]
            logits = forward(tokens, starts, run)
            for seq_id, row in zip(tokens, logits, strict=True):
                chains[seq_id][starts[seq_id] :] = tokens[seq_id]
                seen.append((list(chains[seq_id]), len(chains[seq_id]) - lengths[seq_id], row.clone()))
            return logits

        monkeypatch.setattr(self, "_forward", kept)
        drafts = original(self, sequences, k, runner)
        monkeypatch.setattr(self, "_forward", forward)
        return drafts

    monkeypatch.setattr(EagleProposer, "propose", watched)
    _, _, engine = outputs(path, **CASES[case])
    head = engine.proposer.head
    assert len(seen) > 150
    for tokens, drafts, logits in seen[::11]:
        known = states(tokens[: len(tokens) - drafts - 1])
        for drafted in range(drafts, 0, -1):
            known = torch.cat((known, reference(head, tokens[: len(tokens) - drafted], known)[-1:]))
        expected = head.logits(reference(head, tokens, known)[-1:])[0]
        torch.testing.assert_close(logits, expected, atol=2e-4, rtol=2e-4)
    assert {drafts for _, drafts, _ in seen[::11]} == {0, 1, 2}


@pytest.mark.parametrize("kind", ["eagle", "medusa"])
def test_sampled_tokens_do_not_depend_on_who_shares_the_batch(kind: str, tmp_path: Path) -> None:
    path = head_file(tmp_path, kind)
    sampling = {"temperature": 0.9, "top_p": 0.95, "seed": 5}
    together, results, _ = outputs(path, sampling=sampling)
    alone, _, _ = outputs(path, sampling=sampling, batching=("continuous", {"max_num_seqs": 1}))
    assert together == alone
    assert sum(r.stats.draft_tokens for r in results if r.stats) > 100


@pytest.mark.parametrize("kind", ["eagle", "medusa"])
def test_head_of_another_model_is_refused(kind: str, tmp_path: Path) -> None:
    other = replace(SOURCE, fingerprint="synthetic:other")
    config = arms.arm_config(
        budget_tokens=500, source=SOURCE, max_model_len=128, model="tiny", decoding="speculative",
        proposer=(kind, {"head": str(head_file(tmp_path, kind, other))}),
    )  # fmt: skip
    reasons = validate_axes(describe_arm(config, SOURCE))
    assert len(reasons) == 1 and f"no {kind} head for this model" in reasons[0]
    config["proposer"]["head"] = str(tmp_path / "missing.safetensors")
    assert "is no file of a draft head" in validate_axes(describe_arm(config, SOURCE))[0]


def test_permuted_head_is_the_same_head(path: Path) -> None:
    """Of permuted channels in, permuted channels out, and the same logits."""
    tensors = find_head("eagle", str(path), SOURCE.fingerprint).tensors()
    tensors["lm_head.weight"] = torch.randn(len(tensors["token_ids"]), HIDDEN)
    order = torch.randperm(HIDDEN, generator=torch.Generator().manual_seed(2))
    table, states = torch.randn(512, HIDDEN), torch.randn(9, HIDDEN)
    method, device = Fp32(torch.device("cpu")), torch.device("cpu")
    tokens = list(range(10))
    plain = EagleHead(tensors, SOURCE.shape, lambda ids: table[ids], method, device)
    moved = EagleHead(permuted(tensors, order), SOURCE.shape, lambda ids: table[ids][:, order], method, device)
    found = [
        head.logits(reference(head, tokens, each)) for head, each in ((plain, states), (moved, states[:, order]))
    ]
    torch.testing.assert_close(*found, atol=1e-4, rtol=1e-4)
