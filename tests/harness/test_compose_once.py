"""Composing many arms parses each file of conf/ once, and gives what each arm by itself would get."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hydra._internal.config_repository import ConfigRepository

from harness.compose import compose_config
from harness.study import compose_study

# What the study's file sets of a group (the model's length) is where Hydra changes the very object that it has parsed.
ARMS = (
    'study.arms={a:{set:["batching=static","model.max_model_len=100"]},b:{set:["batching.max_num_seqs=3"]}}',
    "study.baseline=null",
)


def test_each_file_is_parsed_once_and_no_arm_changes_it_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: Counter[str] = Counter()
    load = ConfigRepository.load_config

    def counted(self: ConfigRepository, config_path: str) -> Any:
        parsed[config_path] += 1
        return load(self, config_path)

    monkeypatch.setattr(ConfigRepository, "load_config", counted)
    compose_config.cache_clear()
    together = compose_study(["study=tour", "model=tiny", *ARMS])
    assert set(parsed.values()) == {1} and {"batching/static", "batching/continuous", "model/tiny"} <= {*parsed}
    assert [config["model"]["max_model_len"] for config in together.configs.values()] == [100, 768]
    compose_config.cache_clear()
    for arm in together.arms:
        alone = compose_config(arm.overrides)  # in a session of its own
        assert together.configs[arm.name] == {key: alone[key] for key in together.configs[arm.name]}
    assert parsed["model/tiny"] == 1 + len(together.arms)
