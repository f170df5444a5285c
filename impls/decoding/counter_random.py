"""Random numbers as a pure function of what they are for: (seed, request, position, purpose, candidate).

No generator is advanced, so a sample depends neither on who shared the batch nor on how often a step was repeated,
and no two uses share noise. SplitMix64 (Steele, Lea, Flood, OOPSLA 2014): a stream's n-th value is
``mix(key + n * gamma)``. Only wrapping int64 arithmetic is used: CPU and CUDA give the same bits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence as Seq
from enum import IntEnum
from functools import lru_cache

import torch
from torch import Tensor

from impls.request import Request
from impls.upload import upload


class Purpose(IntEnum):
    """What a random number decides."""

    SAMPLE = 0  # the token that the target draws itself: autoregressive, or the bonus after a full acceptance
    DRAFT = 1  # the token that a proposer draws
    ACCEPT = 2  # whether a draft stands
    RECOVER = 3  # the token that replaces a rejected draft


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


_GAMMA = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)


def _mix_(z: Tensor) -> Tensor:
    """SplitMix64's finaliser, in place. int64 shifts are arithmetic, so the copied sign bits are masked off."""
    z.bitwise_xor_((z >> 30).bitwise_and_((1 << 34) - 1)).mul_(_MIX_1)
    z.bitwise_xor_((z >> 27).bitwise_and_((1 << 37) - 1)).mul_(_MIX_2)
    return z.bitwise_xor_((z >> 31).bitwise_and_((1 << 33) - 1))


@lru_cache(maxsize=1 << 16)
def stream_key(seed: int, request_id: str) -> int:
    """The 64-bit (signed) key of one request's random numbers; the same in every process and on every machine."""
    digest = hashlib.blake2b(f"{seed}:{request_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def position_keys(
    requests: Seq[Request], positions: Seq[int], purposes: Purpose | Seq[Purpose], device: torch.device
) -> Tensor:
    """int64 [R]: the key of each row. ``positions`` are indices into the sequence of the token that is decided."""
    if isinstance(purposes, Purpose):
        purposes = [purposes] * len(requests)
    streams = [stream_key(r.sampling.seed, r.request_id) for r in requests]
    keys, steps, uses = upload([streams, list(positions), list(purposes)], device)
    return _mix_(_mix_(keys + (steps + 1) * _GAMMA) + (uses + 1) * _GAMMA)


def uniform(keys: Tensor) -> Tensor:
    """Float64 [R], uniform on the open interval (0, 1): candidate 0 of each key.

    Float32 would yield an exact 0 now and then, and with it accept what has no probability.
    """
    bits = _mix_(keys + _GAMMA)
    return ((bits >> 12).bitwise_and_((1 << 52) - 1).double() + 0.5) * 2.0**-52


def exponential(keys: Tensor, candidates: Tensor) -> Tensor:
    """FP32 of the two shapes broadcast together: standard exponential noise, positive and finite.

    From 63 bits through log1p, so that the small values, which decide a race, keep their full relative precision.
    """
    bits = _mix_(keys + (candidates + 1) * _GAMMA).bitwise_and_((1 << 63) - 1).bitwise_or_(1)
    return bits.float().mul_(2.0**-63).clamp_(max=1 - 2.0**-24).neg_().log1p_().neg_()
