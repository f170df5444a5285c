"""Text to token ids and back, with the model's own chat template."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as FastTokenizer

from impls.models.checkpoint import read_json, read_text
from impls.models.errors import ModelError

# What a template that puts the date into its prompt is told: the day's own would make every day's traffic another.
TODAY = datetime(2024, 7, 26)  # the date that Llama 3's template falls back to


class Tokenizer:
    """A thin face of a `tokenizers` tokenizer: plain ints for ids, and the chat template in a sandbox."""

    def __init__(
        self, fast: FastTokenizer, *, bos: str | None = None, eos: str | None = None, chat_template: Any = None
    ) -> None:
        """``chat_template``: as the file has it; what is no text is refused when it is used."""
        self._fast, self._bos, self._eos, self._template = fast, bos, eos, chat_template

    @property
    def vocab_size(self) -> int:
        """Ids that the tokenizer can make, added tokens included; a model's embedding may have more rows."""
        return int(self._fast.get_vocab_size(with_added_tokens=True))

    @property
    def bos_token_id(self) -> int | None:
        """None where the model has none."""
        return self._fast.token_to_id(self._bos) if self._bos is not None else None

    @property
    def eos_token_id(self) -> int | None:
        """None where the model has none."""
        return self._fast.token_to_id(self._eos) if self._eos is not None else None

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Control tokens, which never occur in plain text: what a workload of random ids must not draw."""
        return frozenset(id for id, token in self._fast.get_added_tokens_decoder().items() if token.special)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids; ``add_special_tokens`` adds what the model wants around a prompt (a BOS, or nothing)."""
        return list(self._fast.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return str(self._fast.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True
    ) -> list[int]:
        """Token ids of a conversation of {"role", "content"}. ModelError if the model has no template or refuses it."""
        if self._template is None:
            raise ModelError("this model has no chat template: use workload prompts without a chat format")
        if not isinstance(self._template, str):
            raise ModelError(f"the model's chat template is {type(self._template).__name__}, not a text")
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = TODAY.strftime
        try:
            text = environment.from_string(self._template).render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                bos_token=self._bos or "",
                eos_token=self._eos or "",
            )
        except Exception as error:  # the file's own code, which may do whatever the sandbox lets it
            raise ModelError(f"the model's chat template refuses this conversation: {error}") from error
        return self.encode(text, add_special_tokens=False)


def _refuse(message: str) -> None:
    raise TemplateError(message)


def tokenizer_from_directory(folder: Path) -> Tokenizer | None:
    """From tokenizer.json and its companions; None if the directory has no tokenizer.json. ModelError if damaged."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    text = read_text(path)
    try:
        fast = _parse(text)
    except Exception as error:  # the bindings raise bare Exception for everything
        raise ModelError(f"cannot read {path}: {error}") from error
    config = read_json(folder / "tokenizer_config.json")
    template_file = folder / "chat_template.jinja"
    template = read_text(template_file) if template_file.is_file() else config.get("chat_template")
    if isinstance(template, list):  # several named templates: the one for plain chat
        named = [entry for entry in template if isinstance(entry, dict)]
        template = next((entry.get("template") for entry in named if entry.get("name") == "default"), None)
    return Tokenizer(
        fast, bos=_text(config.get("bos_token")), eos=_text(config.get("eos_token")), chat_template=template
    )


@functools.lru_cache(maxsize=4)  # a study opens its model several times for each of its arms
def _parse(text: str) -> FastTokenizer:
    return FastTokenizer.from_str(text)


def _text(token: Any) -> str | None:
    """A special token is written as a string or as an object with its content."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None
