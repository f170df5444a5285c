"""Which kind of system a target is. A further kind is a file beside this one and a line here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness.system.base import SystemUnderTest
from harness.system.engine import EngineUnderTest
from harness.system.foreign import ForeignUnderTest
from harness.system.workers import WorkersUnderTest
from impls.engine import Engine
from impls.models.source import ModelSource
from impls.seams import ForeignTarget, Topology


def system_under_test(
    target: Engine | Topology | ForeignTarget, config: Mapping[str, Any], source: ModelSource
) -> SystemUnderTest:
    """``target``: as `impls.build.build_target` made it of ``config``, the arm's resolved one."""
    if isinstance(target, Engine):
        return EngineUnderTest(target, config, source)
    if isinstance(target, Topology):
        return WorkersUnderTest(target, config, source)
    return ForeignUnderTest(target, config, source)
