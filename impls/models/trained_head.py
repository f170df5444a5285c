"""What draft heads that are trained for a target share: a reduced vocabulary, whose logits the target's rows give."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from impls.seams import LinearMethod, ModelShape


class TrainedHead:
    """``token_ids``: int64 [V], ascending: what can be drafted, in the order of the columns of `logits`."""

    def __init__(
        self, tensors: Mapping[str, Tensor], target: ModelShape, method: LinearMethod, device: torch.device
    ) -> None:
        """tensors: FP32 by name, with ``token_ids`` and their rows of the target's head as ``lm_head.weight``."""
        self.token_ids = tensors["token_ids"].to(device)
        self.shape = replace(target, num_layers=1, vocab_size=len(self.token_ids), tie_embeddings=True)
        self.method = method
        self._lm_head = method.pack(tensors["lm_head.weight"])

    @property
    def head_bytes(self) -> int:
        return self._lm_head.num_bytes()

    @property
    def lookup_bytes(self) -> int:
        return 0  # embeddings are the target's

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, hidden] to FP32 [R, V]."""
        return self.method.apply(hidden, self._lm_head).float()
