"""The header of a GGUF file: metadata and where each tensor lies. Format: ggml's docs/gguf.md, versions 2 and 3.

The `gguf` package's own reader trusts the counts that a file declares and takes a second per 50,000 tokens; here every
count is checked against the bytes that are left before anything is allocated.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from impls.models.errors import ModelError

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
MAX_DIMS = 4  # ggml's GGML_MAX_DIMS
# Gemma's 262,144 tokens are a header of 10 MB; as Python values, a header takes up to 16 times its size.
MAX_HEADER_BYTES = 1 << 26


@dataclass(frozen=True)
class TensorInfo:
    """``shape`` is row-major as in PyTorch (the file's order reversed); ``offset`` is from the start of the file."""

    name: str
    shape: tuple[int, ...]
    quantization: GGMLQuantizationType
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class GGUFHeader:
    """What a GGUF file says of itself: its metadata by key, and where each of its tensors lies."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]


class _Cursor:
    """Reads little-endian values in order; ModelError instead of reading past the end."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.at = path, data, 0

    def fail(self, reason: str) -> ModelError:
        return ModelError(f"{self.path} is not a usable GGUF file: {reason} at byte {self.at}")

    def need(self, num_bytes: int, what: str) -> None:
        """ModelError unless so many bytes are left."""
        left = min(len(self.data), MAX_HEADER_BYTES) - self.at
        if num_bytes > left:
            raise self.fail(f"{what} needs {num_bytes} bytes, {left} are left")

    def numbers(self, code: str, count: int, what: str) -> tuple[Any, ...]:
        layout = f"<{count}{code}"
        self.need(struct.calcsize("<" + code) * count, what)
        values = struct.unpack_from(layout, self.data, self.at)
        self.at += struct.calcsize(layout)
        return values

    def number(self, code: str, what: str) -> int:
        return int(self.numbers(code, 1, what)[0])

    def string(self, what: str) -> str:
        length = self.number("Q", what)
        self.need(length, what)
        raw = self.data[self.at : self.at + length]
        self.at += length
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.fail(f"{what} is not UTF-8") from error

    def value(self, kind: int, what: str) -> Any:
        """Of a metadata type; an array as a list. ModelError for an unknown one."""
        if kind in SCALARS:
            return self.numbers(SCALARS[kind], 1, what)[0]
        if kind == STRING:
            return self.string(what)
        if kind == ARRAY:
            item, count = self.number("I", what), self.number("Q", what)
            if item in SCALARS:
                return list(self.numbers(SCALARS[item], count, what))
            if item == STRING:
                self.need(8 * count, what)
                return [self.string(what) for _ in range(count)]
            kind = item
        raise self.fail(f"{what} has the unknown value type {kind}")


def read_header(path: Path) -> GGUFHeader:
    """Read and check the whole header. ModelError: not GGUF, cut short, or a tensor that the file does not hold."""
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _read(path, _Cursor(path, data))
    except (OSError, ValueError) as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error


def _read(path: Path, cursor: _Cursor) -> GGUFHeader:
    cursor.need(24, "the header")
    if cursor.data[:4] != b"GGUF":
        raise cursor.fail("no GGUF signature")
    cursor.at = 4
    if (version := cursor.number("I", "the version")) not in (2, 3):
        raise cursor.fail(f"version {version} (2 and 3 are read, little-endian)")
    num_tensors, num_values = cursor.numbers("Q", 2, "the counts")
    cursor.need(24 * num_tensors + 13 * num_values, f"{num_tensors} tensors and {num_values} values")
    metadata: dict[str, Any] = {}
    for _ in range(num_values):
        key = cursor.string("a key")
        metadata[key] = cursor.value(cursor.number("I", key), key)
    found = [_tensor_info(cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise cursor.fail(f"general.alignment is {alignment!r}, not a power of two")
    start = -(-cursor.at // alignment) * alignment
    tensors: dict[str, TensorInfo] = {}
    for name, shape, kind, offset, num_bytes in found:
        if name in tensors:
            raise cursor.fail(f"tensor {name} occurs twice")
        if (end := start + offset + num_bytes) > len(cursor.data):
            raise ModelError(f"{path} is cut short: {name} ends at byte {end}, the file has {len(cursor.data)}")
        tensors[name] = TensorInfo(name, shape, kind, start + offset, num_bytes)
    return GGUFHeader(path, metadata, tensors)


def _tensor_info(cursor: _Cursor) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int, int]:
    name = cursor.string("a tensor's name")
    if not 1 <= (num_dims := cursor.number("I", name)) <= MAX_DIMS:
        raise cursor.fail(f"tensor {name} has {num_dims} dimensions")
    shape = tuple(reversed(cursor.numbers("Q", num_dims, name)))
    kind, offset = cursor.number("I", name), cursor.number("Q", name)
    try:
        quantization = GGMLQuantizationType(kind)
    except ValueError as error:
        raise cursor.fail(f"tensor {name} has the unknown type {kind}") from error
    block, block_bytes = GGML_QUANT_SIZES[quantization]
    if 0 in shape or shape[-1] % block:
        raise cursor.fail(
            f"tensor {name} of shape {list(shape)} does not divide into {quantization.name} blocks of {block}"
        )
    elements = 1
    for size in shape:
        elements *= size
    return name, shape, quantization, offset, elements // block * block_bytes
