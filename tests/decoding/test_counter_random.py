"""Random numbers are a pure function of their key, and look random in every direction of it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import chisquare, kstest

from impls.decoding import counter_random
from impls.decoding.counter_random import Purpose, position_keys, stream_key, uniform
from impls.request import Request, SamplingParams

CPU = torch.device("cpu")
N = 20000
ALPHA = 1e-5
PINNED_STREAM = 102929565186783476
PINNED_UNIFORM = 0.211519940157194


def request(name: str = "r", seed: int = 0) -> Request:
    return Request(name, (1,), SamplingParams(seed=seed))


def exponential(keys: torch.Tensor, num_candidates: int) -> torch.Tensor:
    return counter_random.exponential(keys.unsqueeze(1), torch.arange(num_candidates, device=keys.device))


def keys_along(direction: str, shift: int = 0) -> torch.Tensor:
    steps = range(shift, N + shift)
    if direction == "position":
        return position_keys([request()] * N, list(steps), Purpose.ACCEPT, CPU)
    names = [request(f"r{i}") if direction == "request" else request(seed=i) for i in steps]
    return position_keys(names, [5] * N, Purpose.ACCEPT, CPU)


@pytest.mark.parametrize("direction", ["position", "request", "seed"])
def test_uniform_in_every_direction_and_uncorrelated_with_its_neighbour(direction: str) -> None:
    u = uniform(keys_along(direction)).numpy()
    assert u.dtype == np.float64 and u.min() > 0 and u.max() < 1
    assert chisquare(np.histogram(u, 64, (0, 1))[0]).pvalue > ALPHA
    neighbour = uniform(keys_along(direction, 1)).numpy()
    grid = np.histogram2d(u, neighbour, 16, ((0, 1), (0, 1)))[0]
    assert chisquare(grid.ravel()).pvalue > ALPHA


@pytest.mark.parametrize("a", Purpose)
@pytest.mark.parametrize("b", Purpose)
def test_purposes_share_no_noise(a: Purpose, b: Purpose) -> None:
    ua, ub = (uniform(position_keys([request()] * N, range(N), purpose, CPU)).numpy() for purpose in (a, b))
    grid = np.histogram2d(ua, ub, 16, ((0, 1), (0, 1)))[0]
    assert (chisquare(grid.ravel()).pvalue > ALPHA) == (a != b)


def test_every_row_of_noise_is_exponential_and_rows_are_independent() -> None:
    noise = exponential(position_keys([request()] * 2, [7, 8], Purpose.SAMPLE, CPU), N)
    assert noise.dtype == torch.float32 and noise.isfinite().all() and (noise > 0).all()
    for row in noise.numpy().astype(np.float64):
        assert kstest(row, "expon").pvalue > ALPHA
        assert (
            chisquare(np.histogram2d(np.exp(-row[1:]), np.exp(-row[:-1]), 16, ((0, 1), (0, 1)))[0].ravel()).pvalue
            > ALPHA
        )
    a, b = np.exp(-noise.numpy())
    assert chisquare(np.histogram2d(a, b, 16, ((0, 1), (0, 1)))[0].ravel()).pvalue > ALPHA


def test_small_noise_keeps_its_relative_precision() -> None:
    """A race over a large vocabulary is decided near 0: a 24-bit uniform would tie there."""
    noise = exponential(position_keys([request()] * 8, range(8), Purpose.SAMPLE, CPU), 50000)
    smallest = noise.flatten().sort().values[:500]
    assert smallest.unique().numel() == smallest.numel()


def test_a_number_depends_only_on_its_own_key() -> None:
    together = position_keys([request("a"), request("b", 3)], [4, 9], [Purpose.DRAFT, Purpose.RECOVER], CPU)
    alone = position_keys([request("b", 3)], [9], Purpose.RECOVER, CPU)
    assert together[1] == alone[0]
    assert torch.equal(exponential(together, 100)[1], exponential(alone, 100)[0])
    assert torch.equal(exponential(alone, 300)[:, :100], exponential(alone, 100))


def test_known_values() -> None:
    """Pinned, so also the same in every process (Python salts hash()): a change here changes every recorded sample."""
    keys = position_keys([request("req-1", 7)], [3], Purpose.SAMPLE, CPU)
    assert stream_key(7, "req-1") == PINNED_STREAM
    assert float(uniform(keys)) == PINNED_UNIFORM


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_cuda_gives_the_same_numbers() -> None:
    keys = [position_keys([request()] * 64, range(64), Purpose.SAMPLE, torch.device(d)) for d in ("cpu", "cuda")]
    assert torch.equal(keys[0], keys[1].cpu())
    assert torch.equal(uniform(keys[0]), uniform(keys[1]).cpu())
    # log1p itself may differ in its last bits.
    torch.testing.assert_close(exponential(keys[0], 999), exponential(keys[1], 999).cpu(), rtol=1e-6, atol=0)
