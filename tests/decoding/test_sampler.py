"""Greedy choice and the processed distribution, against definitions written out by hand."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from impls.decoding import sampler
from impls.decoding.autoregressive import AutoregressiveDecoder
from impls.decoding.counter_random import Purpose, position_keys
from impls.request import Request, SamplingParams, Sequence
from impls.seams import NonFiniteLogitsError

NAN, INF = float("nan"), float("inf")


def oracle(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """By the definition, one row, float64; everything that ties with the last one kept is kept."""
    z = (logits - logits.max()) / params.temperature
    if 0 < params.top_k < len(z):
        z = np.where(z < np.sort(z)[::-1][params.top_k - 1], -np.inf, z)
    p = np.exp(z) / np.exp(z).sum()
    if params.top_p < 1:
        held, floor = 0.0, 0.0
        for value in np.sort(p)[::-1]:
            floor = value
            held += value
            if held >= params.top_p:
                break
        p = np.where(p < floor, 0.0, p)
    return p / p.sum()


@settings(max_examples=100)
@given(
    st.lists(st.integers(-3, 3), min_size=2, max_size=300),
    st.sampled_from([0.25, 0.5, 1.0, 2.0]),
    st.integers(0, 12),
    st.sampled_from([0.0, 0.1, 0.3, 0.55, 0.9, 0.999, 1.0]),
)
def test_distribution_is_the_definition(logits: list[int], temperature: float, top_k: int, top_p: float) -> None:
    """Integer logits make ties at the boundaries the rule rather than the exception."""
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
    row = np.array(logits, dtype=np.float64)
    found = sampler.distribution(torch.tensor([logits], dtype=torch.float32), [params])[0].double().numpy()
    wanted = oracle(row, params)
    held = np.cumsum(np.sort(oracle(row, SamplingParams(temperature=temperature, top_k=top_k)))[::-1])
    if np.abs(held - top_p).min() > 1e-6:  # nearer than FP32 can tell, either set is right
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-9)
    assert np.array_equal(found[row == row[0]], np.full((row == row[0]).sum(), found[0])), "equal logits, equal chances"


def test_rows_are_processed_by_their_own_parameters() -> None:
    logits = torch.randn(6, 40, generator=torch.Generator().manual_seed(1))
    params = [
        SamplingParams(temperature=0.3 + 0.2 * i, top_k=(0, 3, 50)[i % 3], top_p=(1.0, 0.5)[i % 2]) for i in range(6)
    ]
    together = sampler.distribution(logits, params)
    for i, own in enumerate(params):
        assert torch.equal(together[i], sampler.distribution(logits[i : i + 1], [own])[0])


def test_a_nucleus_wider_than_the_first_guess(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(3, 500, generator=torch.Generator().manual_seed(2)) * torch.tensor([[0.1], [4.0], [1.0]])
    params = [SamplingParams(temperature=1.0, top_p=0.95)] * 3
    whole = sampler.distribution(logits, params)
    monkeypatch.setattr(sampler, "_NUCLEUS_GUESS", 8)
    assert torch.equal(sampler.distribution(logits, params), whole)
    assert (whole[0] > 0).sum() > 400


def test_a_tiny_temperature_is_the_argmax_without_overflow() -> None:
    logits = torch.tensor([[1e4, 3e4, -1e4, 3e4]])
    probs = sampler.distribution(logits, [SamplingParams(temperature=1e-38)])
    assert probs.tolist() == [[0, 0.5, 0, 0.5]]


def test_a_temperature_that_is_zero_in_fp32_is_the_argmax_too() -> None:
    probs = sampler.distribution(torch.tensor([[1.0, 3.0, 2.0]]), [SamplingParams(max_tokens=1, temperature=1e-300)])
    assert probs.tolist() == [[0.0, 1.0, 0.0]]


@pytest.fixture(scope="module", params=["in one pass", "in blocks"])
def way(request: pytest.FixtureRequest) -> Iterator[None]:
    """Both ways of `argmax`, on rows that a test can afford."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler, "_FEW_LOGITS", 1 << 16 if request.param == "in one pass" else 0)
        yield


@pytest.mark.usefixtures("way")
@settings(max_examples=60)
@given(st.integers(1, 700), st.integers(0, 2**31))
def test_argmax_takes_the_lowest_of_equals(vocab: int, seed: int) -> None:
    logits = torch.randint(0, 4, (5, vocab), generator=torch.Generator().manual_seed(seed)).float()
    assert sampler.argmax(logits).tolist() == np.argmax(logits.numpy(), axis=1).tolist()


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("vocab", [4, 128, 300])
@pytest.mark.parametrize("at", [0, -1])
@pytest.mark.parametrize("value", [NAN, INF])
def test_an_unsound_row_is_flagged_wherever_it_is_unsound(vocab: int, at: int, value: float) -> None:
    logits = torch.zeros(3, vocab)
    logits[1, at] = value
    assert sampler.argmax(logits).tolist() == [0, -1, 0]


@pytest.mark.usefixtures("way")
def test_nothing_but_minus_infinity_is_unsound() -> None:
    assert sampler.argmax(torch.full((1, 200), -INF)).tolist() == [-1]
    assert sampler.argmax(torch.tensor([[-INF, 0.0, -INF]])).tolist() == [1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_nan_row_raises_and_names_its_sequence(temperature: float) -> None:
    logits = torch.zeros(3, 9)
    logits[1] = NAN
    sequences = [Sequence(Request(name, (1,), SamplingParams(temperature=temperature))) for name in "abc"]
    with pytest.raises(NonFiniteLogitsError, match="b") as error:
        AutoregressiveDecoder(vocab_size=9).decode(sequences, logits, {})
    assert error.value.seq_ids == ("b",)


def test_the_race_draws_in_proportion_and_never_what_has_no_weight() -> None:
    weights = torch.tensor([0.0, 5.0, 1.0, 0.0, 3.0, 1e-3, 0.0])
    n = 20000
    keys = position_keys([Request("r", (1,))] * n, range(n), Purpose.SAMPLE, torch.device("cpu"))
    counts = np.bincount(sampler.race(weights.expand(n, -1), keys).numpy(), minlength=7)
    assert (counts[weights.numpy() == 0] == 0).all()
    wanted = weights.double().numpy() / weights.double().sum().item() * n
    keep = wanted > 0
    assert chisquare(counts[keep], wanted[keep]).pvalue > 1e-4


def test_a_race_over_few_candidates_is_the_same_race(monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch decides which way is taken, so the two must agree bit by bit."""
    weights = torch.rand(200, 300, generator=torch.Generator().manual_seed(4))
    weights[weights < 0.9] = 0
    keys = position_keys([Request("r", (1,))] * 200, range(200), Purpose.SAMPLE, torch.device("cpu"))
    sparse = sampler.race(weights, keys)
    monkeypatch.setattr(sampler, "_SPARSE", 10**9)
    assert torch.equal(sampler.race(weights, keys), sparse)
    assert sparse.unique().numel() > 50


def test_greedy_and_sampled_sequences_share_a_batch() -> None:
    logits = torch.randn(40, 11, generator=torch.Generator().manual_seed(3))
    sequences = [Sequence(Request(str(i), (1,), SamplingParams(temperature=i % 2 * 1.0))) for i in range(40)]
    decoder = AutoregressiveDecoder(vocab_size=11)
    together = decoder.decode(sequences, logits, {})
    greedy = logits.argmax(1).tolist()
    assert [t for [t] in together[::2]] == greedy[::2]
    assert [t for [t] in together[1::2]] != greedy[1::2]
    assert together == [decoder.decode([seq], logits[i : i + 1], {})[0] for i, seq in enumerate(sequences)]


def test_logits_must_match_the_sequences() -> None:
    with pytest.raises(ValueError, match="expected"):
        AutoregressiveDecoder(vocab_size=5).decode([Sequence(Request("a", (1,)))], torch.zeros(2, 5), {})
