"""Tokenizers: equal to transformers' where it has them, and to hand-worked examples where it does not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gguf_files import byte_level_vocabulary
from tokenizers import Tokenizer as FastTokenizer

from impls.models.errors import ModelError
from impls.models.gguf_header import read_header
from impls.models.gguf_tokenizer import tokenizer_from_gguf
from impls.models.source import ModelSource
from impls.models.tokenizer import Tokenizer, tokenizer_from_directory
from impls.user_cache import cache_dir

TEXTS = [
    "The quick brown fox doesn't jump over 12345 lazy dogs in 2024; it's 3.14159!",
    "  leading, trailing and   inner\t spaces \n\n\nand lines\r\n",
    "Grüße aus Köln, 你好世界, こんにちは, 🙂👩‍👩‍👧‍👦, é vs é",
    "def f(x):\n    return {'a': [1, 22, 333]}  # comment",
    "<|im_start|>user\nspecial tokens in text<|im_end|>",
    "",
]
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "And <3 & you?"},
]


@pytest.fixture(scope="module")
def metadata(real_model: ModelSource) -> dict[str, Any]:
    (path,) = (cache_dir() / "models").glob("*SmolLM2-135M-Instruct.Q4_1.gguf")
    return read_header(path).metadata


@pytest.fixture(scope="module")
def smollm(real_model: ModelSource) -> Tokenizer:
    assert real_model.tokenizer is not None
    return real_model.tokenizer


def vocabulary(metadata: dict[str, Any]) -> tuple[dict[str, int], list[tuple[str, ...]]]:
    tokens, merges = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.merges"]
    return {token: id for id, token in enumerate(tokens)}, [tuple(merge.split(" ")) for merge in merges]


def test_the_real_tokenizer_equals_transformers(smollm: Tokenizer, metadata: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    vocab, merges = vocabulary(metadata)
    special = list(vocab)[:17]
    reference = transformers.GPT2Tokenizer(
        vocab=vocab, merges=merges, bos_token=special[1], eos_token=special[2], unk_token=special[0],
        additional_special_tokens=special,
    )  # fmt: skip
    reference.chat_template = metadata["tokenizer.chat_template"]
    for text in TEXTS:
        ids = smollm.encode(text)
        assert ids == reference(text).input_ids
        assert smollm.decode(ids) == text == reference.decode(ids, clean_up_tokenization_spaces=False)
    for messages in (CHAT, CHAT[1:2]):
        for prompt in (True, False):
            expected = reference.apply_chat_template(messages, add_generation_prompt=prompt, return_dict=False)
            assert smollm.apply_chat_template(messages, add_generation_prompt=prompt) == expected
    assert (smollm.bos_token_id, smollm.eos_token_id, smollm.vocab_size) == (1, 2, 49152)
    assert smollm.special_token_ids == frozenset(range(17))


def test_qwen2_words_equal_transformers(metadata: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    vocab, merges = vocabulary(metadata)
    ours, reason = tokenizer_from_gguf({**metadata, "tokenizer.ggml.pre": "qwen2"})
    assert ours is not None, reason
    reference = transformers.Qwen2Tokenizer(vocab=vocab, merges=merges)
    for text in TEXTS[:4]:
        assert ours.encode(text) == reference(text).input_ids


def test_llama3_cuts_numbers_in_threes_and_takes_whole_words(metadata: dict[str, Any]) -> None:
    ours, reason = tokenizer_from_gguf({**metadata, "tokenizer.ggml.pre": "llama-bpe"})
    assert ours is not None, reason
    fast = ours._fast
    words = [word for word, _ in fast.pre_tokenizer.pre_tokenize_str("It's 1234567 I'LL\n\n now")]
    assert words == ["It", "'s", "Ġ", "123", "456", "7", "ĠI", "'LL", "ĊĊ", "Ġnow"]
    model = json.loads(fast.to_str())["model"]
    assert model["ignore_merges"] is True


def test_a_directory_reads_what_was_saved(smollm: Tokenizer, tmp_path: Path) -> None:
    smollm._fast.save(str(tmp_path / "tokenizer.json"))
    templates = [
        {"name": "tool", "template": "no"},
        {"name": "default", "template": "{{ bos_token }}{{ messages[0].content }}"},
    ]
    config = {"bos_token": {"content": "<|im_start|>"}, "eos_token": "<|im_end|>", "chat_template": templates}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    read = tokenizer_from_directory(tmp_path)
    assert read is not None
    assert [read.encode(text) for text in TEXTS] == [smollm.encode(text) for text in TEXTS]
    assert (read.bos_token_id, read.eos_token_id) == (1, 2)
    assert read.apply_chat_template(CHAT) == [1, *smollm.encode("Be brief.")]
    (tmp_path / "chat_template.jinja").write_text("{{ messages[1].content }}")
    read = tokenizer_from_directory(tmp_path)
    assert read is not None and read.apply_chat_template(CHAT) == smollm.encode("What is 2 + 2?")


def test_damage_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"')
    with pytest.raises(ModelError, match=r"cannot read .*tokenizer.json"):
        tokenizer_from_directory(tmp_path)
    good = {key.replace("__", "."): value for key, value in byte_level_vocabulary().items()}
    assert tokenizer_from_gguf(good)[0] is not None
    for change in (
        {"tokenizer.ggml.merges": ["a zz"]},
        {"tokenizer.ggml.merges": 5},
        {"tokenizer.ggml.eos_token_id": 9999},
        {"tokenizer.ggml.tokens": [*good["tokenizer.ggml.tokens"], "a"]},
    ):
        with pytest.raises(ModelError) as caught:
            tokenizer_from_gguf({**good, **change})
        assert "\n" not in str(caught.value)
    none, reason = tokenizer_from_gguf({**good, "tokenizer.ggml.pre": "tekken"})
    assert none is None and "'tekken'" in reason


@pytest.mark.parametrize("template", ["{{ ''.__class__.__mro__ }}", "{% for", "{{ raise_exception('only users') }}"])
def test_a_template_cannot_reach_out_and_fails_in_one_line(template: str, smollm: Tokenizer) -> None:
    tokenizer = Tokenizer(FastTokenizer.from_str(smollm._fast.to_str()), chat_template=template)
    with pytest.raises(ModelError, match=r"chat template") as caught:
        tokenizer.apply_chat_template(CHAT)
    assert "\n" not in str(caught.value)
    with pytest.raises(ModelError, match=r"no chat template"):
        Tokenizer(smollm._fast).apply_chat_template(CHAT)


def sentence_piece(**changes: Any) -> dict[str, Any]:
    """A vocabulary in which the better score decides: `ab` before `▁a`, and all bytes as a fallback."""
    scored = {"▁": -9.0, "a": -9.0, "b": -9.0, "c": -9.0, "ab": -1.0, "▁a": -2.0, "▁ab": -4.0, "bc": -3.0}
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *scored]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + list(scored.values()),
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(scored),
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        **changes,
    }


def test_sentence_piece_merges_by_score_with_bytes_as_fallback() -> None:
    tokenizer, reason = tokenizer_from_gguf(sentence_piece())
    assert tokenizer is not None, reason
    tokens = sentence_piece()["tokenizer.ggml.tokens"]

    def pieces(text: str) -> list[str]:
        return [tokens[id] for id in tokenizer.encode(text)]

    assert pieces("abc") == ["<s>", "▁ab", "c"]
    assert pieces("bcab") == ["<s>", "▁", "bc", "ab"]
    assert pieces("aé b") == ["<s>", "▁a", "<0xC3>", "<0xA9>", "▁", "b"]
    assert tokenizer.decode(tokenizer.encode("aé b", add_special_tokens=False)) == "aé b"
    plain, _ = tokenizer_from_gguf(
        sentence_piece(**{"tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.add_bos_token": False})
    )
    assert plain is not None and [tokens[id] for id in plain.encode("ab a")] == ["ab", "▁a"]
