"""Medusa's typical acceptance: the paper's threshold by hand, and that nothing else decides."""

from __future__ import annotations

import math

import pytest
import torch

from impls.decoding.speculative import SpeculativeDecoder
from impls.decoding.typical_acceptance import accept_typical, thresholds
from impls.request import Request, SamplingParams, Sequence
from impls.seams import Arm, DraftTokens, ModelShape

VOCAB = 16
SHAPE = ModelShape(VOCAB, 8, 8, 4, 1, 1, 8, 64)
EPSILON, DELTA = 0.09, 0.3


def sequence(name: str, drafts: list[int], **sampling: float) -> Sequence:
    params = SamplingParams(**{"temperature": 1.0, "seed": 11, **sampling})  # type: ignore[arg-type]
    return Sequence(Request(name, (1, 2), params), draft_token_ids=drafts)


def test_the_threshold_is_the_papers() -> None:
    uniform = torch.full((1, VOCAB), 1 / VOCAB)  # H = log 16: delta / 16, below epsilon
    sure = torch.eye(VOCAB)[:1]  # H = 0: delta, above epsilon
    two = torch.tensor([[0.9, 0.1] + [0.0] * (VOCAB - 2)])
    found = thresholds(torch.cat((uniform, sure, two)), EPSILON, DELTA).tolist()
    entropy = -(0.9 * math.log(0.9) + 0.1 * math.log(0.1))
    assert found == pytest.approx([DELTA / 16, EPSILON, min(EPSILON, DELTA * math.exp(-entropy))])
    assert thresholds(two, 0.5, DELTA).item() == pytest.approx(DELTA * math.exp(-entropy))


def test_a_draft_has_to_exceed_the_threshold_and_so_have_all_before_it() -> None:
    """0.1 > min(0.09, ...) stands where the target is nearly sure; 0.08 does not; what follows it is not looked at."""
    row = torch.tensor([0.82, 0.1, 0.08] + [0.0] * (VOCAB - 3))
    probs = row.repeat(4 * 3, 1)
    batch = [sequence("a", [1, 0, 1]), sequence("b", [1, 2, 0]), sequence("c", [2, 0, 0])]
    assert accept_typical(batch, probs, EPSILON, DELTA) == [3, 1, 0]
    assert accept_typical(batch, probs, 0.1001, DELTA) == [0, 0, 0]
    assert accept_typical(batch, probs, 0.05, DELTA) == [3, 3, 3]
    assert accept_typical([sequence("d", [0])], torch.full((2, 2), 0.5), 0.5, 9.0) == [0], "equal is not above"


def test_every_verdict_in_the_decoder_is_the_thresholds() -> None:
    """By the book in float64, over processed distributions; whom the drafts were drawn from changes nothing."""
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(300 * 4, VOCAB, generator=draw) * 2
    batch = [
        sequence(str(i), torch.randint(0, VOCAB, (3,), generator=draw).tolist(), temperature=(0.7, 1.3)[i % 2])
        for i in range(300)
    ]
    decoder = SpeculativeDecoder(vocab_size=VOCAB, acceptance="typical", epsilon=0.05, delta=0.2)
    found = decoder.decode(batch, logits, {})
    for i, (seq, new) in enumerate(zip(batch, found, strict=True)):
        rows = logits[4 * i : 4 * i + 4].double()
        p = (rows / seq.request.sampling.temperature).softmax(1)
        least = (0.2 * torch.exp((p * p.log()).sum(1))).clamp(max=0.05)
        stands = [bool(p[j, token] > least[j]) for j, token in enumerate(seq.draft_token_ids)]
        count = stands.index(False) if False in stands else 3
        assert new == [*seq.draft_token_ids[:count], int(rows[count].argmax())]
    assert {len(new) for new in found} == {1, 2, 3, 4}
    q = torch.full((3, VOCAB), 1 / VOCAB)
    drafts = {seq.seq_id: DraftTokens(seq.draft_token_ids, q) for seq in batch}
    assert decoder.decode(batch, logits, drafts) == found


def test_at_temperature_0_it_is_the_greedy_rule() -> None:
    draw = torch.Generator().manual_seed(1)
    logits = torch.randn(60 * 3, VOCAB, generator=draw)
    argmax = logits.argmax(1).tolist()
    batch = [sequence(str(i), [argmax[3 * i], (argmax[3 * i + 1] + i % 2) % VOCAB], temperature=0.0) for i in range(60)]
    exact, typical = (SpeculativeDecoder(vocab_size=VOCAB, acceptance=a) for a in ("exact", "typical"))
    assert typical.decode(batch, logits, {}) == exact.decode(batch, logits, {})
    tiny = [sequence(s.seq_id, s.draft_token_ids, temperature=1e-6) for s in batch]
    assert typical.decode(tiny, logits, {}) == exact.decode(batch, logits, {})


def test_greedy_and_sampled_sequences_share_a_batch() -> None:
    logits = torch.full((4, VOCAB), -30.0)
    logits[:, 5], logits[:, 6] = 1.0, 0.9
    batch = [sequence("greedy", [6], temperature=0.0), sequence("sampled", [6])]
    found = SpeculativeDecoder(vocab_size=VOCAB, acceptance="typical").decode(batch, logits, {})
    assert found == [[5], [6, 5]]


def test_it_says_that_it_is_not_exact() -> None:
    assert SpeculativeDecoder.inexact({"acceptance": "exact", "acceptance_rate": None}) is None
    why = SpeculativeDecoder.inexact({"acceptance": "typical", "acceptance_rate": None})
    assert why is not None and "typical acceptance" in why
    rate = SpeculativeDecoder.inexact({"acceptance": "exact", "acceptance_rate": 0.7})
    assert rate is not None and "0.7" in rate


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"acceptance": "loose"}, "exact, typical"),
        ({"acceptance": "typical", "epsilon": 1.0}, "epsilon"),
        ({"acceptance": "typical", "delta": 0.0}, "delta"),
        ({"acceptance": "typical", "acceptance_rate": 0.5}, "decides alone"),
    ],
)
def test_validate(options: dict[str, object], said: str) -> None:
    axes = {"proposer": {"num_draft_tokens": 2}, "model": {"source": "synthetic"}, "decoding": options}
    [reason] = SpeculativeDecoder.validate(Arm(axes, SHAPE, 64, "cpu", 1 << 20))
    assert said in reason
