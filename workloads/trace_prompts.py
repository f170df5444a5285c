"""Prompts of a replay: those that the file gives, blocks that its hash_ids name, or text of the length it gives."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
from numpy.random import SeedSequence

from workloads.errors import WorkloadError
from workloads.prompts import OwnOpenings, PromptSource, Tokens
from workloads.tokenizer import Tokenizer
from workloads.trace import HASH_BLOCK_TOKENS, TraceRow
from workloads.vocabulary import Vocabulary


class TracePrompts(OwnOpenings):
    """``text`` serves the rows of which only a length is known, and the warm-up."""

    def __init__(
        self,
        rows: Seq[TraceRow],
        text: PromptSource,
        vocabulary: Vocabulary,
        seed: SeedSequence,
        given: dict[int, Tokens],
    ) -> None:
        """``given``: token ids by row index, for the rows that carry a prompt (see `given_prompts`)."""
        super().__init__(text, plan_sharing(rows, text, given))
        self._rows, self._vocabulary, self._seed, self._given = rows, vocabulary, seed, given

    def opening(self, index: int, length: int) -> Tokens:
        row = self._rows[index]
        if index in self._given:
            return self._given[index][:length]
        if row.hash_ids is None:
            return self._text.opening(index, length)
        blocks = -(-length // HASH_BLOCK_TOKENS)
        return tuple(token for block in row.hash_ids[:blocks] for token in self._block(block))[:length]

    def describe(self) -> dict[str, Any]:
        return {
            **self._text.describe(),
            "rows_with_prompt": len(self._given),
            "rows_with_hash_ids": sum(row.hash_ids is not None for row in self._rows),
        }

    def _block(self, block: int) -> list[int]:
        """The tokens of one hash id, the same wherever it appears in this stream."""
        rng = np.random.default_rng(SeedSequence(self._seed.entropy, spawn_key=(*self._seed.spawn_key, block)))
        ordinary = self._vocabulary.ordinary
        body: list[int] = ordinary[rng.integers(ordinary.size, size=HASH_BLOCK_TOKENS - 1)].tolist()
        return [self._vocabulary.measured(block), *body]


def plan_sharing(rows: Seq[TraceRow], text: PromptSource, given: dict[int, Tokens]) -> list[int]:
    """Leading tokens that an earlier row has too, by row: what a cache without limit could serve."""
    planned = []
    seen: set[int] = set()  # of prefixes, each as the hash of its units, chained
    for index, row in enumerate(rows):
        units: Seq[int] = given.get(index, row.hash_ids or ())
        unit_tokens = 1 if index in given else HASH_BLOCK_TOKENS
        if not units:
            planned.append(text.shared(index))
            continue
        chain, matched = unit_tokens, 0
        for unit in units:
            chain = hash((chain, unit))  # of integers: not salted by PYTHONHASHSEED
            matched += chain in seen
            seen.add(chain)
        planned.append(matched * unit_tokens)
    return planned


def given_prompts(rows: Seq[TraceRow], tokenizer: Tokenizer | None, vocab_size: int) -> dict[int, Tokens]:
    """Token ids of the rows that carry text or ids. WorkloadError, with the line, for what the model cannot read."""
    given: dict[int, Tokens] = {}
    for index, row in enumerate(rows):
        where = f"workload.path, line {row.line}"
        if row.prompt is not None:
            if tokenizer is None:
                raise WorkloadError(f"{where}: prompt is text, must be prompt_token_ids: this model has no tokenizer")
            given[index] = tuple(tokenizer.encode(row.prompt))
            if not given[index]:
                raise WorkloadError(f"{where}: prompt={row.prompt!r}: must hold at least one token")
        elif row.prompt_token_ids is not None:
            given[index] = row.prompt_token_ids
            if max(row.prompt_token_ids) >= vocab_size:
                raise WorkloadError(
                    f"{where}: prompt_token_ids has {max(row.prompt_token_ids)}: must be below vocab_size={vocab_size}"
                )
    return given
