"""A cheap tokenizer, and every preset as Hydra composes it."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

CONF = Path(__file__).parents[2] / "conf"


class WordTokenizer:
    """A token a word or mark; 0 and 1 open and close a chat message, 2 begins a text."""

    vocab_size = 5000
    special_token_ids = frozenset({0, 1, 2})

    def encode(self, text: str) -> list[int]:
        words = re.findall(r"\w+|[^\w\s]|\n", text)
        return [2] + [3 + zlib.crc32(word.encode()) % (self.vocab_size - 3) for word in words]

    def apply_chat_template(self, messages: Any) -> list[int]:
        ids = []
        for message in messages:
            ids += [0, *self.encode(message["role"])[1:], *self.encode(message["content"])[1:], 1]
        return [*ids, 0, *self.encode("assistant")[1:]]


@pytest.fixture(scope="session")
def words() -> WordTokenizer:
    return WordTokenizer()


@pytest.fixture(scope="session")
def composed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Any]]:
    """(override, ...) -> the resolved `workload` config, from conf/ but without the application's own config.yaml."""
    folder = tmp_path_factory.mktemp("primary")
    searchpath = f"hydra:\n  searchpath: [file://{CONF}]\n"
    (folder / "primary.yaml").write_text("defaults:\n  - workload: chat\n  - _self_\n" + searchpath)

    @cache
    def get(*overrides: str) -> dict[str, Any]:
        with initialize_config_dir(str(folder), version_base="1.3"):
            config = OmegaConf.to_container(compose("primary", overrides=list(overrides)).workload, resolve=True)
        assert isinstance(config, dict)
        return {str(key): value for key, value in config.items()}

    return get


@pytest.fixture(scope="session")
def plain() -> Callable[..., dict[str, Any]]:
    """(key=value, ...) -> a small workload with these keys replaced."""

    def get(**changes: Any) -> dict[str, Any]:
        return {
            "name": "plain",
            "num_requests": 40,
            "arrivals": {"name": "poisson", "rate": 2.0},
            "prompt_length": {"name": "uniform", "low": 5, "high": 60},
            "output_length": {"name": "uniform", "low": 1, "high": 20},
            "prompts": {"name": "random"},
            **changes,
        }

    return get
