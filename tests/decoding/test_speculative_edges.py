"""Single steps of the verifier with known answers: greedy cases, the vocabulary's edge, NaN drafts, set acceptance."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from scipy.stats import binomtest
from torch import Tensor

from impls.decoding.speculative import SpeculativeDecoder
from impls.decoding.verifier import RandomVerification
from impls.request import Request, SamplingParams, Sequence
from impls.seams import Arm, DraftTokens, ModelShape, NonFiniteLogitsError

VOCAB = 6
SHAPE = ModelShape(VOCAB, 8, 8, 4, 1, 1, 8, 64)
NAN = float("nan")


def sequence(name: str, drafts: list[int], temperature: float = 0.0) -> Sequence:
    seq = Sequence(Request(name, (1, 2), SamplingParams(temperature=temperature, seed=11)))
    seq.draft_token_ids = drafts
    return seq


def one_hot(*tokens: int) -> Tensor:
    return torch.nn.functional.one_hot(torch.tensor(tokens), VOCAB).float() * 10


@pytest.mark.parametrize(
    ("drafts", "target", "wanted"),
    [
        ([], [4], [4]),
        ([3], [3, 5], [3, 5]),  # all accepted: the bonus
        ([3], [2, 5], [2]),  # recovered, and the row after it means nothing
        ([3, 1, 0], [3, 2, 0, 5], [3, 2]),  # what follows a rejection is dropped though it matches
        ([3, 1, 0], [3, 1, 0, 5], [3, 1, 0, 5]),
        ([0, 0, 0], [5, 0, 0, 0], [5]),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1e-6])
def test_known_steps(drafts: list[int], target: list[int], wanted: list[int], temperature: float) -> None:
    """At a vanishing temperature the random rule must agree with the greedy one."""
    decoder = SpeculativeDecoder(vocab_size=VOCAB)
    assert decoder.decode([sequence("a", drafts, temperature)], one_hot(*target), {}) == [wanted]


def test_different_numbers_of_drafts_in_one_batch() -> None:
    batch = [sequence("a", [1, 2]), sequence("b", []), sequence("c", [4], 1e-6), sequence("d", [3, 3, 3])]
    logits = one_hot(1, 5, 0, 2, 4, 5, 3, 3, 3, 1)
    assert SpeculativeDecoder(vocab_size=VOCAB).decode(batch, logits, {}) == [[1, 5], [2], [4, 5], [3, 3, 3, 1]]


def test_a_tie_takes_the_lowest_token_in_every_row() -> None:
    """Bug 19: where drafting and verifying break ties differently, greedy speculation is not greedy decoding."""
    logits = torch.zeros(2, VOCAB)
    assert SpeculativeDecoder(vocab_size=VOCAB).decode([sequence("a", [0])], logits, {}) == [[0, 0]]
    assert SpeculativeDecoder(vocab_size=VOCAB).decode([sequence("a", [1])], logits, {}) == [[0]]


@pytest.mark.parametrize("probs", [None, "certain"])
def test_the_recovered_token_is_never_the_rejected_one_nor_outside(probs: str | None) -> None:
    """Bug 6: recovered id == vocab_size when the tail of the residual is all zero."""
    x, n = VOCAB - 1, 500
    batch = [sequence(str(i), [x], 1.0) for i in range(n)]
    logits = torch.tensor([[0.0, 1.0, -torch.inf, -torch.inf, -torch.inf, 0.5]]).repeat(2 * n, 1)
    q = torch.nn.functional.one_hot(torch.tensor([x]), VOCAB).float() if probs else None
    new = SpeculativeDecoder(vocab_size=VOCAB).decode(batch, logits, {seq.seq_id: DraftTokens([x], q) for seq in batch})
    assert {tokens[0] for tokens in new if len(tokens) == 1} == {0, 1}
    assert {tuple(tokens[:1]) for tokens in new if len(tokens) == 2} == {(x,)}
    assert {tokens[1] for tokens in new if len(tokens) == 2} == {0, 1, x}


def test_where_p_equals_q_the_recovered_token_is_drawn_from_p() -> None:
    """Rounding may reject a draft though p(x) = q(x); then nothing is left of p - q."""
    p = torch.tensor([[0.0, 0.5, 0.5, 0.0, 0.0, 0.0]])
    batch = [sequence(str(i), [1], 1.0) for i in range(50)]
    drafts = {seq.seq_id: DraftTokens([1], p) for seq in batch}
    verification = RandomVerification(batch, p.repeat(2 * len(batch), 1), drafts)
    assert set(verification.final_tokens([0] * len(batch))) == {1, 2}


def test_what_replaces_a_draft_comes_from_the_residual_of_that_draft() -> None:
    """The first draft stands. Of p = (1/2, 1/2) behind it the second one's q leaves token 1, the first one's both."""
    p = torch.tensor([[0.0, 0.0, 0.0, 1.0, 0.0, 0.0], [0.5, 0.5, 0.0, 0.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0, 0.0, 0.0]])
    q = torch.tensor([[0.0, 0.0, 0.0, 1.0, 0.0, 0.0], [0.5, 0.0, 0.5, 0.0, 0.0, 0.0]])
    batch = [sequence(str(i), [3, 2], 1.0) for i in range(50)]
    verification = RandomVerification(batch, p.repeat(50, 1), {seq.seq_id: DraftTokens([3, 2], q) for seq in batch})
    assert verification.accept() == [1] * 50
    assert verification.final_tokens([1] * 50) == [1] * 50


@pytest.mark.parametrize("broken", ["nan", "zero"])
def test_a_draft_whose_distribution_is_unsound_is_verified_as_one_hot(broken: str) -> None:
    """An all-NaN draft row once re-emitted the rejected token; one-hot is exact whatever the draft came from."""
    logits = torch.tensor([[0.2, 0.1, 0.4, 0.3, 1e-9, 1e-9]] * 2).log()
    q = torch.full((1, VOCAB), NAN if broken == "nan" else 0.0)
    if broken == "zero":
        q[0, 0] = 1.0
    sound = q.clone()
    outputs = []
    for drafted in (q, None):
        batch = [sequence(str(i), [3], 1.0) for i in range(800)]
        drafts = {seq.seq_id: DraftTokens([3], drafted) for seq in batch}
        outputs.append(SpeculativeDecoder(vocab_size=VOCAB).decode(batch, logits.repeat(800, 1), drafts))
    assert outputs[0] == outputs[1]
    assert 0.25 < sum(len(new) == 2 for new in outputs[0]) / 800 < 0.35
    torch.testing.assert_close(q, sound, equal_nan=True)  # the proposer's tensor is its own


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_nan_row_raises_and_names_its_sequence(temperature: float) -> None:
    batch = [sequence("a", [1], temperature), sequence("b", [1], temperature), sequence("c", [], temperature)]
    logits = one_hot(1, 2, 1, 2, 3)
    logits[2, 2] = NAN
    with pytest.raises(NonFiniteLogitsError) as error:
        SpeculativeDecoder(vocab_size=VOCAB).decode(batch, logits, {})
    assert error.value.seq_ids == ("b",)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_before_a_nan_row_stand_and_the_next_step_meets_it(temperature: float) -> None:
    """Without drafts they would have been emitted by then, and one of them may be a stop token."""
    logits = one_hot(1, 2, 3)
    logits[2] = NAN
    batch = [sequence("a", [1, 2], temperature)]
    assert SpeculativeDecoder(vocab_size=VOCAB).decode(batch, logits, {}) == [[1, 2]]


@pytest.mark.parametrize("acceptance", ["exact", "typical"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_nan_row_behind_a_draft_that_falls_is_nobodys(temperature: float, acceptance: str) -> None:
    """Without drafts it would never have been computed."""
    batch = [sequence("a", [1, 2], temperature), sequence("b", [1], temperature)]
    logits = one_hot(4, 2, 3, 1, 5)
    logits[1:3] = NAN
    decoder = SpeculativeDecoder(vocab_size=VOCAB, acceptance=acceptance, draft_length="adaptive")
    assert decoder.decode(batch, logits, {}) == [[4], [1, 5]]


@pytest.mark.parametrize("stale", [-1, VOCAB])
def test_a_placeholder_is_not_an_index(stale: int) -> None:
    """Bug 13: a stale -1 would silently read the last token's probability."""
    with pytest.raises(ValueError, match="outside the vocabulary"):
        SpeculativeDecoder(vocab_size=VOCAB).decode([sequence("a", [stale], 1.0)], torch.zeros(2, VOCAB), {})


def test_probabilities_of_other_drafts_are_refused() -> None:
    """Bug 13: drafts of before a preemption, matched with the distribution of those after it."""
    drafts = {"a": DraftTokens([2], torch.full((1, VOCAB), 1 / VOCAB))}
    with pytest.raises(ValueError, match="not those proposed"):
        SpeculativeDecoder(vocab_size=VOCAB).decode([sequence("a", [3], 1.0)], torch.zeros(2, VOCAB), drafts)


def test_a_scheduler_may_cut_the_drafts_short() -> None:
    drafts = {"a": DraftTokens([3, 1], torch.full((2, VOCAB), 1 / VOCAB))}
    [new] = SpeculativeDecoder(vocab_size=VOCAB).decode([sequence("a", [3], 1e-6)], one_hot(3, 5), drafts)
    assert new == [3, 5]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_acceptance_as_a_setting(temperature: float) -> None:
    decoder = SpeculativeDecoder(vocab_size=VOCAB, acceptance_rate=0.7)
    assert decoder.emulated and "0.7" in decoder.emulated
    batch = [sequence(str(i), [5, 5], temperature) for i in range(3000)]
    logits = one_hot(0, 1, 2).repeat(3000, 1)
    new = decoder.decode(batch, logits, {})
    first = sum(len(tokens) > 1 for tokens in new)
    both = sum(len(tokens) > 2 for tokens in new)
    assert binomtest(first, 3000, 0.7).pvalue > 1e-4
    assert binomtest(both, first, 0.7).pvalue > 1e-4
    if temperature == 0:
        assert all(tokens == [*[5] * (len(tokens) - 1), len(tokens) - 1] for tokens in new)


@pytest.mark.parametrize(("rate", "length"), [(0.0, 1), (1.0, 3)])
def test_the_ends_of_the_setting_are_exact(rate: float, length: int) -> None:
    batch = [sequence(str(i), [5, 5]) for i in range(200)]
    new = SpeculativeDecoder(vocab_size=VOCAB, acceptance_rate=rate).decode(batch, torch.zeros(600, VOCAB), {})
    assert {len(tokens) for tokens in new} == {length}


def arm(**axes: Mapping[str, Any]) -> Arm:
    return Arm({"proposer": {"num_draft_tokens": 4}, **axes}, SHAPE, 64, "cpu", 1 << 20)


def test_validate() -> None:
    assert SpeculativeDecoder.validate(arm(decoding={"acceptance_rate": None})) == []
    synthetic = {"source": "synthetic"}
    assert SpeculativeDecoder.validate(arm(decoding={"acceptance_rate": 0.5}, model=synthetic)) == []
    [reason] = SpeculativeDecoder.validate(arm(decoding={"acceptance_rate": 0.5}, model={"source": "gguf"}))
    assert "synthetic" in reason and "gguf" in reason
    real = {"source": "synthetic", "path": "weights.gguf"}  # a path replaces the synthetic weights
    [reason] = SpeculativeDecoder.validate(arm(decoding={"acceptance_rate": 0.5}, model=real))
    assert "weights.gguf" in reason
    [reason] = SpeculativeDecoder.validate(arm(decoding={"acceptance_rate": 1.5}, model=synthetic))
    assert "[0, 1]" in reason
    [reason] = SpeculativeDecoder.validate(arm(proposer={"num_draft_tokens": 0}))
    assert "num_draft_tokens" in reason
