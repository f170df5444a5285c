"""Hydra's door to the harness: one job is one block of the study whose plan lies in `run_dir`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


class HarnessSweeper(Sweeper):
    """Launches the blocks that are not recorded yet; the arms were composed and validated before."""

    launcher: Launcher

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.config = config
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> Any:
        from harness.run_dir import pending_blocks, read_plan  # Hydra loads every plugin, also for other applications

        assert self.config is not None
        run_dir = Path(self.config.run_dir)
        plan = read_plan(run_dir)
        launched: list[int] = []  # a block that failed is not tried again; an adaptive study may find further ones due
        values: list[Any] = []
        while blocks := [block for block in pending_blocks(run_dir, plan) if block not in launched]:
            jobs = [[*arguments, f"+block={block}"] for block in blocks]
            results: Sequence[JobReturn] = self.launcher.launch(jobs, initial_job_idx=len(launched))
            values += [result.return_value for result in results]  # raises what a job raised
            launched += blocks
        return values


ConfigStore.instance().store(
    group="hydra/sweeper",
    name="harness",
    node={"_target_": "hydra_plugins.harness_sweeper.HarnessSweeper"},
    provider="harness",
)
