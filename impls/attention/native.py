"""The C kernel of `impls.native`: keys and values are read in place, through the block table, on any CPU."""

from __future__ import annotations

from torch import Tensor

from impls import native
from impls.seams import Arm, AttentionBackend, LayerCache, StepBatch, values_and_scales


class NativeAttention(AttentionBackend):
    """Nothing is gathered and nothing padded: the block table, the lengths and the query starts go to the kernel."""

    reads_scaled = "reads 8-bit K/V in place"

    @classmethod
    def validate(cls, arm: Arm) -> list[str]:
        reasons = []
        if arm.device != "cpu":
            reasons.append(f"device={arm.device}: the native kernel runs on the CPU only")
        elif why := native.why_unavailable():
            reasons.append(why)
        if arm.model.head_dim > native.MAX_HEAD_DIM:
            reasons.append(f"head_dim={arm.model.head_dim}: at most {native.MAX_HEAD_DIM}")
        return reasons

    def prepare(self, batch: StepBatch) -> None:
        scale = self.shape.head_dim**-0.5
        self._attend = native.PagedAttention(batch.query_start, batch.seq_lens, batch.block_table, scale)

    def forward(self, q: Tensor, k_cache: LayerCache, v_cache: LayerCache, layer: int) -> Tensor:
        (k, k_scale), (v, v_scale) = values_and_scales(k_cache), values_and_scales(v_cache)
        return self._attend(q, k, v, k_scale, v_scale)
