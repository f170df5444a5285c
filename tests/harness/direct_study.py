"""A study as its command line starts it, but for Hydra's launcher, which composes every block again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from harness.__main__ import main
from harness.block import RunOne, run_block
from harness.run_dir import pending_blocks, read_plan


def launcher(run_one: RunOne | None = None) -> Callable[[Path, Sequence[str]], None]:
    """What `main` takes for ``launch``."""

    def launch(run_dir: Path, overrides: Sequence[str]) -> None:
        for block in pending_blocks(run_dir, read_plan(run_dir)):
            run_block(run_dir, block, run_one=run_one)

    return launch


def run_study(arguments: Sequence[str], run_one: RunOne | None = None) -> int:
    """Its exit status. Nothing is made of the records."""
    return main(arguments, launch=launcher(run_one), finish=lambda run_dir, plan: [])
