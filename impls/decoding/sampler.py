"""From a row of logits to a token: greedy, or a draw from the distribution after temperature, top-k and top-p."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from impls.decoding import counter_random
from impls.request import SamplingParams
from impls.upload import upload

_FEW_LOGITS = 16384  # up to here one reduction that is not vectorised takes less than calling several that are
_ARGMAX_BLOCK = 128  # two vectorised reductions: about a fifth of the time of torch.argmax over a long row on a CPU
_NUCLEUS_GUESS = 1024  # candidates looked at before a row is sorted whole
_SPARSE = 4  # where fewer than one weight in so many is left, the race runs over those alone


def argmax(logits: Tensor) -> Tensor:
    """int64 [R] from [R, V]: the largest logit, the lowest index among equals; -1 where a NaN or +inf is in the row,
    or nothing but -inf."""
    vocab = logits.shape[1]
    if logits.numel() <= _FEW_LOGITS:
        largest, token = logits.max(1)
        return torch.where(largest.isfinite(), token, -1)
    whole = vocab // _ARGMAX_BLOCK * _ARGMAX_BLOCK
    maxima = logits[:, :whole].view(-1, whole // _ARGMAX_BLOCK, _ARGMAX_BLOCK).amax(2) if whole else logits[:, :0]
    if whole < vocab:
        maxima = torch.cat((maxima, logits[:, whole:].amax(1, keepdim=True)), dim=1)
    start = maxima.argmax(1, keepdim=True) * _ARGMAX_BLOCK
    # The last block may be short: clamping repeats its last entry, and argmax takes the first of equals.
    window = (start + torch.arange(_ARGMAX_BLOCK, device=logits.device)).clamp_(max=vocab - 1)
    token = start + logits.gather(1, window).argmax(1, keepdim=True)
    # amax and argmax let a NaN win, so the winner alone shows whether the row is sound.
    return torch.where(logits.gather(1, token).isfinite(), token, -1).squeeze(1)


def distribution(logits: Tensor, params: Seq[SamplingParams]) -> Tensor:
    """FP32 [R, V]: what each row is sampled from. Temperature, then top-k, then top-p over what is left.

    Ties at the boundary of top-k and of top-p are all kept, so the result does not depend on a sort's order. Every
    temperature must be positive; a tiny one tends to uniform over the largest logits, without overflow.
    """
    device = logits.device
    temperature = upload([p.temperature for p in params], device, torch.float32).unsqueeze(1)
    temperature.clamp_min_(torch.finfo(torch.float32).tiny)  # what is 0 in FP32 would make 0 / 0 of the largest logit
    scaled = (logits - logits.amax(1, keepdim=True)).div_(temperature)
    vocab = logits.shape[1]
    rows = [i for i, p in enumerate(params) if 0 < p.top_k < vocab]
    if rows:
        index, counts = upload(rows, device), upload([params[i].top_k for i in rows], device).unsqueeze(1)
        largest = scaled[index].topk(max(params[i].top_k for i in rows)).values
        floor = torch.full_like(temperature, -torch.inf)
        floor[index] = largest.gather(1, counts - 1)
        scaled.masked_fill_(scaled < floor, -torch.inf)
    probs = scaled.softmax(1)
    rows = [i for i, p in enumerate(params) if p.top_p < 1]
    if rows:
        index, mass = upload(rows, device), upload([params[i].top_p for i in rows], device, torch.float64).unsqueeze(1)
        floor = torch.zeros_like(temperature)
        floor[index] = _nucleus_floor(probs[index], mass, min(vocab, _NUCLEUS_GUESS))
        probs.masked_fill_(probs < floor, 0.0)
        # Rows without top-p keep their bits, whoever shares the batch.
        probs.div_(torch.where(floor > 0, probs.sum(1, keepdim=True), 1.0))
    return probs


def _nucleus_floor(probs: Tensor, mass: Tensor, width: int) -> Tensor:
    """[R, 1]: the smallest probability in the nucleus, the shortest prefix in falling order that holds ``mass``."""
    values = probs.topk(width).values
    held = values.double().cumsum(1)
    last = (held < mass).sum(1, keepdim=True).clamp_(max=width - 1)
    floor = values.gather(1, last)
    short = (held[:, -1:] < mass).squeeze(1)
    if width < probs.shape[1] and bool(short.any()):
        floor[short] = _nucleus_floor(probs[short], mass[short], probs.shape[1])
    return floor


def race(weights: Tensor, keys: Tensor) -> Tensor:
    """int64 [R]: one draw a row, in proportion to non-negative ``weights`` [R, V] that need no normalising.

    An exponential race: the largest weight/noise wins. ``keys`` [R] from `counter_random.position_keys`. After top-k or
    top-p few candidates are left, and noise is made for those only: it is a function of the candidate. Not on a GPU:
    there noise for all takes less than to wait for how many are left.
    """
    if weights.device.type != "cpu" or int(weights.count_nonzero()) * _SPARSE > weights.numel():
        candidates = torch.arange(weights.shape[1], device=weights.device)
        return argmax(weights / counter_random.exponential(keys.unsqueeze(1), candidates))
    rows, candidates = weights.nonzero(as_tuple=True)
    scores = torch.zeros_like(weights)
    scores[rows, candidates] = weights[rows, candidates] / counter_random.exponential(keys[rows], candidates)
    return argmax(scores)
