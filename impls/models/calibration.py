"""Packing a model's layers while it reads: each layer is quantised for the inputs that the layers before it give."""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from impls.models.tokenizer import Tokenizer
from impls.seams import LayerAttention, LinearMethod, PackedLinear

TEXT_TOKENS = 256
LEAST_CHARS = 400  # of a docstring that is prose and no label


def calibration_texts(tokenizer: Tokenizer | None, vocab_size: int, num_tokens: int) -> list[list[int]]:
    """``num_tokens`` token ids in texts of up to `TEXT_TOKENS`: docstrings of the packages in Python's library.

    Natural text that no workload draws prompts from and on which nothing is evaluated. A seeded choice. Random tokens
    for a model without a tokenizer, whose weights are random too.
    """
    draw = np.random.default_rng(0)
    if tokenizer is None:
        ids = draw.integers(vocab_size, size=num_tokens).tolist()
        return [ids[start : start + TEXT_TOKENS] for start in range(0, num_tokens, TEXT_TOKENS)]
    docstrings = list(_docstrings())
    texts: list[list[int]] = []
    for index in draw.permutation(len(docstrings)):
        left = num_tokens - sum(map(len, texts))
        if left <= 0:
            break
        texts.append(list(tokenizer.encode(docstrings[index]))[: min(TEXT_TOKENS, left)])
    return texts


def _docstrings() -> Iterator[str]:
    """Of the standard library's packages; its single modules are where `workloads` takes code from, and its help topics
    where prose for prompts and for the measurement of quality comes from."""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("[a-z]*/*.py")):
        if path.parent.name not in ("site-packages", "test", "idlelib", "pydoc_data"):
            source = path.read_text(encoding="utf-8", errors="replace")
            yield from re.findall(rf'"""(.{{{LEAST_CHARS},}}?)"""', source, re.DOTALL)


@dataclass
class Pending:
    """In the place of a `PackedLinear`: a layer that is packed when its inputs are known."""

    load: Callable[[], Tensor]
    bias: Tensor | None
    packed: PackedLinear | None = None


class CalibratingMethod:
    """Stands for ``method`` while its model reads the texts once: `apply` packs the layer for x, then multiplies."""

    def __init__(self, method: LinearMethod) -> None:
        self._method = method
        self.activation_dtype = method.activation_dtype

    def apply(self, x: Tensor, pending: Pending) -> Tensor:
        pending.packed = self._method.pack_calibrated(pending.load(), x, pending.bias)
        return self._method.apply(x, pending.packed)


def flattened(texts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Token ids and positions, int64 [T], of texts one after another."""
    ids = [token for text in texts for token in text]
    positions = [position for text in texts for position in range(len(text))]
    return torch.tensor(ids, device=device), torch.tensor(positions, device=device)


def attention_within(texts: Sequence[Sequence[int]]) -> LayerAttention:
    """Causal attention of each text to itself; nothing is kept."""
    lengths = [len(text) for text in texts]

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        texts_of_each = (torch.split(x.transpose(0, 1), lengths, dim=1) for x in (q, k, v))
        out = [
            F.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)
            for queries, keys, values in zip(*texts_of_each, strict=True)
        ]
        return torch.cat(out, dim=1).transpose(0, 1)

    return attend
