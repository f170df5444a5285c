"""What goes wrong with a model is said in one line."""

from __future__ import annotations


class ModelError(ValueError):
    """The model cannot be used. The message is one line: what was tried or found, and what to do about it."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))  # what a library said may have had several lines
