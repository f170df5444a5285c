"""Arrivals have the spacing that their name promises (one public tool's 'constant' had a CV of 0.98)."""

import time

import numpy as np
import pytest
from scipy import stats

from workloads.arrivals import (
    ARRIVALS,
    Burst,
    ClosedLoop,
    Constant,
    Gamma,
    OnOff,
    Piecewise,
    Poisson,
    index_of_dispersion,
)

N = 20_000


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def cv(times: np.ndarray) -> float:
    gaps = np.diff(times)
    return float(gaps.std() / gaps.mean())


def test_burst_is_at_zero():
    assert Burst().sample(rng(), 5).tolist() == [0.0] * 5


def test_constant_has_no_spread():
    times = Constant(4.0).sample(rng(), 100)
    assert cv(times) < 1e-9
    assert times[-1] == 25.0


@pytest.mark.parametrize("rate", [0.5, 20.0])
def test_poisson_gaps_are_exponential(rate):
    gaps = np.diff(Poisson(rate).sample(rng(1), N))
    assert stats.kstest(gaps, "expon", args=(0, 1 / rate)).pvalue > 0.01
    # Not on a grid: a per-second generator put 79 % of its arrivals on whole seconds.
    assert np.mean(np.abs(gaps.cumsum() % 1.0 - 0.5) > 0.499) < 0.01


@pytest.mark.parametrize("wanted", [0.5, 1.0, 3.0])
def test_gamma_has_the_cv_and_rate_asked_for(wanted):
    times = Gamma(2.0, wanted).sample(rng(2), 10 * N)
    assert cv(times) == pytest.approx(wanted, rel=0.03)
    assert 10 * N / times[-1] == pytest.approx(2.0, rel=0.03)
    shape = 1 / wanted**2
    # Not a KS test: where cv is 3, gaps below the resolution of a time in seconds are common and round to 0.
    quantiles = [0.5, 0.75, 0.9, 0.99]
    np.testing.assert_allclose(
        np.quantile(np.diff(times), quantiles), stats.gamma.ppf(quantiles, shape, scale=0.5 / shape), rtol=0.05
    )


def test_onoff_is_silent_between_bursts():
    law = OnOff(rate=5.0, on_s=10.0, off_s=30.0, off_min_s=20.0)
    times = law.sample(rng(3), 10 * N)
    gaps = np.diff(times)
    assert 10 * N / times[-1] == pytest.approx(5.0, rel=0.05)
    silent = gaps > 20.0
    # 200 arrivals an on period, so 1 gap in 200 spans a silence of at least 20 s; the others are 1/20 s on average.
    assert silent.mean() == pytest.approx(1 / 200, rel=0.1)
    assert gaps[~silent].mean() == pytest.approx(1 / 20, rel=0.05)
    assert gaps[silent].mean() == pytest.approx(30.0, rel=0.05)


@pytest.mark.parametrize(
    "law",
    [
        OnOff(rate=1e-6, on_s=1e-3, off_s=1e-3),
        OnOff(rate=1e-6, on_s=1e-3, off_s=1e9, off_min_s=1e9, cv=100.0),
        OnOff(rate=1e9, on_s=1e9, off_s=1e-3, cv=1e-3),
        Piecewise(1e-6, ((1e-3, 1e-9), (1e9, 0.0), (1e-3, 1e9)), cv=100.0),
        Piecewise(1e9, ((1e-3, 1e9), (1e9, 1e-9)), cv=0.0),
        Gamma(1e-6, 100.0),
        Gamma(1e9, 1e-3),
        Poisson(1e-6),
        Constant(1e-6),
    ],
    ids=repr,
)
def test_the_extremes_of_every_option_give_finite_times_at_once(law):
    began = time.monotonic()
    times = law.sample(rng(9), N)
    assert np.isfinite(times).all() and (np.diff(times) >= 0).all() and time.monotonic() - began < 5


def test_piecewise_follows_its_rates_and_repeats():
    law = Piecewise(rate=4.0, segments=((10.0, 1.0), (20.0, 0.0), (10.0, 3.0)))
    times = law.sample(rng(4), N)
    assert N / times[-1] == pytest.approx(4.0, rel=0.05)
    phase = times % 40.0
    counts = np.histogram(phase, bins=[0, 10, 30, 40])[0]
    assert counts[1] == 0
    assert counts[2] / counts[0] == pytest.approx(3.0, rel=0.05)
    assert times[-1] > 100 * 40.0


def test_piecewise_of_one_rate_is_poisson():
    same = Piecewise(rate=4.0, segments=((7.0, 2.0), (5.0, 2.0))).sample(rng(5), N)
    assert stats.kstest(np.diff(same), "expon", args=(0, 0.25)).pvalue > 0.01


def test_closed_loop_starts_one_request_a_client():
    assert ClosedLoop(3).sample(rng(), 10).tolist() == [0.0] * 3
    assert len(ClosedLoop(30).sample(rng(), 10)) == 10


@pytest.mark.parametrize(
    "law",
    [
        Constant(3.0),
        Poisson(3.0),
        Gamma(3.0, 2.0),
        OnOff(3.0, 5.0, 5.0, cv=2.0),
        Piecewise(3.0, ((5.0, 1.0), (1.0, 9.0))),
    ],
    ids=lambda law: type(law).__name__,
)
def test_seeded_sorted_and_a_prefix_of_a_longer_stream(law):
    short, long = law.sample(rng(6), 500), law.sample(rng(6), 5000)
    np.testing.assert_allclose(short, long[:500], rtol=1e-12)
    assert (np.diff(long) >= 0).all() and long[0] > 0
    if not isinstance(law, Constant):
        assert not np.allclose(short, law.sample(rng(7), 500))


def test_dispersion_tells_poisson_from_bursts():
    assert index_of_dispersion(Poisson(5.0).sample(rng(8), N), 1) == pytest.approx(1.0, abs=0.1)
    assert index_of_dispersion(Gamma(5.0, 4.0).sample(rng(8), N), 10) > 5
    assert index_of_dispersion(np.array([0.0, 1.5]), 1) is None
    assert index_of_dispersion(np.zeros(9), 1) is None
    by_hand = np.array([0.1, 0.2, 2.5, 3.0, 5.5])  # windows of 1 s up to 5: 2, 0, 1, 1, 0
    assert index_of_dispersion(by_hand, 1) == pytest.approx(np.var([2, 0, 1, 1, 0]) / np.mean([2, 0, 1, 1, 0]))
    sparse = index_of_dispersion(np.array([0.0, 1e300, 2e300]), 1)  # more empty windows than any memory holds
    assert sparse == pytest.approx(1.0)


def test_every_law_is_registered():
    assert set(ARRIVALS) == {"burst", "constant", "poisson", "gamma", "onoff", "piecewise", "closed_loop"}
