"""What both kinds of stream, generated and replayed, are built from."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.random import SeedSequence
from numpy.typing import NDArray

from workloads.arrivals import Times, index_of_dispersion
from workloads.errors import WorkloadError, one_of
from workloads.options import METADATA, require
from workloads.tokenizer import Tokenizer
from workloads.vocabulary import Vocabulary

OVERLENGTH = ("reject", "clip")


@dataclass(frozen=True)
class Sampling:
    """How every request is decoded (see `SamplingParams`). stop_token_ids: tokens that end it, ignore_eos or not."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    n: int = 1

    def __post_init__(self) -> None:
        require(0 <= self.temperature <= 100, "temperature", self.temperature, "from 0 to 100")
        require(self.top_k >= 0, "top_k", self.top_k, "at least 0 (0: off)")
        require(0 < self.top_p <= 1, "top_p", self.top_p, "above 0 and at most 1")
        require(1 <= self.n <= 1024, "n", self.n, "from 1 to 1024")


@dataclass(frozen=True)
class Seeds:
    """One child seed a concern: changing one law never moves the draws of another."""

    arrivals: SeedSequence
    prompt_length: SeedSequence
    output_length: SeedSequence
    vocabulary: SeedSequence
    prompts: SeedSequence
    sessions: SeedSequence
    sampling: SeedSequence
    priorities: SeedSequence

    @classmethod
    def of(cls, seed: int) -> Seeds:
        return cls(*SeedSequence(seed).spawn(8))  # a new concern comes last: the others' draws stay


@dataclass(frozen=True)
class Setting:
    """The resolved `workload` config and what the model says."""

    config: Mapping[str, Any]
    seeds: Seeds
    sampling: Sampling
    tokenizer: Tokenizer | None
    vocabulary: Vocabulary
    vocab_size: int
    max_model_len: int

    def law(self, group: str) -> Mapping[str, Any]:
        """The sub-config of a group that must be there."""
        config: Mapping[str, Any] | None = self.config.get(group)
        if config is None:
            raise WorkloadError(f"workload.{group} is missing: choose one with workload/{group}=...")
        return config

    def options(self, *groups: str) -> dict[str, Any]:
        """The workload's own keys: all but ``groups`` and what it says about itself."""
        return {key: value for key, value in self.config.items() if key not in (*groups, *METADATA)}

    def request_seeds(self, n: int) -> NDArray[np.int64]:
        return np.random.default_rng(self.seeds.sampling).integers(2**63 - 1, size=n)

    def describe(
        self,
        prompt_tokens: NDArray[np.int64],
        output_tokens: NDArray[np.int64],
        arrivals_s: Times | None,
        overlength: str,
    ) -> dict[str, Any]:
        """The part of a provenance that both kinds share; ``arrivals_s`` None: they depend on the system measured.

        ``idc_<w>s``: index of dispersion of what was drawn, not of what was asked.
        """
        over = prompt_tokens + output_tokens > self.max_model_len
        clipped = over & (output_tokens < self.max_model_len) if overlength == "clip" else np.zeros_like(over)
        idc = {f"idc_{w}s": None if arrivals_s is None else index_of_dispersion(arrivals_s, w) for w in (1, 10, 60)}
        return {
            "workload": self.config.get("name"),
            "source": self.config.get("source"),
            "num_requests": len(prompt_tokens),
            "overlength": overlength,
            "num_clipped": int(clipped.sum()),
            "clipped_to": self.max_model_len if clipped.any() else None,
            "num_overlength": int((over & ~clipped).sum()),
            **idc,
        }


def check_stop_tokens(where: str, token_ids: Seq[int], vocab_size: int) -> None:
    """WorkloadError, beginning with ``where``, for a token that the model does not have: it would end nothing."""
    for token in token_ids:
        if not 0 <= token < vocab_size:
            raise WorkloadError(f"{where} has {token}: must lie in 0..{vocab_size - 1}, the vocabulary")


def check_overlength(value: str) -> None:
    require(value in OVERLENGTH, "overlength", value, one_of(OVERLENGTH, value))
