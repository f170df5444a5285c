"""Generated sequences with the target's hidden states, in safetensors files of some hundred sequences each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor


@dataclass(frozen=True)
class Generated:
    """tokens: int32 [n], prompt first; hidden: BF16 [n - 1, hidden_size], final-normed, of all but the last token."""

    index: int
    held_out: bool
    temperature: float
    num_prompt_tokens: int
    tokens: Tensor
    hidden: Tensor


def write_shard(folder: Path, sequences: Sequence[Generated], about: dict[str, str]) -> Path:
    """A new file beside the others; whole or not at all."""
    path = folder / f"shard-{len(shard_paths(folder)):05d}.safetensors"
    tensors = {
        "index": torch.tensor([s.index for s in sequences]),
        "held_out": torch.tensor([s.held_out for s in sequences]),
        "temperature": torch.tensor([s.temperature for s in sequences]),
        "num_prompt_tokens": torch.tensor([s.num_prompt_tokens for s in sequences]),
        "num_tokens": torch.tensor([len(s.tokens) for s in sequences]),
        "tokens": torch.cat([s.tokens for s in sequences]),
        "hidden": torch.cat([s.hidden for s in sequences]),
    }
    part = path.with_suffix(".part")
    save_file(tensors, part, metadata=about)
    part.replace(path)
    return path


def shard_paths(folder: Path) -> list[Path]:
    return sorted(folder.glob("shard-*.safetensors"))


def read_shard(path: Path) -> list[Generated]:
    tensors = load_file(path)
    lengths = tensors["num_tokens"].tolist()
    rows = zip(
        *(tensors[name].tolist() for name in ("index", "held_out", "temperature", "num_prompt_tokens")),
        torch.split(tensors["tokens"], lengths),
        torch.split(tensors["hidden"], [length - 1 for length in lengths]),
        strict=True,
    )
    return [Generated(*row) for row in rows]


def done_indices(folder: Path, about: dict[str, str]) -> tuple[set[int], int]:
    """Requests that the folder's shards hold, and their generated tokens. ValueError if they were made otherwise."""
    done: set[int] = set()
    tokens = 0
    for path in shard_paths(folder):
        with safe_open(path, "pt") as shard:
            if (found := shard.metadata()) != about:
                raise ValueError(f"{path} was made with {found}, not {about}: use another folder")
            done |= set(shard.get_tensor("index").tolist())
            tokens += int((shard.get_tensor("num_tokens") - shard.get_tensor("num_prompt_tokens")).sum())
    return done, tokens
