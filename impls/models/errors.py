"""What goes wrong with a model is said in one line."""

from __future__ import annotations

MAX_CHARS = 1000  # of a message that may quote a file


class ModelError(ValueError):
    """The model cannot be used. The message is one line: what was tried or found, and what to do about it."""

    def __init__(self, message: str) -> None:
        line = " ".join(message.split())  # what a library said may have had several lines
        super().__init__(line if len(line) <= MAX_CHARS else line[:MAX_CHARS] + "...")
