"""What this room needs of a tokenizer, so that it need not import one."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from collections.abc import Sequence as Seq
from typing import Protocol


class Tokenizer(Protocol):
    """Any object with these four members (impls.models has one)."""

    @property
    def vocab_size(self) -> int:
        """Token ids lie in 0..vocab_size-1."""

    @property
    def special_token_ids(self) -> Collection[int]:
        """Ids that ordinary text never yields: begin, end, chat markers. Never drawn for a prompt."""

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``."""

    def apply_chat_template(self, messages: Seq[Mapping[str, str]]) -> list[int]:
        """Token ids of ``[{"role": ..., "content": ...}, ...]``, ending where the assistant's answer begins."""
