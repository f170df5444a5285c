"""One token a step, from the last position's logits: the reference decoding."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from impls.decoding import sampler
from impls.decoding.counter_random import Purpose, position_keys
from impls.request import Request, Sequence
from impls.seams import Decoder, DraftTokens, NonFiniteLogitsError
from impls.upload import upload


class AutoregressiveDecoder(Decoder):
    """Greedy where the temperature is 0 (one argmax for the batch), sampled elsewhere; both may share a batch."""

    def __init__(self, *, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def decode(self, sequences: Seq[Sequence], logits: Tensor, drafts: Mapping[str, DraftTokens]) -> list[list[int]]:
        """Exactly one token for each sequence. Raises NonFiniteLogitsError naming those without a sound row (nothing
        was changed, so the others can be decoded again without them), ValueError on rows that do not match."""
        expected = (len(sequences), self.vocab_size)
        if tuple(logits.shape) != expected:
            raise ValueError(f"logits {tuple(logits.shape)}, expected {expected}")
        found = self.sample([s.request for s in sequences], [s.num_tokens for s in sequences], logits).tolist()
        if min(found, default=0) < 0:
            raise NonFiniteLogitsError([s.seq_id for s, token in zip(sequences, found, strict=True) if token < 0])
        return [[token] for token in found]

    def sample(self, requests: Seq[Request], positions: Seq[int], logits: Tensor) -> Tensor:
        if not requests:
            return torch.empty(0, dtype=torch.int64, device=logits.device)
        tokens = sampler.argmax(logits)
        rows = [row for row, request in enumerate(requests) if request.sampling.temperature > 0]
        if rows:
            drawn = [requests[row] for row in rows]
            index = upload(rows, logits.device)
            probs = sampler.distribution(logits[index], [request.sampling for request in drawn])
            keys = position_keys(drawn, [positions[row] for row in rows], Purpose.SAMPLE, logits.device)
            tokens[index] = torch.where(tokens[index] < 0, -1, sampler.race(probs, keys))
        return tokens
