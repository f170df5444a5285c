"""What a prompt says, as token ids of exactly a wanted length. Built one at a time, when a request is made.

Every opening prompt begins with a token of its own (`vocabulary`), also before a chat template's head: without it
any prefix cache would find hits that the workload did not ask for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.random import Generator, SeedSequence

from workloads.corpus import Corpus
from workloads.errors import WorkloadError, one_of
from workloads.framing import STYLES, Frame, frame_of
from workloads.lengths import Lengths
from workloads.options import require
from workloads.tokenizer import Tokenizer
from workloads.vocabulary import Vocabulary

Tokens = tuple[int, ...]

_OPENING, _FOLLOW_UP, _REPLY, _WARM_UP, _GROUP = range(5)  # purposes: no two texts of a request share random numbers


class PromptSource(Protocol):
    """Texts of a stream's requests. ``index`` is the request's number, ``length`` in tokens (at least 1)."""

    def opening(self, index: int, length: int) -> Tokens: ...

    def follow_up(self, index: int, length: int) -> Tokens:
        """What a later turn of a session adds after the reply."""

    def reply(self, index: int, length: int) -> Tokens:
        """The scripted answer of a turn."""

    def warm_up(self, index: int, length: int) -> Tokens:
        """Shares no first token with any opening or shared prefix."""

    def shared(self, index: int) -> int:
        """Leading tokens of the opening that an earlier request's opening has too, by construction."""

    def describe(self) -> dict[str, Any]:
        """For the record."""


class TextSource:
    """A source that has a body of text for each (request, purpose) and no sharing."""

    def __init__(self, vocabulary: Vocabulary, seed: SeedSequence) -> None:
        self.vocabulary, self._seed = vocabulary, seed

    def _rng(self, index: int, purpose: int) -> Generator:
        return np.random.default_rng(
            SeedSequence(self._seed.entropy, spawn_key=(*self._seed.spawn_key, purpose, index))
        )

    def _body(self, index: int, purpose: int, length: int) -> list[int]:
        raise NotImplementedError

    def _framed(self, first: int, index: int, purpose: int, length: int) -> Tokens:
        return (first, *self._body(index, purpose, length - 1))

    def opening(self, index: int, length: int) -> Tokens:
        return self._framed(self.vocabulary.measured(index), index, _OPENING, length)

    def group_prefix(self, group: int, length: int) -> Tokens:
        return (self.vocabulary.group(group), *self._body(group, _GROUP, length - 1))

    def warm_up(self, index: int, length: int) -> Tokens:
        return self._framed(self.vocabulary.warmup(index), index, _WARM_UP, length)

    def follow_up(self, index: int, length: int) -> Tokens:
        return tuple(self._body(index, _FOLLOW_UP, length))

    def reply(self, index: int, length: int) -> Tokens:
        return tuple(self._body(index, _REPLY, length))

    def shared(self, index: int) -> int:
        return 0

    def describe(self) -> dict[str, Any]:
        return {"distinct_first_tokens": self.vocabulary.num_distinct}


class RandomTokens(TextSource):
    """Ordinary tokens, uniform and independent: no text repeats itself, so speculation has nothing to find."""

    def _body(self, index: int, purpose: int, length: int) -> list[int]:
        drawn = self._rng(index, purpose).integers(self.vocabulary.ordinary.size, size=length)
        body: list[int] = self.vocabulary.ordinary[drawn].tolist()
        return body


class NaturalText(TextSource):
    """Passages of the corpus inside the frame of a task (`framing`)."""

    def __init__(self, vocabulary: Vocabulary, seed: SeedSequence, corpus: Corpus, frame: Frame) -> None:
        super().__init__(vocabulary, seed)
        self._corpus, self._frame = corpus, frame
        self._order = self._rng(0, _OPENING).permutation(len(corpus.passages)).tolist()

    def _body(self, index: int, purpose: int, length: int) -> list[int]:
        passages = len(self._order)
        if purpose == _OPENING:  # in turn, so that no two start at one place; a second round starts a token later
            return self._corpus.read(self._order[index % passages], index // passages, length)
        start = int(self._rng(index, purpose).integers(passages))
        return self._corpus.read(start, 0, length)

    def _framed(self, first: int, index: int, purpose: int, length: int) -> Tokens:
        head, tail = self._frame.head, self._frame.tail
        room = length - 1 - len(head) - len(tail)
        if room < 1:  # too short to say what is wanted: bare text
            return super()._framed(first, index, purpose, length)
        return (first, *head, *self._body(index, purpose, room), *tail)

    def follow_up(self, index: int, length: int) -> Tokens:
        head, tail = self._frame.turn_head, self._frame.tail
        room = length - len(head) - len(tail)
        if room < 1:
            return super().follow_up(index, length)
        return (*head, *self._body(index, _FOLLOW_UP, room), *tail)

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "corpus_sha256": self._corpus.fingerprint}


class OwnOpenings:
    """A source with openings of its own; every other text is that of ``text``.

    planned: by request, the leading tokens that an earlier opening has too.
    """

    def __init__(self, text: PromptSource, planned: list[int]) -> None:
        self._text, self._planned = text, planned

    def follow_up(self, index: int, length: int) -> Tokens:
        return self._text.follow_up(index, length)

    def reply(self, index: int, length: int) -> Tokens:
        return self._text.reply(index, length)

    def warm_up(self, index: int, length: int) -> Tokens:
        return self._text.warm_up(index, length)

    def shared(self, index: int) -> int:
        return self._planned[index]


class SharedPrefixes(OwnOpenings):
    """Some requests begin with their group's prefix (at most all but one token); the rest of each is its own."""

    def __init__(self, text: TextSource, group_of: list[int], prefix: list[int], planned: list[int]) -> None:
        super().__init__(text, planned)
        self._group_prefix, self._group_of, self._prefix = text.group_prefix, group_of, prefix
        self._prefix_of_group: dict[int, Tokens] = {}

    def opening(self, index: int, length: int) -> Tokens:
        prefix = min(self._prefix[index], length - 1)
        if prefix == 0:
            return self._text.opening(index, length)
        group = self._group_of[index]
        if len(self._prefix_of_group.get(group, ())) < prefix:
            self._prefix_of_group[group] = self._group_prefix(group, prefix)
        return self._prefix_of_group[group][:prefix] + self._text.opening(index, length - prefix)

    def describe(self) -> dict[str, Any]:
        return {**self._text.describe(), "requests_with_prefix": sum(p > 0 for p in self._prefix)}


def _text_source(
    style: str, chat_template: bool, tokenizer: Tokenizer | None, vocabulary: Vocabulary, seed: SeedSequence
) -> TextSource:
    if style == "random":
        return RandomTokens(vocabulary, seed)
    if tokenizer is None:
        raise WorkloadError(
            f"workload.prompts.style={style}: natural text needs a tokenizer, this model has none; use prompts=random"
        )
    return NaturalText(
        vocabulary, seed, Corpus(STYLES[style].corpus, tokenizer), frame_of(STYLES[style], tokenizer, chat_template)
    )


@dataclass(frozen=True)
class Random:
    """Uniform random tokens."""

    def build(
        self, tokenizer: Tokenizer | None, vocabulary: Vocabulary, seed: SeedSequence, lengths: Lengths
    ) -> PromptSource:
        return RandomTokens(vocabulary, seed)


@dataclass(frozen=True)
class Natural:
    """Corpus text: ``style`` chat, summarize, code or prose; ``chat_template``: wrapped as the model's chat turn."""

    style: str
    chat_template: bool = False

    def __post_init__(self) -> None:
        require(self.style in STYLES, "style", self.style, one_of(STYLES, self.style))

    def build(
        self, tokenizer: Tokenizer | None, vocabulary: Vocabulary, seed: SeedSequence, lengths: Lengths
    ) -> PromptSource:
        return _text_source(self.style, self.chat_template, tokenizer, vocabulary, seed)


@dataclass(frozen=True)
class SharedPrefix:
    """A ``share`` of the requests, each in one of ``num_groups`` groups (uniform), begins with the group's prefix of
    ``prefix_length`` tokens, inside its own prompt length. ``style``: random, or one of `Natural`'s.
    """

    share: float
    num_groups: int
    prefix_length: int
    style: str = "random"
    chat_template: bool = False

    def __post_init__(self) -> None:
        require(0 <= self.share <= 1, "share", self.share, "from 0 to 1")
        require(1 <= self.num_groups <= 10_000_000, "num_groups", self.num_groups, "from 1 to 10000000")
        require(1 <= self.prefix_length <= 10_000_000, "prefix_length", self.prefix_length, "from 1 to 10000000")
        require(self.style in (*STYLES, "random"), "style", self.style, one_of((*STYLES, "random"), self.style))

    def build(
        self, tokenizer: Tokenizer | None, vocabulary: Vocabulary, seed: SeedSequence, lengths: Lengths
    ) -> PromptSource:
        text_seed, draw_seed = seed.spawn(2)
        text = _text_source(self.style, self.chat_template, tokenizer, vocabulary, text_seed)
        drawn = np.random.default_rng(draw_seed).random((len(lengths), 2))
        group_of = (drawn[:, 1] * self.num_groups).astype(np.int64).tolist()
        prefix = np.where(drawn[:, 0] < self.share, np.minimum(self.prefix_length, lengths - 1), 0).tolist()
        longest: dict[int, int] = {}
        planned = []
        for group, own in zip(group_of, prefix, strict=True):
            planned.append(min(own, longest.get(group, 0)))
            longest[group] = max(own, longest.get(group, 0))
        return SharedPrefixes(text, group_of, prefix, planned)


class PromptLaw(Protocol):
    """What prompts of given lengths say."""

    @property
    def build(self) -> Callable[[Tokenizer | None, Vocabulary, SeedSequence, Lengths], PromptSource]:
        """(tokenizer, vocabulary, seed, prompt lengths int64 [n], by arrival) -> source."""


PROMPTS: dict[str, type[PromptLaw]] = {"random": Random, "natural": Natural, "shared_prefix": SharedPrefix}
