"""The file of a trained head: its parameters in BF16, the ids it can draft, and the recipe that made it."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from scripts.draft_heads.modules import EagleHead, MedusaHeads


def save(path: Path, module: EagleHead | MedusaHeads, vocabulary: Tensor, about: dict[str, object]) -> None:
    tensors = {name: tensor.detach().bfloat16().contiguous() for name, tensor in module.tensors().items()}
    part = path.with_suffix(".part")
    save_file({**tensors, "token_ids": vocabulary.int()}, part, metadata={"recipe": json.dumps(about)})
    part.replace(path)


@torch.no_grad()
def restore(module: EagleHead | MedusaHeads, path: Path) -> None:
    """What `save` wrote; the optimizer starts anew. ValueError if it is of another kind or size."""
    found = load_file(path)
    for name, tensor in module.tensors().items():
        if name not in found or found[name].shape != tensor.shape:
            raise ValueError(f"{path} has no {name} {list(tensor.shape)}: it is of another kind or --unroll")
        tensor.copy_(found[name])


def token_ids(path: Path) -> Tensor:
    """The draft vocabulary of `save`, int64."""
    with safe_open(path, "pt") as file:
        found: Tensor = file.get_tensor("token_ids")
        return found.long()


def read_about(path: Path) -> str:
    with safe_open(path, "pt") as file:
        return str(file.metadata()["recipe"])
