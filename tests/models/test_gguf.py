"""GGUF files: every type read exactly, the conversion made once, hostile files refused in one line."""

from __future__ import annotations

import struct
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from gguf_files import HEAD_DIM, byte_level_vocabulary, write_gguf

from harness.arm import resolve_study, validate_arm
from harness.compose import compose_arm
from harness.drive import VirtualClock
from impls.build import build_engine
from impls.models import gguf_model
from impls.models.errors import ModelError
from impls.models.gguf_header import GGUFHeader, read_header
from impls.models.source import open_model

K_QUANTS = [Type.Q2_K, Type.Q3_K, Type.Q4_K, Type.Q5_K, Type.Q6_K]
TYPES = [Type.F32, Type.F16, Type.BF16, Type.Q8_0, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, *K_QUANTS]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def assert_reads(path: Path, expected: dict[str, np.ndarray]) -> None:
    weights = open_model({"path": path}).weights()
    assert set(weights) == set(expected)
    for name, values in expected.items():
        assert weights[name].dtype == torch.float32
        np.testing.assert_array_equal(weights[name].numpy(), values, err_msg=name)


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_every_type_is_read_exactly(kind: Type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_model, "CHUNK_ELEMENTS", 30 * 256)  # several chunks a tensor, the last one partial
    assert_reads(tmp_path / "m.gguf", write_gguf(tmp_path / "m.gguf", kind))


@pytest.mark.parametrize("arch", ["qwen2", "qwen3"])
def test_architectures_other_than_llama_are_not_permuted(arch: str, tmp_path: Path) -> None:
    expected = write_gguf(tmp_path / "m.gguf", Type.Q8_0, arch)
    shape = open_model({"path": tmp_path / "m.gguf"}).shape
    assert (shape.attention_bias, shape.qk_norm) == (arch == "qwen2", arch == "qwen3")
    assert_reads(tmp_path / "m.gguf", expected)


def test_the_shape_is_the_metadata(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", llama__rope__scaling__type="linear", llama__rope__scaling__factor=4.0)
    shape = open_model({"path": tmp_path / "m.gguf"}).shape
    assert (shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.max_position) == (4, 2, 64, 128)
    assert (shape.rope_theta, shape.rms_norm_eps, shape.tie_embeddings) == (5000.0, 1e-5, True)
    assert shape.rope_scaling == {"rope_type": "linear", "factor": 4.0}


def test_its_size_on_disk_is_the_files_and_not_that_of_what_it_is_dequantised_to(tmp_path: Path, cache: Path) -> None:
    write_gguf(tmp_path / "m.gguf")
    source = open_model({"path": tmp_path / "m.gguf"})
    source.weights()
    assert source.checkpoint_bytes == (tmp_path / "m.gguf").stat().st_size


def test_a_file_is_dequantised_once(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(tmp_path / "m.gguf")
    open_model({"path": tmp_path / "m.gguf"}).weights()
    (made,) = cache.glob("converted/*.safetensors")

    def never(*_: object) -> None:
        raise AssertionError("dequantised again")

    with monkeypatch.context() as patch:
        patch.setattr(gguf_model, "_convert", never)
        open_model({"path": tmp_path / "m.gguf"}).weights()
    write_gguf(tmp_path / "m.gguf", Type.F16)  # another file in its place is another model
    open_model({"path": tmp_path / "m.gguf"}).weights()
    assert len(list(cache.glob("converted/*.safetensors"))) == 2
    assert not list(cache.rglob("*.partial")) and made.exists()


def test_a_conversion_that_fails_leaves_nothing(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(tmp_path / "m.gguf")
    source = open_model({"path": tmp_path / "m.gguf"})

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(gguf_model, "_row_order", full)
    with pytest.raises(ModelError, match=r"No space left on device"):
        source.weights()
    assert not list(cache.glob("converted/*.safetensors")) and not list(cache.rglob("*.partial"))


def test_a_cut_file_is_refused_wherever_it_is_cut(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", Type.Q8_0, **byte_level_vocabulary())
    assert open_model({"path": tmp_path / "m.gguf"}).tokenizer is not None
    whole, cut = (tmp_path / "m.gguf").read_bytes(), tmp_path / "cut.gguf"
    for length in [0, 3, 4, 23, 24, *np.random.default_rng(1).integers(25, len(whole), 40), len(whole) - 40]:
        cut.write_bytes(whole[:length])
        assert_refused(cut)


def assert_refused(path: Path) -> None:
    with pytest.raises(ModelError) as caught:
        open_model({"path": path})
    assert "\n" not in str(caught.value) and path.name in str(caught.value)


@pytest.mark.parametrize("at", [8, 16, 24], ids=["tensors", "values", "key length"])
@pytest.mark.parametrize("count", [1 << 20, 1 << 40, (1 << 64) - 1])
def test_huge_counts_allocate_nothing(at: int, count: int, tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf")
    data = bytearray((tmp_path / "m.gguf").read_bytes())
    data[at : at + 8] = struct.pack("<Q", count)
    (tmp_path / "m.gguf").write_bytes(data)
    tracemalloc.start()
    assert_refused(tmp_path / "m.gguf")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20_000_000


def test_damaged_headers_are_read_or_refused_but_never_a_crash(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", Type.Q8_0, **byte_level_vocabulary())
    assert open_model({"path": tmp_path / "m.gguf"}).tokenizer is not None
    whole = (tmp_path / "m.gguf").read_bytes()
    header = whole.index(b"blk.0.attn_norm.weight")
    generator, damaged, refused = np.random.default_rng(2), tmp_path / "damaged.gguf", 0
    for _ in range(300):
        data = bytearray(whole)
        for at in generator.integers(4, header, int(generator.integers(1, 4))):
            data[at] = int(generator.integers(0, 256))
        damaged.write_bytes(data)
        try:
            open_model({"path": damaged})
        except ModelError as error:
            assert "\n" not in str(error)
            refused += 1
    assert 30 < refused < 300


def test_what_is_not_supported_is_named(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, llama__rope__scaling__type="yarn", llama__rope__scaling__factor=4.0)
    with pytest.raises(ModelError, match=r"rope scaling 'yarn' is not supported"):
        open_model({"path": path})
    write_gguf(path, llama__expert_count=8)
    with pytest.raises(ModelError, match=r"mixture-of-experts"):
        open_model({"path": path})
    write_gguf(path, arch="gptneox")
    with pytest.raises(ModelError, match=r"model_type 'gptneox' is not supported"):
        open_model({"path": path})


@pytest.mark.parametrize("kind", [Type.Q8_K, Type.F64], ids=lambda kind: kind.name)
def test_a_type_that_is_not_read_is_named_with_those_that_are(kind: Type, tmp_path: Path) -> None:
    header = read_header_with(tmp_path / "m.gguf", "blk.0.ffn_up.weight", kind)
    said = rf"m.gguf: tensor blk.0.ffn_up.weight is stored as {kind.name}: not read .*Q4_1"
    with pytest.raises(ModelError, match=said):
        gguf_model.gguf_shape(header)


def read_header_with(path: Path, tensor: str, kind: Type) -> GGUFHeader:
    """The header of a file whose tensor is said to be of that type."""
    write_gguf(path)
    header = read_header(path)
    header.tensors[tensor] = replace(header.tensors[tensor], quantization=kind)
    return header


@pytest.mark.parametrize(
    ("kind", "others", "reasons"),
    [
        (Type.Q4_1, {}, []),
        (Type.Q4_1, {"attn_output": Type.Q8_0}, []),
        (Type.Q5_0, {}, ["model.embed_tokens.weight is stored as Q5_0, not as Q4_1 or Q8_0 blocks"]),
        (
            *(Type.Q4_1, {"ffn_down": Type.Q6_K, "attn_v": Type.F16}),
            [
                "model.layers.0.self_attn.v_proj.weight is stored as F16, not as Q4_1 or Q8_0 blocks",
                "model.layers.0.mlp.down_proj.weight is stored as Q6_K, not as Q4_1 or Q8_0 blocks",
            ],
        ),
        (
            *(Type.Q4_1, {"attn_v": Type.Q8_0}),
            [
                "model.layers.0.self_attn.v_proj.weight is stored as Q8_0, but model.layers.0.self_attn.q_proj.weight "
                "as Q4_1: they are one layer, of one type"
            ],
        ),
    ],
)
def test_an_arm_of_blocks_that_are_not_multiplied_does_not_run(
    kind: Type, others: dict[str, Type], reasons: list[str], tmp_path: Path
) -> None:
    write_gguf(tmp_path / "m.gguf", kind, others=others)
    arm = compose_arm([f"model.path={tmp_path / 'm.gguf'}", "model.max_model_len=128", "precision=gguf", "device=cpu"])
    resolved = resolve_study({"a": arm})["a"]
    assert validate_arm(resolved) == [f"precision=gguf: {reason}" for reason in reasons]
    if not reasons:
        build_engine(resolved, open_model(resolved["model"]), VirtualClock())


def test_llama3_frequency_factors_come_from_their_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import gguf

    write = gguf.GGUFWriter.write_header_to_file
    factors = np.linspace(1, 8, HEAD_DIM // 2, dtype=np.float32)

    def with_factors(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("rope_freqs.weight", factors)
        write(writer)

    monkeypatch.setattr(gguf.GGUFWriter, "write_header_to_file", with_factors)
    expected = write_gguf(tmp_path / "m.gguf")
    scaling = open_model({"path": tmp_path / "m.gguf"}).shape.rope_scaling
    assert scaling is not None and scaling["factors"] == factors.tolist()
    assert_reads(tmp_path / "m.gguf", expected)


def test_a_header_is_read_once_until_the_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Path] = []
    monkeypatch.setattr("impls.models.source.read_header", lambda path: (read.append(path), read_header(path))[1])
    path = tmp_path / "m.gguf"
    write_gguf(path, Type.Q8_0, **byte_level_vocabulary())
    for _ in range(2):
        open_model({"path": path})
    assert len(read) == 2  # so young a file may change again without a trace in its times
    monkeypatch.setattr("impls.models.source.SETTLED_S", -1.0)
    first, again = open_model({"path": path}), open_model({"path": path, "max_model_len": 7})
    assert len(read) == 3 and again.tokenizer is first.tokenizer
    assert (first.max_model_len, again.max_model_len) == (first.shape.max_position, 7)
    write_gguf(path)  # without a tokenizer
    assert open_model({"path": path}).tokenizer is None and len(read) == 4
