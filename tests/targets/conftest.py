"""What the tests of this room share: a heap on which the collections that transformers forces are short."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="session")
def frozen_heap() -> Iterator[None]:
    pytest.importorskip("transformers")
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
