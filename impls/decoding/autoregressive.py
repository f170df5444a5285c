"""One token a step, from the last position's logits: the reference decoding."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq

from torch import Tensor

from impls.decoding import sampler
from impls.decoding.counter_random import Purpose, position_keys
from impls.request import Sequence
from impls.seams import Decoder, DraftTokens


class AutoregressiveDecoder(Decoder):
    """Greedy where the temperature is 0 (one argmax for the batch), sampled elsewhere; both may share a batch."""

    def __init__(self, *, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def decode(self, sequences: Seq[Sequence], logits: Tensor, drafts: Mapping[str, DraftTokens]) -> list[list[int]]:
        """Exactly one token for each sequence. Raises NonFiniteLogitsError, ValueError on rows that do not match."""
        expected = (len(sequences), self.vocab_size)
        if tuple(logits.shape) != expected:
            raise ValueError(f"logits {tuple(logits.shape)}, expected {expected}")
        tokens = sampler.target_ids(sequences, [1] * len(sequences), logits)
        rows = [i for i, seq in enumerate(sequences) if seq.request.sampling.temperature > 0]
        if rows:
            sampled = [sequences[i] for i in rows]
            probs = sampler.distribution(logits[rows], [seq.request.sampling for seq in sampled])
            positions = [seq.num_tokens for seq in sampled]
            keys = position_keys([seq.request for seq in sampled], positions, Purpose.SAMPLE, logits.device)
            for i, token in zip(rows, sampler.race(probs, keys).tolist(), strict=True):
                tokens[i] = token
        return [[token] for token in tokens]
