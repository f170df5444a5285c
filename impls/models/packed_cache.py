"""Layers that were quantised for a text, kept in the user's cache: the next start need not read it again."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from impls.models.cache import replacing
from impls.models.errors import ModelError
from impls.seams import LinearMethod, PackedLinear
from impls.user_cache import cache_dir

# By name: `<index of the decoder layer>.<name of the projection>`.
PackedLayers = Mapping[str, PackedLinear]

CALIBRATED, FROM_CACHE = "calibrated at this start", "from the cache"
IMPLS = Path(__file__).parents[1]
ROOMS = ("models", "native", "precision")  # whose code decides what a packed layer is


@dataclass(frozen=True)
class PackedCache:
    """One safetensors file, for one model, method and text, on one kind of processor.

    A file that is damaged, foreign or of another ``version`` is made again and replaced, so that there is one of each.
    """

    path: Path
    version: str
    method: LinearMethod

    def layers(self, pack: Callable[[], PackedLayers]) -> tuple[PackedLayers, str]:
        """From the file, else as ``pack`` makes them, which the next start then finds; and which it was, for the
        record. What cannot be kept is used all the same.
        """
        packed: PackedLayers | None = self._read()
        if packed is not None:
            return packed, FROM_CACHE
        try:
            with replacing(self.path) as partial:
                found = self._read()  # another process may have made it since
                if found is not None:
                    return found, FROM_CACHE
                packed = pack()
                self._write(partial, packed)
        except ModelError as error:
            return packed if packed is not None else pack(), f"{CALIBRATED}, not kept: {error}"
        return packed, CALIBRATED

    def _write(self, path: Path, layers: PackedLayers) -> None:
        tensors: dict[str, Tensor] = {}
        for layer, packed in layers.items():
            tensors |= {f"{layer}/{name}": tensor.cpu() for name, tensor in packed.tensors.items()}
            if packed.bias is not None:
                tensors[f"{layer}.bias"] = packed.bias.cpu().clone()  # several may share the checkpoint's memory
        numbers = json.dumps({layer: _numbers(packed) for layer, packed in layers.items()})
        metadata = {"version": self.version, "layers": numbers, "sha256": _digest(numbers, tensors)}
        try:
            save_file(tensors, path, metadata)
        except SafetensorError as error:
            raise ModelError(f"cannot write {path}: {error}") from error

    def _read(self) -> PackedLayers | None:
        try:
            with safe_open(self.path, framework="pt") as file:
                metadata = file.metadata() or {}
                if metadata.get("version") != self.version:
                    return None
                # Copies: what is mapped lies where the file has it, in which no kernel is at its best.
                tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError):
            return None
        numbers = metadata.get("layers", "")
        if metadata.get("sha256") != _digest(numbers, tensors):
            return None
        return {layer: self._packed(layer, of_layer, tensors) for layer, of_layer in json.loads(numbers).items()}

    def _packed(self, layer: str, numbers: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> PackedLinear:
        start, device = f"{layer}/", self.method.device
        own = {name.removeprefix(start): each.to(device) for name, each in tensors.items() if name.startswith(start)}
        bias = tensors.get(f"{layer}.bias")
        return self.method.packed_type(**numbers, tensors=own, bias=None if bias is None else bias.to(device))


def packed_cache(
    fingerprint: str, method: LinearMethod, options: Mapping[str, Any], texts: Sequence[Sequence[int]]
) -> PackedCache:
    """Where the layers of the model of this ``fingerprint`` are kept as ``method``, made with ``options``, packs them.

    The file's name stands for all that they depend on but the code, which is its ``version``. (The number of threads is
    left out: it moves last bits of what the layers read, as it does in any run.)
    """
    parts = {
        "model": fingerprint,
        "method": method.name,
        "options": dict(options),
        "permutation_seed": method.permutation_seed,
        "kernel": method.kernel,
        "activations": str(method.activation_dtype),
        "processor": [method.device.type, platform.machine(), torch.backends.cpu.get_cpu_capability()],
        "text": hashlib.sha256(repr(texts).encode()).hexdigest(),
    }
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:24]
    return PackedCache(cache_dir() / "packed" / f"{method.name}-{digest}.safetensors", code_version(), method)


@cache
def code_version() -> str:
    """Of torch and of everything in `ROOMS`: no edit there can be forgotten to count."""
    digest = hashlib.sha256(torch.__version__.encode())
    for room in ROOMS:
        for path in sorted((IMPLS / room).rglob("*")):
            if path.suffix in (".py", ".c", ".h"):
                digest.update(str(path.relative_to(IMPLS)).encode() + path.read_bytes())
    return digest.hexdigest()


def _numbers(packed: PackedLinear) -> dict[str, Any]:
    """What of a packed layer is no tensor."""
    names = (field.name for field in fields(packed))
    return {name: getattr(packed, name) for name in names if name not in ("tensors", "bias")}


def _digest(numbers: str, tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(numbers.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
