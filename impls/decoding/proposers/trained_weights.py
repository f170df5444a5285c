"""The weights of a proposer that was trained for its target: are there any, how many bytes, and how they are read."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from impls.models.draft_heads import HeadFile, find_head, permuted
from impls.models.errors import ModelError
from impls.models.source import open_model
from impls.models.tensors import EMBEDDING, HEAD
from impls.seams import Arm, DraftResources


def file_of(kind: str, arm: Arm) -> HeadFile:
    """What ``proposer.head`` names or, null, what comes with the project. ModelError if there is none for the model."""
    return find_head(kind, arm.axes["proposer"].get("head"), open_model(arm.axes["model"]).fingerprint)


def expected_bytes(kind: str, arm: Arm) -> int:
    """Resident, with the target's head rows in BF16; 0 where there is no file, which `validate` tells."""
    try:
        file = file_of(kind, arm)
        return file.path.stat().st_size + 2 * file.size("token_ids")[0] * arm.model.hidden_size
    except ModelError:
        return 0


def read(kind: str, path: str | None, resources: DraftResources) -> dict[str, Tensor]:
    """FP32 by name in the target's order of channels, with its head's rows of the draft vocabulary as
    ``lm_head.weight``."""
    weights, target = resources.weights, resources.model
    tensors = find_head(kind, path, resources.fingerprint).tensors()
    head = weights[EMBEDDING if target.shape.tie_embeddings else HEAD]
    tensors["lm_head.weight"] = F.embedding(tensors["token_ids"], head)
    return permuted(tensors, target.residual_order)
