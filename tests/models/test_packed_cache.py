"""Layers that were quantised for a text are found again, and only where nothing that they depend on has changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from impls.models import packed_cache
from impls.models.calibration import calibration_texts
from impls.models.errors import ModelError
from impls.models.llama import LlamaModel
from impls.models.packed_cache import CALIBRATED, FROM_CACHE, PackedCache
from impls.models.source import ModelSource, open_model
from impls.models.synthetic import SyntheticWeights
from impls.precision.awq import Awq
from impls.precision.gptq import Gptq
from impls.precision.smoothquant import SmoothQuant
from impls.seams import LinearMethod, PackedLinear

CPU = torch.device("cpu")
METHODS: dict[str, Callable[[], LinearMethod]] = {
    "gptq": lambda: Gptq(CPU, group_size=32),
    "awq": lambda: Awq(CPU, 32),
    "smoothquant": lambda: SmoothQuant(CPU),
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path))
    yield tmp_path


@pytest.fixture(scope="module")
def tiny() -> ModelSource:
    return open_model(yaml.safe_load((Path(__file__).parents[2] / "conf/model/tiny.yaml").read_text()))


def kept(source: ModelSource, method: LinearMethod, **options: Any) -> tuple[PackedCache, list[list[int]]]:
    texts = calibration_texts(None, source.shape.vocab_size, 64)
    return packed_cache.packed_cache(source.fingerprint, method, options, texts), texts


def load(source: ModelSource, method: LinearMethod, **options: Any) -> LlamaModel:
    cache, texts = kept(source, method, **options)
    return LlamaModel(source.shape, source.weights(), method, CPU, texts, cache)


def tensors(model: LlamaModel) -> dict[str, Tensor]:
    found = {}
    for index, layer in enumerate(model._layers):
        for name in ("qkv", "o", "gate_up", "down"):
            packed = getattr(layer, name)
            found |= {f"{index}.{name}.{key}": tensor for key, tensor in packed.tensors.items()}
            found |= {} if packed.bias is None else {f"{index}.{name} bias": packed.bias}
    return found


def equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return set(ours) == set(theirs) and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("make", METHODS.values(), ids=METHODS)
@pytest.mark.parametrize("bias", [False, True])
def test_the_second_start_has_the_layers_of_the_first(
    tiny: ModelSource, make: Callable[[], LinearMethod], bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = replace(tiny, shape=replace(tiny.shape, attention_bias=bias))
    if bias:
        source = replace(source, load=lambda: SyntheticWeights(source.shape, 0))
    first = load(source, make())
    assert first.packed_by == CALIBRATED
    method = make()
    monkeypatch.setattr(method, "pack_calibrated", None)  # nothing is quantised any more
    second = load(source, method)
    assert second.packed_by == FROM_CACHE
    ours, theirs = tensors(first), tensors(second)
    assert equal(ours, theirs)
    assert bias == any(name.endswith("bias") for name in ours)
    assert all(tensor.data_ptr() % 16 == 0 for tensor in theirs.values()), "as the file has them"
    attend = lambda layer, q, k, v: torch.zeros_like(q)  # noqa: E731
    with torch.inference_mode():
        rows = [m.forward(torch.arange(4), torch.arange(4), attend) for m in (first, second)]
    assert torch.equal(*rows)


def test_what_the_layers_depend_on_is_in_the_name(tiny: ModelSource) -> None:
    gptq, texts = Gptq(CPU, group_size=32), calibration_texts(None, 512, 600)
    paths = {
        packed_cache.packed_cache(fingerprint, method, options, seen).path
        for fingerprint, method, options, seen in (
            ("a", gptq, {"bits": 4}, texts),
            ("b", gptq, {"bits": 4}, texts),
            ("a", gptq, {"bits": 3}, texts),
            ("a", gptq, {"bits": 4}, texts[:1]),
            ("a", Gptq(CPU, group_size=32, permutation_seed=1), {"bits": 4}, texts),
            ("a", Gptq(CPU, group_size=32, kernel="dequantized"), {"bits": 4}, texts),
            ("a", Awq(CPU, 32), {"bits": 4}, texts),
        )
    }
    assert len(paths) == 7
    assert packed_cache.packed_cache("a", Gptq(CPU, group_size=32), {"bits": 4}, texts).path in paths


def broken(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    if how == "empty":
        data = bytearray()
    elif how == "cut":
        del data[len(data) // 2 :]
    elif how == "one bit":
        data[-1] ^= 1
    elif how == "foreign":
        save_file({"x": torch.zeros(3)}, path)
        return
    elif how == "no safetensors":
        data = bytearray(b"\x80\x04nothing to unpickle")
    elif how == "other numbers":
        with safe_open(path, framework="pt") as file:
            metadata, parts = file.metadata(), {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        metadata["layers"] = metadata["layers"].replace('"group_size": 32', '"group_size": 64')
        save_file(parts, path, metadata)
        return
    elif how == "older code":
        with safe_open(path, framework="pt") as file:
            metadata, parts = file.metadata(), {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        save_file(parts, path, metadata | {"version": "older"})
        return
    path.write_bytes(data)


@pytest.mark.parametrize("how", ["empty", "cut", "one bit", "foreign", "no safetensors", "other numbers", "older code"])
def test_what_cannot_be_trusted_is_made_again(tiny: ModelSource, own_cache: Path, how: str) -> None:
    first = load(tiny, Gptq(CPU, group_size=32))
    (path,) = (own_cache / "packed").glob("*.safetensors")
    broken(path, how)
    again = load(tiny, Gptq(CPU, group_size=32))
    assert again.packed_by == CALIBRATED
    assert equal(tensors(first), tensors(again))
    assert load(tiny, Gptq(CPU, group_size=32)).packed_by == FROM_CACHE
    assert {each.name.removesuffix(".lock") for each in (own_cache / "packed").iterdir()} == {path.name}


def test_another_process_that_was_faster_is_believed(own_cache: Path, tiny: ModelSource) -> None:
    """It made the file between our look and our lock."""
    cache, _ = kept(tiny, Gptq(CPU, group_size=32))
    looks: list[int] = []

    class Late(PackedCache):
        def _read(self) -> Any:
            looks.append(1)
            return None if len(looks) == 1 else super()._read()

    layer = Gptq(CPU, group_size=32).pack(torch.randn(16, 32))
    cache.layers(lambda: {"0.qkv": layer})

    def never() -> dict[str, PackedLinear]:
        raise AssertionError("packed although it was there")

    found, origin = Late(cache.path, cache.version, cache.method).layers(never)
    assert origin == FROM_CACHE and torch.equal(found["0.qkv"].tensors["weight"], layer.tensors["weight"])


def test_a_cache_that_cannot_be_written_costs_the_cache_alone(
    own_cache: Path, tiny: ModelSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    (own_cache / "packed").write_text("a file where a folder should be")
    model = load(tiny, Gptq(CPU, group_size=32))
    assert str(model.packed_by).startswith(f"{CALIBRATED}, not kept: cannot write the cache")
    (own_cache / "packed").unlink()

    def full(*args: object) -> None:
        raise ModelError("cannot write: no space left")

    monkeypatch.setattr(PackedCache, "_write", full)
    model = load(tiny, Gptq(CPU, group_size=32))
    assert str(model.packed_by) == f"{CALIBRATED}, not kept: cannot write: no space left"
    assert list((own_cache / "packed").glob("*.safetensors")) == []


def test_an_error_in_packing_is_no_matter_of_the_cache(tiny: ModelSource) -> None:
    cache, _ = kept(tiny, Gptq(CPU, group_size=32))

    def fails() -> dict[str, PackedLinear]:
        raise ModelError("tensor x is missing")

    with pytest.raises(ModelError, match="tensor x is missing"):
        cache.layers(fails)


def test_code_that_packs_otherwise_has_another_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for room in packed_cache.ROOMS:
        (tmp_path / room).mkdir()
        (tmp_path / room / "a.py").write_text("one")
    monkeypatch.setattr(packed_cache, "IMPLS", tmp_path)
    version = packed_cache.code_version.__wrapped__
    seen = [version()]
    for edited in (tmp_path / "precision" / "a.py", tmp_path / "native" / "kernel.c"):
        edited.write_text("two")
        seen.append(version())
    (tmp_path / "models" / "notes.txt").write_text("of no account")
    assert len(set(seen)) == 3 and version() == seen[-1]
