"""Comparing tokens builds an engine once more, after everything is measured: where it has no room, no study is lost."""

from __future__ import annotations

import pytest

from harness.arm import resolve_study
from harness.compose import compose_arm
from harness.equivalence import TeacherForcer

OPTIONS = ("study=none", "model=tiny", "device=cpu", "workload/prompts=random", "kv_cache.budget=64tokens")


def test_a_context_that_the_cache_cannot_hold_is_an_error_that_the_end_of_a_study_survives() -> None:
    forcer = TeacherForcer(resolve_study({"arm": compose_arm(OPTIONS)})["arm"])
    assert forcer.top2_gap(range(1, 20)) > 0
    with pytest.raises(RuntimeError, match=r"cannot hold 200 tokens"):
        forcer.top2_gap(range(1, 201))
