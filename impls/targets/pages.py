"""When continuous batching of transformers has a kernel of its own for decodes."""

from __future__ import annotations

FAST_PAGE = 256  # that kernel, FlashAttention through a block table, takes multiples of so many positions a page


def is_flash(attn_implementation: str | None) -> bool:
    """Is it some FlashAttention? By the library's own rule."""
    return "flash" in (attn_implementation or "")
