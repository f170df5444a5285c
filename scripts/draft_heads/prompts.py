"""Natural prompts about the passages of `texts`: request i of a seed is the same in every run."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from impls.models.source import ModelSource
from impls.models.tokenizer import Tokenizer
from impls.request import Request, SamplingParams
from scripts.draft_heads.texts import Passage, stdlib_passages
from workloads.framing import STYLES

# (share, words before the passage, words after it); the first two are those of the measured workloads.
PROSE_ASKS = (
    (0.34, STYLES["chat"].before, STYLES["chat"].after),
    (0.16, STYLES["summarize"].before, STYLES["summarize"].after),
    (0.10, "Explain the following to a beginner.\n\n", ""),
    (0.08, "", "\n\nList the key points of the text above."),
    (0.08, "Rewrite this in simple words:\n\n", ""),
    (0.06, "", "\n\nWhat is this about, and when would I need it?"),
    (0.06, "Read this text.\n\n", "\n\nWrite three questions about it and answer them."),
    (0.06, "Here is a part of the documentation:\n\n", "\n\nGive an example of how this is used."),
    (0.06, "Write a short introduction for a tutorial, based on these notes:\n\n", ""),
)
CODE_ASKS = (
    (0.4, "What does this code do?\n\n", ""),
    (0.3, "", "\n\nExplain this function step by step."),
    (0.3, "Describe this function in two or three sentences.\n\n", ""),
)
CODE_SHARE = 0.12
SHORTEST, LONGEST = 24, 280  # tokens of a passage, log-uniform
MAX_TOKENS, LONG_MAX_TOKENS, LONG_SHARE = 192, 448, 0.125
# A head must draft well for greedy requests first; samples show it the states that argmax never reaches.
TEMPERATURES = ((0.75, 0.0), (0.125, 0.7), (0.125, 1.0))
FIRST_TOKEN_SHARE = 0.5  # of prompts that begin with a random token, as all of the workloads do (`workloads.prompts`)


class Prompts:
    """Requests of training prompts, ``held_out`` telling which passages; random tokens without a tokenizer."""

    def __init__(self, source: ModelSource, seed: int) -> None:
        self._seed, self._shape = seed, source.shape
        self._tokenizer = source.tokenizer
        self._limit = source.max_model_len
        passages = stdlib_passages() if source.tokenizer is not None else []
        self._passages = {kind: [p for p in passages if p.kind == kind] for kind in ("prose", "code")}
        special = source.tokenizer.special_token_ids if source.tokenizer is not None else ()
        self._ordinary = np.setdiff1d(np.arange(source.shape.vocab_size), sorted(special))

    def request(self, index: int) -> tuple[Request, bool]:
        """Request ``index``, and whether its passage is held out."""
        draw = np.random.default_rng(np.random.SeedSequence((self._seed, index)))
        length = int(np.exp(draw.uniform(np.log(SHORTEST), np.log(LONGEST))))
        temperature = TEMPERATURES[_choose(draw, [share for share, _ in TEMPERATURES])][1]
        max_tokens = LONG_MAX_TOKENS if draw.random() < LONG_SHARE else MAX_TOKENS
        first = [int(draw.choice(self._ordinary))] if draw.random() < FIRST_TOKEN_SHARE else []
        held_out = False
        if self._tokenizer is None:
            prompt = draw.choice(self._ordinary, size=length).tolist()
            held_out = index % 16 == 0
        else:
            kind = "code" if draw.random() < CODE_SHARE else "prose"
            passage = self._passages[kind][int(draw.integers(len(self._passages[kind])))]
            prompt, held_out = self._ask(self._tokenizer, passage, length, draw), passage.held_out
        prompt = [*first, *prompt]
        max_tokens = min(max_tokens, self._limit - len(prompt))
        sampling = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=self._seed)
        return Request(str(index), tuple(prompt), sampling), held_out

    def _ask(self, tokenizer: Tokenizer, passage: Passage, length: int, draw: np.random.Generator) -> list[int]:
        asks = CODE_ASKS if passage.kind == "code" else PROSE_ASKS
        _, before, after = asks[_choose(draw, [share for share, _, _ in asks])]
        text = tokenizer.decode(tokenizer.encode(passage.text, add_special_tokens=False)[:length])
        return tokenizer.apply_chat_template([{"role": "user", "content": before + text + after}])


def _choose(draw: np.random.Generator, shares: Sequence[float]) -> int:
    return int(np.searchsorted(np.cumsum(shares), draw.random() * sum(shares), side="right"))
