"""An acceptance rate that is a setting: for synthetic weights, where no trained pair of target and draft exists."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from impls.decoding.verifier import accept_uniforms, count_leading
from impls.request import Sequence


def accept_at_rate(sequences: Seq[Sequence], rate: float, device: torch.device) -> list[int]:
    """How many drafts of each sequence stand before the first that falls, each with probability ``rate`` on its own.

    Not lossless: whoever uses it labels its output as emulated. What is accepted is still counted, not assumed.
    """
    return [count_leading([u < rate for u in uniforms]) for uniforms in accept_uniforms(sequences, device)]
