"""Rebuilds a `tokenizers` tokenizer from the vocabulary in a GGUF file's metadata."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as FastTokenizer

from impls.models.errors import ModelError
from impls.models.tokenizer import Tokenizer

CONTROL, USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type
MAX_TOKEN_CHARS = 1 << 12  # cutting a token in two at every place takes the square of this
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    splitter = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence([splitter, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


# tokenizer.ggml.pre -> how the original tokenizer cuts text into words.
PRE_TOKENIZERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "default": _gpt2,
    "gpt-2": _gpt2,
    "smollm": lambda: pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()]),
    "llama-bpe": lambda: _split(WORDS % "{1,3}"),
    "llama3": lambda: _split(WORDS % "{1,3}"),
    "qwen2": lambda: _split(WORDS % ""),
}


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> tuple[Tokenizer | None, str]:
    """The tokenizer, or None and the reason. ModelError if the vocabulary contradicts itself."""
    kind, tokens = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list):
        return None, "the file holds no tokenizer"
    for token in tokens:
        if not isinstance(token, str) or len(token) > MAX_TOKEN_CHARS:
            raise ModelError(f"the tokenizer in this GGUF file is damaged: a token is {str(token)[:40]!r}...")
    if kind == "gpt2":
        pre = str(metadata.get("tokenizer.ggml.pre", "default"))
        if pre not in PRE_TOKENIZERS:
            return None, f"pre-tokenizer {pre!r} is not known here ({', '.join(PRE_TOKENIZERS)} are)"
        build = _byte_level
    elif kind == "llama":
        build = _sentence_piece
    else:
        return None, f"tokenizer model {kind!r} is not known here (gpt2 and llama are)"
    try:
        fast = build(metadata, tokens)
        types = metadata.get("tokenizer.ggml.token_type", [])
        added = [(token, type) for token, type in zip(tokens, types, strict=False) if type in (CONTROL, USER_DEFINED)]
        fast.add_special_tokens([AddedToken(t, normalized=False, special=True) for t, type in added if type == CONTROL])
        fast.add_tokens([AddedToken(t, normalized=False) for t, type in added if type == USER_DEFINED])
        names = {key: _token(metadata, key, tokens) for key in ("bos", "eos")}
        _add_bos(fast, metadata, names["bos"])
    except ModelError:
        raise
    except Exception as error:  # the bindings raise bare Exception for everything
        raise ModelError(f"the tokenizer in this GGUF file is damaged: {error}") from error
    if fast.get_vocab_size(with_added_tokens=True) != len(tokens):
        raise ModelError(f"the tokenizer in this GGUF file has duplicates among its {len(tokens)} tokens")
    return Tokenizer(fast, **names, chat_template=metadata.get("tokenizer.chat_template")), ""


def _token(metadata: Mapping[str, Any], key: str, tokens: list[str]) -> str | None:
    index = metadata.get(f"tokenizer.ggml.{key}_token_id")
    if index is None:
        return None
    if not 0 <= index < len(tokens):
        raise ModelError(f"tokenizer.ggml.{key}_token_id is {index}, there are {len(tokens)} tokens")
    return str(tokens[index])


def _add_bos(fast: FastTokenizer, metadata: Mapping[str, Any], bos: str | None) -> None:
    # Without the flag, llama.cpp adds a BOS for SentencePiece and none for byte-level BPE.
    wanted = metadata.get("tokenizer.ggml.add_bos_token", metadata["tokenizer.ggml.model"] == "llama")
    if wanted and bos is not None:
        index = metadata["tokenizer.ggml.bos_token_id"]
        fast.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], pair=[bos, "$A", bos, "$B:1"], special_tokens=[(bos, index)]
        )


def _byte_level(metadata: Mapping[str, Any], tokens: list[str]) -> FastTokenizer:
    """Byte-level BPE with the file's merges (GPT-2, Llama 3, Qwen, SmolLM)."""
    pre = metadata.get("tokenizer.ggml.pre", "default")
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    vocab = {token: index for index, token in enumerate(tokens)}
    # Llama 3 takes a word that is a token as it is, whatever its merges would make of it.
    fast = FastTokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre in ("llama-bpe", "llama3")))
    fast.pre_tokenizer = PRE_TOKENIZERS[pre]()
    fast.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        fast.normalizer = normalizers.NFC()
    return fast


def _sentence_piece(metadata: Mapping[str, Any], tokens: list[str]) -> FastTokenizer:
    """SentencePiece BPE (Llama 2, Mistral): no merges are stored, a better score is an earlier merge."""
    scores = metadata["tokenizer.ggml.scores"]
    vocab = {token: index for index, token in enumerate(tokens)}
    candidates = [
        (-scores[index], vocab[token[:cut]], vocab[token[cut:]], token[:cut], token[cut:])
        for token, index in vocab.items()
        for cut in range(1, len(token))
        if token[:cut] in vocab and token[cut:] in vocab
    ]
    merges = [(left, right) for *_, left, right in sorted(candidates)]
    unknown = _token(metadata, "unknown", tokens)
    fast = FastTokenizer(models.BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    spaces = normalizers.Replace(" ", "▁")
    fast.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix else spaces
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    fast.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return fast
