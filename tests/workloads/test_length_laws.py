"""Lengths follow their law, stay inside their bounds and depend on nothing but the seed."""

import numpy as np
import pytest
from scipy import stats

from workloads.lengths import CappedExponential, Constant, Empirical, LognormalMixture, Uniform

N = 100_000


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_constant():
    assert set(Constant(7).sample(rng(), 10).tolist()) == {7}


def test_uniform_reaches_both_ends_evenly():
    drawn = Uniform(3, 12).sample(rng(), N)
    counts = np.bincount(drawn, minlength=13)
    assert counts[:3].sum() == 0 and len(counts) == 13
    assert stats.chisquare(counts[3:]).pvalue > 0.01


@pytest.mark.parametrize(("mean", "cap"), [(128.0, 32), (128.0, 512), (48.0, 192)])
def test_capped_exponential_is_rejection_not_clipping(mean, cap):
    drawn = CappedExponential(mean, cap).sample(rng(1), N)
    oracle = np.rint(np.random.default_rng(99).exponential(mean, 20 * N))
    oracle = oracle[(oracle >= 1) & (oracle <= cap)][:N]
    assert drawn.min() >= 1 and drawn.max() <= cap
    assert stats.ks_2samp(drawn, oracle).pvalue > 0.01
    assert np.mean(drawn == cap) < 2.5 * np.mean((drawn >= cap - 4) & (drawn < cap)) / 4 + 1e-3  # no heap at the cap


# Static batching's slot utilisation is mean / E[longest of the batch]; claims about continuous batching rest on it.
@pytest.mark.parametrize(
    ("cap", "batch", "published"), [(32, 16, 0.53), (128, 12, 0.47), (512, 8, 0.39), (1536, 4, 0.48)]
)
def test_anyscale_lengths_give_the_published_static_slot_utilisation(cap, batch, published):
    drawn = CappedExponential(128.0, cap).sample(rng(2), 9600).reshape(-1, batch)
    assert drawn.mean() / drawn.max(axis=1).mean() == pytest.approx(published, abs=0.02)


def test_lognormal_mixture_weighs_its_parts_and_clips():
    law = LognormalMixture(mu=(2.0, 7.0), sigma=(0.1, 0.1), weights=(3.0, 1.0), low=7, high=1100)
    drawn = law.sample(rng(3), N)
    assert np.mean(drawn < 100) == pytest.approx(0.75, abs=0.01)
    assert drawn.min() == 7 and drawn.max() == 1100
    assert np.median(drawn[drawn > 100]) == pytest.approx(np.exp(7.0), rel=0.01)


def test_empirical_hits_its_quantiles_and_atoms():
    law = Empirical((0.0, 0.2, 0.5, 0.8, 1.0), (10, 50, 50, 200, 1000))
    drawn = law.sample(rng(4), N)
    assert np.mean(drawn == 50) == pytest.approx(0.3, abs=0.01)
    assert np.quantile(drawn, 0.8) == pytest.approx(200, rel=0.02)
    assert drawn.min() >= 10 and drawn.max() <= 1000


LAWS = [
    Uniform(1, 9),
    CappedExponential(20.0, 64),
    LognormalMixture((3.0, 4.0), (1.0, 0.2), (0.4, 0.6)),
    Empirical((0.0, 1.0), (1, 99)),
]


@pytest.mark.parametrize("law", LAWS, ids=lambda law: type(law).__name__)
def test_prefix_of_a_longer_stream_and_seeded(law):
    short, long = law.sample(rng(5), 300), law.sample(rng(5), 3000)
    assert short.tolist() == long[:300].tolist()
    assert short.tolist() != law.sample(rng(6), 300).tolist()
    assert long.dtype == np.int64 and long.min() >= 1
