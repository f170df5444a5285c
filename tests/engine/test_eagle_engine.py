"""EAGLE's head in the engine: random weights must not change a token, whatever happens to the blocks they lie in."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import engine_testing as arms
import pytest
import torch
from safetensors.torch import save_file

from impls.build import describe_arm, validate_axes
from impls.models.draft_heads import find_head, permuted
from impls.models.eagle_head import EagleHead
from impls.models.source import ModelSource, open_model
from impls.precision.fp32 import Fp32
from scripts.draft_heads.modules import EagleHead as TrainedHead

SOURCE = open_model(arms.load("model/tiny"))
HIDDEN = SOURCE.shape.hidden_size


def head_file(folder: Path, source: ModelSource = SOURCE) -> Path:
    """A random head whose draft vocabulary is every second token."""
    torch.manual_seed(1)
    tensors = {k: v.detach().clone() for k, v in TrainedHead(source.shape, torch.rand(HIDDEN) + 0.5).tensors().items()}
    tensors["token_ids"] = torch.arange(0, source.shape.vocab_size, 2, dtype=torch.int32)
    path = folder / "head.safetensors"
    save_file(tensors, path, {"recipe": json.dumps({"kind": "eagle", "model": source.fingerprint, "model_name": "t"})})
    return path


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return head_file(tmp_path_factory.mktemp("head"))


def prompts(shared: int = 0) -> list[list[int]]:
    draw = torch.Generator().manual_seed(3)
    common = torch.randint(0, 512, (shared,), generator=draw).tolist()
    return [common + torch.randint(0, 512, (5 + 7 * i,), generator=draw).tolist() for i in range(6)]


def outputs(path: Path | None, budget_tokens: int = 2000, shared: int = 0, k: int = 3, **choices):  # type: ignore[no-untyped-def]
    sampling = choices.pop("sampling", {})
    if path is not None:
        choices |= {
            "decoding": "speculative",
            "proposer": ("eagle", {"head": str(path), "num_draft_tokens": k}),
        }
    config = arms.arm_config(budget_tokens=budget_tokens, source=SOURCE, max_model_len=256, model="tiny", **choices)
    engine = arms.build(config, SOURCE)
    requests = [arms.request(str(i), p, 24, **sampling) for i, p in enumerate(prompts(shared))]
    found, results = arms.run(engine, requests)
    return found, results, engine


CASES = {
    "plain": {},
    "one_draft": {"k": 1, "kv_cache": ("paged", {"block_size": 4})},
    "blocks_of_one": {"kv_cache": ("paged", {"block_size": 1})},
    "contiguous": {"kv_cache": "contiguous"},
    "static": {"batching": "static", "kv_cache": "contiguous"},
    "chunked": {"batching": ("chunked_prefill", {"max_num_batched_tokens": 16, "max_num_seqs": 4})},
    "preempted": {"budget_tokens": 150, "kv_cache": ("paged", {"block_size": 4})},
    "swapped": {
        "budget_tokens": 150, "kv_cache": ("paged", {"block_size": 4}),
        "batching": ("continuous", {"preemption": "swap"}),
    },
    "hash_chain": {"shared": 32, "prefix": "hash_chain", "batching": ("continuous", {"max_num_seqs": 2})},
    "radix": {"shared": 32, "prefix": "radix", "batching": ("continuous", {"max_num_seqs": 2})},
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_greedy_tokens_are_those_without_drafts(case: str, path: Path) -> None:
    choices = dict(CASES[case])
    alone, _, _ = outputs(None, shared=int(choices.get("shared", 0)))
    found, results, _ = outputs(path, **choices)
    assert found == alone
    stats = [result.stats for result in results if result.stats]
    assert sum(s.draft_tokens for s in stats) > 100
    if case in ("preempted", "swapped"):
        assert sum(s.preempted for s in stats) > 0
    if "shared" in choices:
        assert sum(sum(s.cached_prompt_tokens.values()) for s in stats) > 0


def reference(head: EagleHead, tokens: list[int], states: torch.Tensor) -> torch.Tensor:
    """Logits of every row from one causal pass over the whole sequence; states: [n - 1, hidden] of the target."""
    shape = head.shape
    before = torch.cat((torch.zeros(1, HIDDEN), states))
    ids = torch.tensor(tokens)

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        groups = shape.num_heads // shape.num_kv_heads
        k, v = (each.repeat_interleave(groups, 1).transpose(0, 1) for each in (k, v))
        attended = torch.nn.functional.scaled_dot_product_attention(q.transpose(0, 1), k, v, is_causal=True)
        return attended.transpose(0, 1)

    hidden = head.forward(ids, before, torch.arange(len(tokens)), attend)
    return head.logits(hidden, shape.vocab_size * 2)


@pytest.mark.parametrize("case", ["plain", "chunked", "preempted", "swapped", "hash_chain", "static"])
def test_first_drafts_are_those_of_one_pass_over_the_whole_sequence(
    case: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Incremental keys, values and states equal the full ones, through rejections, chunks, hits and preemptions."""
    from impls.decoding.proposers.eagle import EagleProposer

    states = target_states()
    seen: list[tuple[list[int], torch.Tensor]] = []
    original = EagleProposer.propose

    def watched(self, sequences, k, runner):  # type: ignore[no-untyped-def]
        by_id = {s.seq_id: s for s in sequences}
        forward = self._forward

        def first(tokens, starts, run):  # type: ignore[no-untyped-def]
            logits = forward(tokens, starts, run)
            for seq_id in tokens:
                if starts[seq_id] == by_id[seq_id].num_tokens - 1:
                    seen.append((list(by_id[seq_id].token_ids), logits[seq_id].clone()))
            return logits

        monkeypatch.setattr(self, "_forward", first)
        drafts = original(self, sequences, k, runner)
        monkeypatch.setattr(self, "_forward", forward)
        return drafts

    monkeypatch.setattr(EagleProposer, "propose", watched)
    _, _, engine = outputs(path, **CASES[case])
    head = engine.proposer.head
    assert len(seen) > 50
    for tokens, logits in seen[::7]:
        expected = reference(head, tokens, states(tokens[:-1]))[-1]
        drafted = torch.isfinite(expected)
        torch.testing.assert_close(logits[drafted], expected[drafted], atol=2e-4, rtol=2e-4)
        assert torch.equal(torch.isfinite(logits), drafted)


def target_states():  # type: ignore[no-untyped-def]
    from impls.models.calibration import attention_within
    from impls.models.llama import LlamaModel

    model = LlamaModel(SOURCE.shape, SOURCE.weights(), Fp32(torch.device("cpu")), torch.device("cpu"))

    def states(tokens: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            return model.forward(torch.tensor(tokens), torch.arange(len(tokens)), attention_within([tokens]))

    return states


def test_sampled_tokens_do_not_depend_on_who_shares_the_batch(path: Path) -> None:
    sampling = {"temperature": 0.9, "top_p": 0.95, "seed": 5}
    together, results, _ = outputs(path, sampling=sampling)
    alone, _, _ = outputs(path, sampling=sampling, batching=("continuous", {"max_num_seqs": 1}))
    assert together == alone
    assert sum(r.stats.draft_tokens for r in results if r.stats) > 100


def test_head_of_another_model_is_refused(tmp_path: Path) -> None:
    other = replace(SOURCE, fingerprint="synthetic:other")
    config = arms.arm_config(
        budget_tokens=500, source=SOURCE, max_model_len=128, model="tiny", decoding="speculative",
        proposer=("eagle", {"head": str(head_file(tmp_path, other))}),
    )  # fmt: skip
    reasons = validate_axes(describe_arm(config, SOURCE))
    assert len(reasons) == 1 and "no eagle head for this model" in reasons[0]
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
    torch.testing.assert_close(
        reference(plain, tokens, states), reference(moved, tokens, states[:, order]), atol=1e-4, rtol=1e-4
    )
