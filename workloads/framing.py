"""What is asked about a passage, as the token ids before and after it."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import takewhile

from workloads.errors import WorkloadError
from workloads.tokenizer import Tokenizer


@dataclass(frozen=True)
class Style:
    """A task: which corpus the passage comes from, the words before it and after it."""

    corpus: str
    before: str = ""
    after: str = ""


STYLES = {
    "prose": Style("prose"),
    "chat": Style("prose", "I am reading this part of a manual:\n\n", "\n\nWhat does it mean, in plain words?"),
    "summarize": Style("prose", "Summarise the following text.\n\n", "\n\nSummary of the text above:"),
    "code": Style("code", "Complete this code.\n\n"),
}


@dataclass(frozen=True)
class Frame:
    """Token ids around the passage: ``head`` in an opening prompt, ``turn_head`` in a follow-up, ``tail`` in both."""

    head: tuple[int, ...]
    turn_head: tuple[int, ...]
    tail: tuple[int, ...]


def frame_of(style: Style, tokenizer: Tokenizer, chat_template: bool) -> Frame:
    """The frame of ``style``, found once per stream, so that a prompt costs no tokenisation but its passage's."""
    if not chat_template:
        # encode may add a beginning-of-sequence token, which has no place inside a prompt.
        special = frozenset(tokenizer.special_token_ids)
        before, after = (
            tuple(token for token in tokenizer.encode(text) if token not in special) if text else ()
            for text in (style.before, style.after)
        )
        return Frame(before, before, after)

    def render(*passages: str) -> list[int]:
        contents = [style.before + text + style.after if i % 2 == 0 else text for i, text in enumerate(passages)]
        roles = ("user", "assistant", "user")
        messages = [{"role": role, "content": text} for role, text in zip(roles, contents, strict=False)]
        try:
            return tokenizer.apply_chat_template(messages)
        except Exception as error:  # a model's template is a program of its own and may fail in any way
            raise WorkloadError(
                f"workload.prompts.chat_template=True: must be false for this model: {error}"
            ) from error

    # What does not change with the passage is the frame.
    one, other = render("alpha"), render("7")
    head, tail = _common(one, other), _common(one[::-1], other[::-1])[::-1]
    # After an assistant's turn: what follows its text, up to the next user's passage.
    ends = [
        _common(render("alpha", a, b)[::-1], render("alpha", "7", b)[::-1])[::-1]
        for a, b in (("zulu", "alpha"), ("zulu", "7"))
    ]
    return Frame(head, _common(*ends), tail)


def _common(a: Seq[int], b: Seq[int]) -> tuple[int, ...]:
    """The longest common prefix."""
    return tuple(x for x, _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))
