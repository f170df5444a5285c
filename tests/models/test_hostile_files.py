"""Model files of somebody who means harm: one line, nothing is run, and no more memory than the file is worth."""

from __future__ import annotations

import json
import os
import pickle
import struct
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from gguf_files import byte_level_vocabulary, write_gguf
from test_checkpoint import CONFIG, SHAPE, write
from test_tokenizer import sentence_piece

from impls.models import errors, tokenizer
from impls.models.checkpoint import MAX_TEXT_BYTES
from impls.models.errors import ModelError
from impls.models.gguf_header import MAX_HEADER_BYTES
from impls.models.gguf_tokenizer import tokenizer_from_gguf
from impls.models.source import open_model
from impls.models.tensors import tensor_shapes
from impls.models.tokenizer import Tokenizer, tokenizer_from_directory

SOME_MB = 20_000_000
CHAT = [{"role": "user", "content": "Hello"}]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path / "cache"))


@contextmanager
def refused(said: str) -> Iterator[None]:
    """ModelError in one line that can be read, for little memory and time."""
    tracemalloc.start()
    began = time.monotonic()
    try:
        with pytest.raises(ModelError) as caught:
            yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert said in str(caught.value), caught.value
    assert "\n" not in str(caught.value) and len(str(caught.value)) < errors.MAX_CHARS + 10
    assert peak < SOME_MB and time.monotonic() - began < 10


# --- GGUF -------------------------------------------------------------------------------------------------------------


def bomb(path: Path, kind: int, count: int) -> Path:
    """A file of one value: an array of so many zeros, none of which takes any room on the disk."""
    key = b"tokenizer.ggml.tokens"
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", len(key)) + key
    path.write_bytes(head + struct.pack("<IIQ", 9, kind, count))
    os.truncate(path, path.stat().st_size + 8 * count)
    return path


@pytest.mark.parametrize("kind", [0, 6, 8, 10, 12], ids=["bytes", "floats", "strings", "integers", "doubles"])
def test_an_array_as_long_as_a_file_full_of_holes(kind: int, tmp_path: Path) -> None:
    count = MAX_HEADER_BYTES  # as Python values: a gigabyte and more
    with refused("are left"):
        open_model({"path": bomb(tmp_path / "m.gguf", kind, count)})


def test_a_longer_header_than_any_model_has(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, MAX_HEADER_BYTES // 24, MAX_HEADER_BYTES // 13))
    os.truncate(path, 4 * MAX_HEADER_BYTES)
    with refused("tensors and"):
        open_model({"path": path})


@pytest.mark.parametrize("count", [1 << 13, 1 << 20])
def test_rope_factors_are_as_many_as_a_head_has(count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_header = gguf.GGUFWriter.write_header_to_file

    def with_factors(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("rope_freqs.weight", np.ones(count, np.float32))
        write_header(writer)

    monkeypatch.setattr(gguf.GGUFWriter, "write_header_to_file", with_factors)
    write_gguf(tmp_path / "m.gguf")
    with refused(f"rope_freqs.weight has shape [{count}]"):
        open_model({"path": tmp_path / "m.gguf"})


METADATA: dict[str, dict[str, Any]] = {
    "model_type 'aaaa": {"general__architecture": "a" * 1_000_000},
    "model_type ['llama', 'llama']": {"general__architecture": ["llama", "llama"]},
    "num_hidden_layers must be a positive integer": {"llama__block_count": 1.0},
    "max_position_embeddings must be a positive integer": {"llama__context_length": "long"},
    "rope_theta must be a positive number": {"llama__rope__freq_base": float("nan")},
    "rms_norm_eps must be a positive number": {"llama__attention__layer_norm_rms_epsilon": [1, 2]},
    "general.alignment is 3": {"general__alignment": 3},
    "end-of-sequence id 'zero'": {"tokenizer__ggml__eos_token_id": "zero"},
    "a token is '1'": byte_level_vocabulary() | {"tokenizer__ggml__tokens": [1, 2, 3]},
    "the tokenizer in this GGUF file is damaged": byte_level_vocabulary() | {"tokenizer__ggml__merges": [1, 2]},
    "GGUF file is damaged: '<=' not supported": byte_level_vocabulary() | {"tokenizer__ggml__eos_token_id": [0]},
}


@pytest.mark.parametrize("said", METADATA)
def test_metadata_of_the_wrong_type(said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Written in place of what `write_gguf` gives, so that each is the only fault of its file."""
    changes = {key.replace("__", "."): value for key, value in METADATA[said].items()}
    write_header = gguf.GGUFWriter.write_header_to_file

    def with_changes(writer: gguf.GGUFWriter) -> None:
        for key, value in changes.items():
            writer.kv_data[0].pop(key, None)
            writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
        write_header(writer)

    monkeypatch.setattr(gguf.GGUFWriter, "write_header_to_file", with_changes)
    write_gguf(tmp_path / "m.gguf")
    with refused(said):
        open_model({"path": tmp_path / "m.gguf"})


def test_a_token_whose_every_cut_would_be_tried() -> None:
    vocabulary = sentence_piece()
    vocabulary["tokenizer.ggml.tokens"][-1] = "a" * 1_000_000
    with refused("a token is 'aaaa"):
        tokenizer_from_gguf(vocabulary)


def test_a_type_that_is_no_weight(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, Type.F32)
    data = bytearray(path.read_bytes())
    at = data.index(b"blk.0.attn_norm.weight") + len(b"blk.0.attn_norm.weight") + 4 + 8
    for kind, said in ((24, "is stored as I8: not read (F32, F16, "), (200, "unknown type 200")):
        data[at : at + 4] = struct.pack("<I", kind)
        path.write_bytes(data)
        with refused(said):
            open_model({"path": path})


# --- safetensors and its directory ------------------------------------------------------------------------------------


def lying(shape: list[int], offsets: list[int], dtype: str = "F32") -> bytes:
    """A file of four bytes of data under a header that says something else of them."""
    entry = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
    text = json.dumps({"model.embed_tokens.weight": entry}).encode()
    return struct.pack("<Q", len(text)) + text + b"\0" * 4


HEADERS: dict[str, bytes] = {
    "huge shape": lying([1 << 40, 1 << 40], [0, 4]),
    "shape past 64 bits": lying([1 << 80], [0, 4]),
    "end before start": lying([1], [4, 0]),
    "outside the file": lying([1 << 30], [0, 1 << 32]),
    "negative": lying([-1], [0, 4]),
    "unknown dtype": lying([1], [0, 4], "F3"),
    "another dtype": lying([1], [0, 4], "F64"),
    "no object": struct.pack("<Q", 2) + b"[]",
    "deep": struct.pack("<Q", 1 << 20) + b"[" * (1 << 20),
    "not UTF-8": struct.pack("<Q", 4) + b"{\xff\xfe}",
    "no header": b"",
}


@pytest.mark.parametrize("case", HEADERS)
def test_a_safetensors_header_that_lies(case: str, tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(HEADERS[case])
    with refused("model.safetensors: "):
        open_model({"path": tmp_path}).weights()


def test_an_index_that_takes_the_headers_own_entry_for_a_tensor(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    tensors = write(tmp_path)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    names = dict.fromkeys([*tensor_shapes(SHAPE), "__metadata__"], "model.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    with refused("tensor __metadata__ is missing"):
        open_model({"path": tmp_path}).weights()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rope_theta": 10**400}, "rope_theta must be a positive number"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps must be a positive number"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 10**400}}, "needs a positive number 'factor'"),
        ({"model_type": ["llama"] * 100_000}, "model_type ['llama'"),
    ],
)
def test_numbers_that_no_float_holds(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    write(tmp_path, **changes)
    with refused(said):
        open_model({"path": tmp_path})


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors.index.json"])
def test_a_text_that_is_too_long_is_not_read(name: str, tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / name).touch()
    os.truncate(tmp_path / name, 16 * MAX_TEXT_BYTES)
    with refused(f"{name} has more than {MAX_TEXT_BYTES} bytes"):
        open_model({"path": tmp_path})


def test_nothing_of_a_directory_is_run(tmp_path: Path) -> None:
    """Neither a pickled checkpoint nor code that the config names, as `trust_remote_code` would."""
    proof = tmp_path / "proof"

    class Payload:
        def __reduce__(self) -> Any:
            return Path.touch, (proof,)

    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Payload()))
    (tmp_path / "evil.py").write_text(f"open({str(proof)!r}, 'w')\nclass Model: pass\n")
    own = {"auto_map": {"AutoModel": "evil.Model", "AutoTokenizer": "evil.Model"}, "trust_remote_code": True}
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | own))
    with refused("0 safetensors files"):
        open_model({"path": tmp_path})
    write(tmp_path, **own)
    assert set(open_model({"path": tmp_path}).weights()) == set(tensor_shapes(SHAPE))
    assert not proof.exists()


# --- tokenizer and chat template --------------------------------------------------------------------------------------


def saved_tokenizer(folder: Path) -> None:
    good = {key.replace("__", "."): value for key, value in byte_level_vocabulary().items()}
    made, reason = tokenizer_from_gguf(good)
    assert made is not None, reason
    made._fast.save(str(folder / "tokenizer.json"))


def long_tokenizer(folder: Path) -> None:
    os.truncate(folder / "tokenizer.json", 16 * MAX_TEXT_BYTES)


TOKENIZER_FILES: dict[str, Callable[[Path], Any]] = {
    f"tokenizer.json has more than {MAX_TEXT_BYTES} bytes": long_tokenizer,
    "cannot read": lambda folder: (folder / "tokenizer.json").write_bytes(b"\xff{}"),
    "chat_template.jinja": lambda folder: (folder / "chat_template.jinja").write_bytes(b"\xff\xfe"),
    "holds no JSON object": lambda folder: (folder / "tokenizer_config.json").write_text("7"),
}


@pytest.mark.parametrize("said", TOKENIZER_FILES)
def test_a_tokenizer_directory_that_is_damaged(said: str, tmp_path: Path) -> None:
    saved_tokenizer(tmp_path)
    TOKENIZER_FILES[said](tmp_path)
    with refused(said):
        tokenizer_from_directory(tmp_path)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (7, "chat template is int, not a text"),
        ({"default": "x"}, "chat template is dict, not a text"),
        ([7, {"name": "default", "template": [1]}], "chat template is list, not a text"),
        ([7, {"name": "default"}, "x"], "no chat template"),
        ("{{ 1 / 0 }}", "refuses this conversation: division by zero"),
        ("{{ range(999999999) | list }}", "refuses this conversation: Range too big"),
        ("{{ messages[0].content.nothing.more }}", "refuses this conversation"),
        ("{{ ''.__class__.__base__.__subclasses__() }}", "refuses this conversation"),
    ],
)
def test_a_chat_template_that_is_none_or_breaks(template: Any, said: str, tmp_path: Path) -> None:
    saved_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    read = tokenizer_from_directory(tmp_path)
    assert read is not None
    with refused(said):
        read.apply_chat_template(CHAT)


def test_a_template_that_writes_the_date_gives_every_day_the_same_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved_tokenizer(tmp_path)
    plain = tokenizer_from_directory(tmp_path)
    assert plain is not None
    dated = Tokenizer(plain._fast, chat_template="{{ strftime_now('%d %b %Y') }}")
    assert dated.decode(dated.apply_chat_template(CHAT)) == tokenizer.TODAY.strftime("%d %b %Y") == "26 Jul 2024"
