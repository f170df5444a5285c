"""From the resolved config of the `workload` group to a request stream."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workloads.errors import WorkloadError
from workloads.generate import generate
from workloads.options import build_options
from workloads.replay import replay
from workloads.setting import Sampling, Seeds, Setting, check_stop_tokens
from workloads.stream import RequestStream
from workloads.tokenizer import Tokenizer
from workloads.vocabulary import Vocabulary


def build_stream(
    config: Mapping[str, Any],
    *,
    seed: int,
    tokenizer: Tokenizer | None,
    max_model_len: int,
    vocab_size: int | None = None,
) -> RequestStream:
    """The stream of a resolved `workload` config (a plain mapping). The same arguments give the same requests.

    vocab_size: needed only where the model has no tokenizer; prompts are then random tokens. Raises WorkloadError.
    """
    size = vocab_size if tokenizer is None else tokenizer.vocab_size
    if size is None:
        raise WorkloadError("vocab_size=None: must be given where there is no tokenizer")
    seeds = Seeds.of(seed)
    special = () if tokenizer is None else tokenizer.special_token_ids
    sampling = build_options("workload.sampling", Sampling, config.get("sampling") or {}, "sampling")
    check_stop_tokens("workload.sampling.stop_token_ids", sampling.stop_token_ids, size)
    vocabulary = Vocabulary(size, special, seeds.vocabulary)
    setting = Setting(config, seeds, sampling, tokenizer, vocabulary, size, max_model_len)
    return replay(setting) if "path" in config else generate(setting)
