"""Speculation leaves the joint distribution of whole sequences alone: chi-square on an enumerable model, and the
mutations that must not pass it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.stats import chisquare, norm
from torch import Tensor

from impls.decoding import sampler, speculative, verifier
from impls.decoding.autoregressive import AutoregressiveDecoder
from impls.decoding.counter_random import Purpose, position_keys
from impls.decoding.proposers.draft_model import DraftModelProposer
from impls.decoding.speculative import SpeculativeDecoder
from impls.request import Request, SamplingParams, Sequence
from impls.seams import Decoder, DraftTokens, ModelShape, Proposer

VOCAB, LENGTH, MAX_DRAFTS, PROMPT = 4, 4, 3, (0, 1)
ALPHA = 1e-3 / 10  # Bonferroni over the exactness cases below; seeds are fixed, so a pass stays a pass
REJECTED = 1e-7
SAMPLES = 3000
SHAPE = ModelShape(VOCAB, 8, 8, 2, 1, 1, 8, 64)


class HistoryModel:
    """Logits that depend on the whole output so far: a table with a row for every output that a step may score,
    the given distribution with seeded noise on its logits."""

    def __init__(self, seed: int, around: Seq[float], scale: float = 0.8) -> None:
        rows = sum(VOCAB**n for n in range(LENGTH + MAX_DRAFTS + 1))
        noise = np.random.default_rng(seed).normal(0, scale, (rows, VOCAB))
        self.table = torch.from_numpy((np.log(around) + noise).astype(np.float32))

    @staticmethod
    def row(output: Seq[int]) -> int:
        code = 0
        for token in output:
            code = code * VOCAB + token + 1  # bijective numeration: outputs of different length never share a row
        return code

    def logits(self, outputs: Seq[Seq[int]]) -> Tensor:
        return self.table[[self.row(output) for output in outputs]]


class TableRunner:
    """`ModelRunner` over a HistoryModel; it fails where K/V of an earlier position is missing or stale (bug 7)."""

    def __init__(self, draft: HistoryModel) -> None:
        self.draft = draft
        self.cache: dict[str, list[int]] = {}
        self.truth: dict[str, Sequence] = {}
        self.calls = 0

    def draft_forward(
        self, tokens: Mapping[str, Seq[int]], starts: Mapping[str, int], *, model: str, num_layers: int | None = None
    ) -> dict[str, Tensor]:
        assert model == "draft" and num_layers is None
        self.calls += 1
        for seq_id, new in tokens.items():
            held = self.cache.setdefault(seq_id, [])
            assert starts[seq_id] <= len(held), "a hole in the draft's K/V"
            self.cache[seq_id] = context = [*held[: starts[seq_id]], *new]
            verified = self.truth[seq_id].token_ids
            assert context[: len(verified)] == verified[: len(context)], "the draft attends to rejected tokens"
        rows = self.draft.logits([self.cache[seq_id][len(PROMPT) :] for seq_id in tokens])
        return dict(zip(tokens, rows, strict=True))


class GreedyDrafts(DraftModelProposer):
    """One-hot drafts for sampled requests."""

    def __init__(self) -> None:
        super().__init__(vocab_size=VOCAB, shape=SHAPE, num_draft_tokens=MAX_DRAFTS, draft_sampling="greedy")


class MixedDrafts(DraftModelProposer):
    """Half of the sequences lose their probabilities: then a drawn draft is treated as one-hot, which is also exact."""

    def __init__(self) -> None:
        super().__init__(vocab_size=VOCAB, shape=SHAPE, num_draft_tokens=MAX_DRAFTS)

    def propose(self, sequences, k, runner):  # type: ignore[no-untyped-def]
        drafts = super().propose(sequences, k, runner)
        return {i: DraftTokens(d.token_ids, None if int(i) % 2 else d.probs) for i, d in drafts.items()}


def sampled_drafts() -> Proposer:
    return DraftModelProposer(vocab_size=VOCAB, shape=SHAPE, num_draft_tokens=MAX_DRAFTS)


@dataclass
class Generated:
    sequences: list[Sequence]
    drafted: int = 0
    accepted: int = 0


def generate(
    target: HistoryModel,
    requests: Seq[Request],
    decoder: Decoder,
    proposer: Proposer | None = None,
    draft: HistoryModel | None = None,
) -> Generated:
    """What an engine does, without a cache: propose, score, decode, append; 0..MAX_DRAFTS drafts a sequence."""
    result = Generated([Sequence(request) for request in requests])
    runner = TableRunner(draft or target)
    while active := [seq for seq in result.sequences if seq.num_output_tokens < LENGTH]:
        runner.truth = {seq.seq_id: seq for seq in active}
        k = {seq.seq_id: (i + seq.num_tokens) % (MAX_DRAFTS + 1) for i, seq in enumerate(active)}
        drafts = proposer.propose(active, k, runner) if proposer else {}
        outputs = []
        for seq in active:
            seq.draft_token_ids = list(drafts[seq.seq_id].token_ids) if seq.seq_id in drafts else []
            output = seq.token_ids[len(PROMPT) :]
            outputs += [output + seq.draft_token_ids[:j] for j in range(len(seq.draft_token_ids) + 1)]
        for seq, new in zip(active, decoder.decode(active, target.logits(outputs), drafts), strict=True):
            result.drafted += len(seq.draft_token_ids)
            result.accepted += len(new) - 1
            seq.token_ids += new
            seq.draft_token_ids = []
    return result


def processed(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """The oracle: temperature, top-k, top-p for one row without ties, in float64 and by the book."""
    order = np.argsort(-logits)
    p = np.exp((logits - logits.max()) / params.temperature)
    if params.top_k:
        p[order[params.top_k :]] = 0
    p /= p.sum()
    held = 0.0
    for rank, token in enumerate(order):
        if held >= params.top_p:
            p[order[rank:]] = 0
            break
        held += p[token]
    return p / p.sum()


def joint(target: HistoryModel, params: SamplingParams) -> np.ndarray:
    """Probability of every output of LENGTH tokens, in the order of `product`."""
    rows = {
        prefix: processed(target.table[target.row(prefix)].double().numpy(), params)
        for n in range(LENGTH)
        for prefix in product(range(VOCAB), repeat=n)
    }
    return np.array([np.prod([rows[s[:n]][s[n]] for n in range(LENGTH)]) for s in product(range(VOCAB), repeat=LENGTH)])


def p_value(sequences: Seq[Sequence], expected: np.ndarray) -> float:
    """Chi-square of the joint counts; cells expecting fewer than 5 are pooled. 0 if an impossible output occurred."""
    codes = [int(np.ravel_multi_index(s.token_ids[len(PROMPT) :][:LENGTH], (VOCAB,) * LENGTH)) for s in sequences]
    counts = np.bincount(codes, minlength=VOCAB**LENGTH).astype(float)
    if counts[expected == 0].any():
        return 0.0
    wanted = expected * len(codes)
    small = wanted < 5
    observed = np.append(counts[~small], counts[small].sum())
    wanted = np.append(wanted[~small], wanted[small].sum())
    keep = wanted > 0
    return float(chisquare(observed[keep], wanted[keep]).pvalue)


def requests_of(params: SamplingParams, n: int, first: int = 0) -> list[Request]:
    return [Request(str(first + i), PROMPT, SamplingParams(**vars(params))) for i in range(n)]


# Chosen so that a shared noise shows: the residual has several tokens, which the draft proposes very unequally.
TARGET = HistoryModel(1, (0.05, 0.16, 0.75, 0.04))
DRAFT = HistoryModel(2, (0.37, 0.005, 0.455, 0.17))
PLAIN = SamplingParams(temperature=1.0, seed=3)
LAWS = {
    "plain": PLAIN,
    "temperature_top_k": SamplingParams(temperature=0.7, top_k=3, seed=4),
    "top_k_top_p": SamplingParams(temperature=1.3, top_k=3, top_p=0.8, seed=5),
    "top_p": SamplingParams(temperature=1.0, top_p=0.7, seed=6),
}


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def speculate(params: SamplingParams, proposer: Proposer) -> float:
    made = generate(TARGET, requests_of(params, SAMPLES), SpeculativeDecoder(vocab_size=VOCAB), proposer, DRAFT)
    return p_value(made.sequences, joint(TARGET, params))


@pytest.mark.parametrize(
    ("law", "proposer"),
    [(law, sampled_drafts) for law in LAWS] + [(law, GreedyDrafts) for law in ("plain", "top_k_top_p")],
)
def test_speculation_samples_the_targets_joint_distribution(law: str, proposer: Callable[[], Proposer]) -> None:
    assert speculate(LAWS[law], proposer()) > ALPHA


def test_probabilities_and_one_hot_drafts_may_share_a_batch() -> None:
    assert speculate(PLAIN, MixedDrafts()) > ALPHA


@pytest.mark.parametrize("law", ["plain", "top_k_top_p"])
def test_autoregressive_samples_the_targets_joint_distribution(law: str) -> None:
    made = generate(TARGET, requests_of(LAWS[law], SAMPLES), AutoregressiveDecoder(vocab_size=VOCAB))
    assert p_value(made.sequences, joint(TARGET, LAWS[law])) > ALPHA


def shared_noise(purpose: Purpose) -> Callable[..., Tensor]:
    def keys(requests, positions, purposes, device):  # type: ignore[no-untyped-def]
        each = [purposes] * len(requests) if isinstance(purposes, Purpose) else purposes
        return position_keys(requests, positions, [Purpose.DRAFT if p == purpose else p for p in each], device)

    return keys


def bonus_off_by_one(starts: Seq[int], accepted: Seq[int]) -> list[int]:
    ends = [*starts[1:], starts[-1] + accepted[-1] + 1]
    rows = [start + count for start, count in zip(starts, accepted, strict=True)]
    return [
        row - 1 if row + 1 == end and row > start else row for row, start, end in zip(rows, starts, ends, strict=True)
    ]


def top_p_on_bonus_only(logits: Tensor, params: Seq[SamplingParams]) -> Tensor:
    bonus = [i + 1 == len(params) or params[i] is not params[i + 1] for i in range(len(params))]
    return sampler.distribution(
        logits,
        [p if last else SamplingParams(temperature=p.temperature) for p, last in zip(params, bonus, strict=True)],
    )


MUTATIONS = {
    "residual_dropped": (verifier, "residual", lambda p, q: p),
    "recover_shares_the_drafts_noise": (verifier, "position_keys", shared_noise(Purpose.RECOVER)),
    "accept_shares_the_drafts_noise": (verifier, "position_keys", shared_noise(Purpose.ACCEPT)),
    "bonus_off_by_one": (verifier, "final_rows", bonus_off_by_one),
    "top_p_on_the_bonus_only": (
        speculative,
        "sampler",
        SimpleNamespace(argmax=sampler.argmax, distribution=top_p_on_bonus_only),
    ),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_the_chi_square_test_rejects_a_wrong_verifier(mutation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    law = LAWS["top_p"] if mutation == "top_p_on_the_bonus_only" else PLAIN
    monkeypatch.setattr(*MUTATIONS[mutation])
    assert speculate(law, sampled_drafts()) < REJECTED


@pytest.mark.parametrize("law", [*LAWS, "greedy"])
def test_a_draft_that_is_the_target_is_always_accepted(law: str) -> None:
    params = LAWS.get(law, SamplingParams())
    made = generate(TARGET, requests_of(params, 500), SpeculativeDecoder(vocab_size=VOCAB), sampled_drafts(), TARGET)
    assert made.accepted == made.drafted > 500


def test_measured_acceptance_is_the_sum_of_min_p_q() -> None:
    """One draft a step from a fixed history: P(accept) = sum over x of min(p(x), q(x))."""
    n = 10000
    p, q = (m.table[:1].double().softmax(1) for m in (TARGET, DRAFT))
    beta = float(torch.minimum(p, q).sum())
    sequences = [Sequence(r) for r in requests_of(PLAIN, n)]
    runner = TableRunner(DRAFT)
    runner.truth = {seq.seq_id: seq for seq in sequences}
    drafts = sampled_drafts().propose(sequences, {seq.seq_id: 1 for seq in sequences}, runner)
    for seq in sequences:
        seq.draft_token_ids = drafts[seq.seq_id].token_ids
    logits = TARGET.logits([output for seq in sequences for output in ([], seq.draft_token_ids)])
    decoded = SpeculativeDecoder(vocab_size=VOCAB).decode(sequences, logits, drafts)
    rate = sum(len(tokens) - 1 for tokens in decoded) / n
    assert 0.3 < beta < 0.95
    assert abs(rate - beta) < norm.ppf(1 - ALPHA / 2) * (beta * (1 - beta) / n) ** 0.5


def test_greedy_speculation_is_greedy_decoding() -> None:
    drafted = accepted = 0
    for seed in range(20):
        target = HistoryModel(seed, (0.25,) * VOCAB, scale=1.5)
        draft = HistoryModel(seed + 100, (0.25,) * VOCAB, scale=0.5)
        draft.table += 0.6 * target.table
        requests = requests_of(SamplingParams(), 4)
        plain = generate(target, requests, AutoregressiveDecoder(vocab_size=VOCAB))
        fast = generate(target, requests, SpeculativeDecoder(vocab_size=VOCAB), sampled_drafts(), draft)
        drafted, accepted = drafted + fast.drafted, accepted + fast.accepted
        for a, b in zip(plain.sequences, fast.sequences, strict=True):
            assert a.token_ids[: len(PROMPT) + LENGTH] == b.token_ids[: len(PROMPT) + LENGTH]
    assert 0.2 < accepted / drafted < 0.9


@pytest.mark.parametrize("with_drafts", [False, True])
def test_a_sample_does_not_depend_on_who_shares_the_batch(with_drafts: bool) -> None:
    mixed = [
        Request(str(i), PROMPT, SamplingParams(temperature=(0.0, 1.0, 0.6)[i % 3], top_k=(0, 2)[i % 2], seed=i))
        for i in range(30)
    ]

    class CountById(DraftModelProposer):
        """The number of drafts is the sequence's own, or the batch would show through the number."""

        def propose(self, sequences, k, runner):  # type: ignore[no-untyped-def]
            return super().propose(sequences, {s.seq_id: int(s.seq_id) % (MAX_DRAFTS + 1) for s in sequences}, runner)

    def run(requests: Seq[Request]) -> dict[str, list[int]]:
        proposer = CountById(vocab_size=VOCAB, shape=SHAPE, num_draft_tokens=MAX_DRAFTS) if with_drafts else None
        decoder: Decoder = (SpeculativeDecoder if with_drafts else AutoregressiveDecoder)(vocab_size=VOCAB)
        return {s.seq_id: s.token_ids for s in generate(TARGET, requests, decoder, proposer, DRAFT).sequences}

    together = run(mixed)
    assert len({tuple(t) for t in together.values()}) > 5
    assert run(mixed[::-1]) == together
    for request in mixed:
        assert run([request]) == {request.request_id: together[request.request_id]}
