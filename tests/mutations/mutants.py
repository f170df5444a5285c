"""Every broken rule, and the quickest test that must notice."""

from __future__ import annotations

from broken_allocators import ALLOCATORS
from broken_measurement import MEASUREMENT
from broken_prefixes import PREFIXES
from broken_schedulers import SCHEDULERS
from broken_verifiers import VERIFIERS
from change import Change

MUTANTS: dict[str, tuple[Change, str]] = {**VERIFIERS, **ALLOCATORS, **PREFIXES, **SCHEDULERS, **MEASUREMENT}
