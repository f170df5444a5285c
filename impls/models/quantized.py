"""Checkpoints that others quantised: GPTQ's and AWQ's safetensors layouts, as the FP32 weights they stand for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from impls.models.errors import ModelError
from impls.models.tensors import check_tensors
from impls.seams import ModelShape

LAYOUTS = ("gptq", "awq")
PACKED = ("qweight", "qzeros", "scales", "g_idx")
BITS = {"gptq": (2, 4, 8), "awq": (4,)}
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the channel, of eight, that each nibble of a word holds


def check_quantization(config: Any, where: str) -> str:
    """The layout that a config.json's ``quantization_config`` names. ModelError if it is not read here."""
    if not isinstance(config, Mapping):
        raise ModelError(f"{where}: quantization_config must be an object, is {config!r}")
    layout, bits = config.get("quant_method"), config.get("bits", config.get("w_bit"))
    if layout not in LAYOUTS:
        raise ModelError(f"{where}: quant_method {layout!r} is not read ({', '.join(LAYOUTS)} are)")
    if bits not in BITS[layout]:
        raise ModelError(f"{where}: {layout} of {bits!r} bits is not read ({', '.join(map(str, BITS[layout]))} are)")
    if layout == "awq" and str(config.get("version", "gemm")).lower() != "gemm":
        raise ModelError(f"{where}: awq version {config['version']!r} is not read (gemm is)")
    return str(layout)


class QuantizedWeights(Mapping[str, Tensor]):
    """FP32 tensors by Hugging Face name, dequantised when they are looked up: scale * (value - zero), by groups of K.

    GPTQ: qweight int32 [K / v, N] holds v = 32 / bits neighbouring k, qzeros [G, N / v], scales FP16 [G, N], g_idx [K]
    (absent: in order, the last group may be short); its first format keeps zeros less one. Early packers gave every
    layer a bias of zeros; those are left out. AWQ: qweight int32 [K, N / 8], qzeros [G, N / 8], eight channels of a
    word in `AWQ_ORDER`.
    """

    def __init__(self, files: Mapping[str, Path], shape: ModelShape, config: Mapping[str, Any], where: str) -> None:
        """files: tensor name -> file; config: ``quantization_config``. ModelError if ``shape`` needs others."""
        self._layout, self._files, self._where = check_quantization(config, where), dict(files), where
        self._bits = int(config.get("bits", config.get("w_bit")) or 0)
        size = config.get("group_size", config.get("q_group_size"))
        self._group_size = size if isinstance(size, int) and size > 0 else None  # -1: one group of all
        self._zeros_less_one = self._layout == "gptq" and config.get("checkpoint_format", "gptq") == "gptq"
        self._names = [
            _weight_of(name)
            for name in files
            if name.rpartition(".")[2] not in PACKED[1:] and not self._is_blank_bias(name, shape)
        ]
        check_tensors({name: self._size(name) for name in self._names}, shape, where)

    def _is_blank_bias(self, name: str, shape: ModelShape) -> bool:
        """A bias of zeros that a packer wrote beside a layer that has none."""
        layer, _, kind = name.rpartition(".")
        has_one = shape.attention_bias if ".self_attn." in name else shape.mlp_bias
        return kind == "bias" and not has_one and f"{layer}.qweight" in self._files and not self._tensor(name).any()

    def _size(self, name: str) -> tuple[int, ...]:
        packed = _part(name, "qweight")
        if packed not in self._files:
            return self._shape_of(name)
        rows, columns = self._shape_of(packed)
        each = 32 // self._bits
        return (columns, rows * each) if self._layout == "gptq" else (columns * each, rows)

    def _shape_of(self, name: str) -> tuple[int, ...]:
        with self._opened(name) as file:
            return tuple(file.get_slice(name).get_shape())

    def _opened(self, name: str) -> Any:
        try:
            return safe_open(self._files[name], framework="pt")
        except (OSError, SafetensorError) as error:
            raise ModelError(f"cannot read {self._files[name]}: {error}") from error

    def _tensor(self, name: str) -> Tensor:
        if name not in self._files:
            raise ModelError(f"{self._where}: tensor {name} is missing")
        with self._opened(name) as file:
            tensor: Tensor = file.get_tensor(name)
            return tensor

    def __getitem__(self, name: str) -> Tensor:
        if _part(name, "qweight") not in self._files:
            if name not in self._files:
                raise KeyError(name)
            return self._tensor(name).float()
        qweight, qzeros, scales = (self._tensor(_part(name, part)) for part in PACKED[:3])
        if self._layout == "awq":
            values, zeros = (unpack_columns(packed, 4, AWQ_ORDER) for packed in (qweight, qzeros))
        else:
            values = unpack_columns(qweight.t(), self._bits).t()
            if self._zeros_less_one:  # word by word, as it was taken off: a zero of 0 has borrowed from the next
                qzeros = qzeros + sum(1 << shift for shift in range(0, 32, self._bits))
            zeros = unpack_columns(qzeros, self._bits)
        k, groups = len(values), len(scales)
        if _part(name, "g_idx") in self._files:
            group = self._tensor(_part(name, "g_idx")).long()
        else:
            group = torch.arange(k) // (self._group_size or -(-k // groups))
        if zeros.shape != scales.shape or values.shape[1] != scales.shape[1] or not 0 <= int(group.max()) < groups:
            raise ModelError(f"{self._where}: the parts of {name} do not fit together")
        return (scales.float()[group] * (values - zeros[group])).t().contiguous()

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _part(name: str, part: str) -> str:
    return f"{name.removesuffix('weight')}{part}"


def _weight_of(name: str) -> str:
    return f"{name.removesuffix('qweight')}weight" if name.endswith(".qweight") else name


def unpack_columns(words: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """int32 [R, C] to int32 [R, C * 32 / bits]: field i of a word is column ``order[i]`` (i) of that word's."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    fields = words[:, :, None] >> shifts & (1 << bits) - 1
    if order is not None:
        fields = fields[:, :, torch.tensor(order).argsort()]
    return fields.reshape(len(words), -1)
