"""Proposers: prompt lookup against a brute-force search, model drafting against a cache that knows what was written."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from impls.decoding.counter_random import Purpose
from impls.decoding.proposers import draft_sampler
from impls.decoding.proposers.draft_model import DraftModelProposer
from impls.decoding.proposers.layer_skip import LayerSkipProposer
from impls.decoding.proposers.ngram import NgramProposer
from impls.decoding.sampler import distribution
from impls.request import Request, SamplingParams, Sequence
from impls.seams import Arm, ModelShape, Proposer

VOCAB = 7
SHAPE = ModelShape(VOCAB, 8, 8, 8, 1, 1, 8, 64)


class NoRunner:
    def draft_forward(self, *args: object, **kwargs: object) -> dict[str, Tensor]:
        raise AssertionError("prompt lookup runs no model")


def brute_force(tokens: Seq[int], low: int, high: int, k: int, latest: bool) -> list[int]:
    for n in range(min(high, len(tokens) - 1), low - 1, -1):
        ends = [e for e in range(n, len(tokens)) if list(tokens[e - n : e]) == list(tokens[-n:])]
        if ends:
            end = ends[-1] if latest else ends[0]
            return list(tokens[end : end + k])
    return []


@settings(max_examples=120)
@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=40),
    st.integers(1, 3),
    st.integers(0, 3),
    st.integers(1, 5),
    st.sampled_from(["earliest", "latest"]),
    st.lists(st.integers(1, 4), max_size=12),
)
def test_ngram_is_the_brute_force_search_at_every_step(
    tokens: list[int], low: int, more: int, k: int, match: str, steps: list[int]
) -> None:
    """Fed in steps of several tokens, as verified text grows; two sequences at once, so that they cannot mix."""
    proposer = NgramProposer(
        vocab_size=VOCAB, shape=SHAPE, num_draft_tokens=k, min_ngram=low, max_ngram=low + more, match=match
    )
    length = 1
    for step in [0, *steps]:
        length = min(length + step, len(tokens))
        batch = [Sequence(Request("a", tuple(tokens[:length]))), Sequence(Request("b", tuple(tokens[-length:])))]
        drafts = proposer.propose(batch, {"a": k, "b": 9}, NoRunner())
        for seq in batch:
            wanted = brute_force(seq.token_ids, low, low + more, k, match == "latest")
            assert (drafts[seq.seq_id].token_ids if seq.seq_id in drafts else []) == wanted
        proposer.forget("b")  # its text is replaced, not grown


def test_ngram_drafts_a_whole_repetition_and_no_more_than_asked() -> None:
    proposer = NgramProposer(vocab_size=VOCAB, shape=SHAPE, num_draft_tokens=4, min_ngram=2, max_ngram=3)
    seq = Sequence(Request("a", (1, 2, 3, 4, 5, 6, 1, 2)))
    assert proposer.propose([seq], {"a": 9}, NoRunner())["a"].token_ids == [3, 4, 5, 6]
    assert proposer.propose([seq], {"a": 2}, NoRunner())["a"].token_ids == [3, 4]
    assert proposer.propose([seq], {"a": 0}, NoRunner()) == {}
    assert proposer.propose([seq], {"a": 2}, NoRunner())["a"].probs is None


def test_ngram_work_is_the_new_tokens_only() -> None:
    """Amortised O(k): a proposal on a long text may not rescan it."""

    class Counted(list[int]):
        reads = 0

        def __getitem__(self, item):  # type: ignore[no-untyped-def]
            found = super().__getitem__(item)
            Counted.reads += len(found) if isinstance(item, slice) else 1
            return found

    proposer = NgramProposer(vocab_size=VOCAB, shape=SHAPE, num_draft_tokens=4, min_ngram=1, max_ngram=3)
    seq = Sequence(Request("a", (0,)), token_ids=Counted(i * i % 97 for i in range(5000)))
    proposer.propose([seq], {"a": 4}, NoRunner())
    Counted.reads = 0
    seq.token_ids += [1, 2]
    proposer.propose([seq], {"a": 4}, NoRunner())
    assert 0 < Counted.reads < 40


def test_ngram_forgets_a_finished_sequence() -> None:
    """Bug 13: another request under the same id must not draft from the first one's text."""
    proposer = NgramProposer(vocab_size=VOCAB, shape=SHAPE)
    proposer.propose([Sequence(Request("a", (1, 2, 3, 1, 2)))], {"a": 4}, NoRunner())
    proposer.forget("a")
    again = Sequence(Request("a", (4, 1, 2, 5, 6, 1, 2)))
    assert proposer.propose([again], {"a": 4}, NoRunner())["a"].token_ids == [5, 6, 1, 2]


class CachedRunner:
    """A model over a cache: logits depend on the whole cached context. Fails where a position is missing or stale."""

    def __init__(self, sequences: Seq[Sequence], lookahead: int, scale: float = 2.0) -> None:
        self.sequences = {seq.seq_id: seq for seq in sequences}
        self.lookahead, self.scale = lookahead, scale
        self.cache: dict[str, list[int]] = {}
        self.calls: list[dict[str, list[int]]] = []
        self.poisoned: set[str] = set()
        self.options: set[tuple[str, int | None]] = set()

    def logits(self, context: Seq[int]) -> Tensor:
        seed = 0
        for token in context:
            seed = (seed * 31 + token + 1) % 2**31
        return torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * self.scale

    def draft_forward(
        self, tokens: Mapping[str, Seq[int]], starts: Mapping[str, int], *, model: str, num_layers: int | None = None
    ) -> dict[str, Tensor]:
        self.options.add((model, num_layers))
        self.calls.append({seq_id: list(new) for seq_id, new in tokens.items()})
        result = {}
        for seq_id, new in tokens.items():
            verified = self.sequences[seq_id].token_ids
            held = self.cache.setdefault(seq_id, [])
            assert new and starts[seq_id] <= len(held), "a hole in the K/V"
            self.cache[seq_id] = context = [*held[: starts[seq_id]], *new]
            assert context[: len(verified)] == verified[: len(context)], "stale K/V under a verified position"
            assert len(context) <= len(verified) + self.lookahead, "written past what was declared"
            poisoned = seq_id in self.poisoned and len(context) > len(verified)
            result[seq_id] = torch.full((VOCAB,), float("nan")) if poisoned else self.logits(context)
        return result


def sequences(n: int, temperature: float = 0.0) -> list[Sequence]:
    params = SamplingParams(temperature=temperature, top_k=5, top_p=0.9)
    return [Sequence(Request(str(i), tuple(j % VOCAB for j in range(i + 1)), params)) for i in range(n)]


def greedy_continuation(runner: CachedRunner, tokens: Seq[int], k: int) -> list[int]:
    context = list(tokens)
    for _ in range(k):
        context.append(int(runner.logits(context).argmax()))
    return context[len(tokens) :]


def draft_model(k: int = 3, **options: str) -> DraftModelProposer:
    return DraftModelProposer(vocab_size=VOCAB, shape=SHAPE, num_draft_tokens=k, **options)


def test_the_draft_model_feeds_each_token_once_and_batches_the_rest() -> None:
    batch = sequences(3)
    proposer, runner = draft_model(), CachedRunner(batch, draft_model().max_lookahead_tokens)
    drafts = proposer.propose(batch, {"0": 3, "1": 1, "2": 9}, runner)
    assert [len(call) for call in runner.calls] == [3, 2, 2]
    assert runner.calls[0] == {seq.seq_id: seq.token_ids for seq in batch}, "the prompt, in one ragged call"
    assert runner.options == {("draft", None)}
    for seq, k in zip(batch, (3, 1, 3), strict=True):
        assert drafts[seq.seq_id].token_ids == greedy_continuation(runner, seq.token_ids, k)
        assert drafts[seq.seq_id].probs is None


@pytest.mark.parametrize("accepted", range(4))
def test_catching_up_after_any_number_of_acceptances(accepted: int) -> None:
    """Bug 7: after a full acceptance the last draft was never fed; after a rejection what was fed past it is stale."""
    batch = sequences(2)
    proposer, runner = draft_model(), CachedRunner(batch, 2)
    drafts = proposer.propose(batch, {"0": 3, "1": 3}, runner)
    for seq in batch:
        drafted = drafts[seq.seq_id].token_ids
        other = [(drafted[accepted] if accepted < 3 else drafted[0]) + 1]
        seq.token_ids += [*drafted[:accepted], other[0] % VOCAB]
    runner.calls.clear()
    again = proposer.propose(batch, {"0": 3, "1": 3}, runner)
    fed = 2 if accepted == 3 else 1
    assert all(new == seq.token_ids[-fed:] for seq, new in zip(batch, runner.calls[0].values(), strict=True))
    for seq in batch:
        assert again[seq.seq_id].token_ids == greedy_continuation(runner, seq.token_ids, 3)


def test_catching_up_after_steps_without_drafts_and_after_being_forgotten() -> None:
    batch = sequences(1)
    [seq] = batch
    proposer, runner = draft_model(), CachedRunner(batch, 2)
    proposer.propose(batch, {"0": 2}, runner)
    seq.token_ids += [1, 2, 3, 4]
    assert proposer.propose(batch, {"0": 0}, runner) == {}
    proposer.propose(batch, {"0": 2}, runner)
    proposer.forget("0")
    runner.cache.clear()  # preempted: its blocks are gone
    runner.calls.clear()
    proposer.propose(batch, {"0": 2}, runner)
    assert runner.calls[0]["0"] == seq.token_ids


def test_layer_skip_feeds_only_what_the_target_has_not_computed() -> None:
    batch = sequences(3)
    proposer = LayerSkipProposer(vocab_size=VOCAB, shape=SHAPE, num_draft_tokens=3, num_layers=2)
    runner = CachedRunner(batch, proposer.max_lookahead_tokens)
    for _ in range(3):
        for seq in batch:
            seq.num_computed_tokens = seq.num_tokens - 1
            runner.cache[seq.seq_id] = seq.token_ids[:-1]  # the target's own K/V
        runner.calls.clear()
        drafts = proposer.propose(batch, {seq.seq_id: 3 for seq in batch}, runner)
        assert all(new == [seq.token_ids[-1]] for seq, new in zip(batch, runner.calls[0].values(), strict=True))
        for seq in batch:
            assert drafts[seq.seq_id].token_ids == greedy_continuation(runner, seq.token_ids, 3)
            seq.token_ids += [*drafts[seq.seq_id].token_ids[:1], 0]
    assert runner.options == {("target", 2)}
    assert not proposer.needs_draft_model


@pytest.mark.parametrize("shape_layers", [1, 3, 30])
def test_layer_skip_takes_a_quarter_by_default(shape_layers: int) -> None:
    shape = ModelShape(VOCAB, 8, 8, shape_layers, 1, 1, 8, 64)
    assert LayerSkipProposer(vocab_size=VOCAB, shape=shape).num_layers == max(1, shape_layers // 4)


def test_sampled_drafts_record_what_they_were_drawn_from() -> None:
    """The same processing as the target's, or acceptance collapses; keyed by position, so a redraft repeats itself."""
    batch = sequences(4, temperature=0.8)
    runner = CachedRunner(batch, 2)
    drafts = draft_model().propose(batch, {seq.seq_id: 3 for seq in batch}, runner)
    for seq in batch:
        drafted = drafts[seq.seq_id]
        assert drafted.probs is not None and drafted.probs.shape == (3, VOCAB)
        for j, token in enumerate(drafted.token_ids):
            wanted = distribution(
                runner.logits(seq.token_ids + drafted.token_ids[:j]).unsqueeze(0), [seq.request.sampling]
            )
            assert torch.equal(drafted.probs[j], wanted[0]) and drafted.probs[j, token] > 0
    alone = draft_model().propose(batch[2:3], {"2": 3}, CachedRunner(batch, 2))
    assert alone["2"].token_ids == drafts["2"].token_ids


def test_sampled_drafts_use_the_drafts_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = sequences(50, temperature=3.0)
    k = {seq.seq_id: 1 for seq in batch}
    own = [d.token_ids for d in draft_model().propose(batch, k, CachedRunner(batch, 2)).values()]
    keys = draft_sampler.position_keys
    monkeypatch.setattr(draft_sampler, "position_keys", lambda r, p, _, d: keys(r, p, Purpose.SAMPLE, d))
    assert own != [d.token_ids for d in draft_model().propose(batch, k, CachedRunner(batch, 2)).values()]


def test_greedy_drafting_of_a_sampled_request_is_one_hot() -> None:
    batch = sequences(2, temperature=0.8)
    runner = CachedRunner(batch, 2)
    drafts = draft_model(draft_sampling="greedy").propose(batch, {"0": 3, "1": 3}, runner)
    for seq in batch:
        assert drafts[seq.seq_id].probs is None
        assert drafts[seq.seq_id].token_ids == greedy_continuation(runner, seq.token_ids, 3)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_draft_model_that_gives_nan_stops_drafting_that_sequence(temperature: float) -> None:
    batch = sequences(2, temperature)
    runner = CachedRunner(batch, 2)
    runner.poisoned = {"1"}
    drafts = draft_model().propose(batch, {"0": 3, "1": 3}, runner)
    assert [len(drafts[i].token_ids) for i in "01"] == [3, 1]
    if temperature:
        assert [len(p) for i in "01" if (p := drafts[i].probs) is not None] == [3, 1]


def reasons(proposer: type[Proposer], **options: object) -> list[str]:
    return proposer.validate(Arm({"proposer": options}, SHAPE, 64, "cpu", 1 << 20))


def test_validate() -> None:
    assert reasons(NgramProposer) == reasons(DraftModelProposer) == reasons(LayerSkipProposer, num_layers=7) == []
    assert "min_ngram" in reasons(NgramProposer, min_ngram=5)[0]
    assert "latest" in reasons(NgramProposer, match="nearest")[0]
    assert "num_layers" in reasons(LayerSkipProposer, num_layers=8)[0]
    assert "greedy" in reasons(DraftModelProposer, draft_sampling="beam")[0]
