"""The files of trained draft heads: found by the target that they were trained for, and by no other."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from impls.models.errors import ModelError

PACKAGED = Path(__file__).with_name("heads")


@dataclass(frozen=True)
class HeadFile:
    """``recipe``: how it was made; its ``model`` is the target's fingerprint."""

    path: Path
    recipe: Mapping[str, Any]

    def tensors(self) -> dict[str, Tensor]:
        """FP32 weights by name, in the order of the checkpoint's channels; ``token_ids`` int64 [draft vocabulary]."""
        with safe_open(self.path, "pt") as file:
            found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no dict)
        return {name: each.long() if name == "token_ids" else each.float() for name, each in found.items()}

    def size(self, name: str) -> tuple[int, ...]:
        """A tensor's, without reading it. ModelError, one line, if there is none of that name."""
        try:
            with safe_open(self.path, "pt") as file:
                return tuple(file.get_slice(name).get_shape())
        except SafetensorError as error:
            raise ModelError(f"{self.path}: {error}") from error


def find_head(kind: str, path: str | None, fingerprint: str) -> HeadFile:
    """The head of ``kind`` in the file ``path`` (None: among those that come with the project) for this target.

    ModelError, one line, if there is none.
    """
    paths = [Path(path).expanduser()] if path else sorted(PACKAGED.glob("*.safetensors"))
    others = []
    for each in paths:
        try:
            with safe_open(each, "pt") as file:
                recipe = json.loads((file.metadata() or {})["recipe"])
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise ModelError(f"{each} is no file of a draft head ({error})") from error
        if recipe.get("kind") == kind and recipe.get("model") == fingerprint:
            return HeadFile(each, recipe)
        others.append(f"{recipe.get('kind')} for {recipe.get('model_name')}")
    where = path or "what comes with the project"
    raise ModelError(
        f"no {kind} head for this model in {where} ({', '.join(others) or 'none at all'}): "
        "python -m scripts.draft_heads.train makes one"
    )


def permuted(tensors: Mapping[str, Tensor], order: Tensor | None) -> dict[str, Tensor]:
    """The same head for a target whose residual channels lie in ``order`` (`LlamaModel.residual_order`)."""
    if order is None:
        return dict(tensors)
    order = order.cpu()
    both = torch.cat((order, order + len(order)))
    out = {}
    for name, tensor in tensors.items():
        if name == "fc.weight":
            tensor = tensor[order][:, both]
        elif name.endswith(("o_proj.weight", "down_proj.weight")) or "norm" in name:
            tensor = tensor[order]
        elif name.endswith(("_proj.weight", "lm_head.weight")):
            tensor = tensor[:, order]
        elif name in ("weight", "bias"):  # Medusa's
            tensor = tensor[..., order] if name == "bias" else tensor[:, order][..., order]
        out[name] = tensor
    return out
