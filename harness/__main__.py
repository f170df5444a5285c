"""The application: composes and validates every arm, then hands the blocks over to Hydra's launcher.

Exit status: 0 all trials ok or not_run, 1 a trial failed, 2 bad input, 130 interrupted. Output that nobody takes
(`| head`) is left out; the study goes on.
"""

from __future__ import annotations

import signal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends the imports below without a traceback

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig

from harness.block import device_locks, hydra_job
from harness.compose import CONF, quoted
from harness.console import complain, make_console, plan_lines, summary_table, warning_lines
from harness.errors import BadInput, not_allowed
from harness.help import help_text
from harness.records import RecordError
from harness.run_dir import KEPT, open_run, pending_blocks, statuses
from harness.study import Plan, planned_configs
from harness.texts import one_line

HELP_FLAGS = ("-h", "--help")
SHOW_FLAGS = ("--cfg", "-c", "--info", "-i", "--hydra-help", "--version")  # answered by Hydra, nothing is run
MULTIRUN_FLAGS = ("-m", "--multirun")  # what is meant anyway


def main(
    argv: Sequence[str],
    *,
    launch: Callable[[Path, Sequence[str]], None] | None = None,
    finish: Callable[[Path, Plan], list[Path]] | None = None,
) -> int:
    """Run a command line; the exit status. ``launch`` runs the blocks, ``finish`` makes files of the records."""
    if any(flag in HELP_FLAGS for flag in argv):
        print(help_text())
        return 0
    if any(flag.partition("=")[0] in SHOW_FLAGS for flag in argv):
        hand_over(hydra_job, argv)
        return 0
    run_dir: Path | None = None
    try:
        overrides = _overrides(argv)
        with open_run(overrides) as (run_dir, plan):
            console = make_console()
            for line in plan_lines(run_dir, plan):
                console.print(line, markup=False, soft_wrap=True)
            if pending_blocks(run_dir, plan):
                (launch or launch_blocks)(run_dir, [*plan["overrides"], *overrides])
            for path in (finish or finish_study)(run_dir, plan):
                console.print(path, markup=False, soft_wrap=True)
            return exit_status(run_dir, plan)
    except (BadInput, RecordError) as error:  # a table may prove to be corrupt only when it is read
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        complain(f"error: {error}")
        return 2
    except KeyboardInterrupt:
        if run_dir is not None:
            complain(f"interrupted; resume with: python -m harness run_dir={run_dir}")
        return 130


def launch_blocks(run_dir: Path, overrides: Sequence[str], job: Callable[[DictConfig], None] = hydra_job) -> None:
    """Through Hydra's launcher, as the overrides that concern it say; the rest of them is in the plan."""
    launcher = dict.fromkeys(override for override in overrides if override.startswith("hydra"))
    hand_over(job, [*launcher, f"run_dir={quoted(str(run_dir))}"])


def hand_over(job: Callable[[DictConfig], None], arguments: Sequence[str]) -> None:
    """Hydra's own entry point on these arguments; our sweeper finds the plan in `run_dir`."""
    own = sys.argv
    sys.argv = [own[0], *arguments]
    try:
        application: Any = hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")(job)
        application()
    finally:
        sys.argv = own


def finish_study(run_dir: Path, plan: Plan) -> list[Path]:
    """Equivalence of the arms, summary, table and dashboard of what is recorded; returns the files made.

    It computes for seconds to minutes, so it takes its turn as a trial does: nobody measures beside it.
    """
    from harness.equivalence import check_study
    from harness.records import read_run
    from harness.report import build
    from harness.summary import summarize

    devices = {str(arm["config"]["device"]["name"]) for arm in plan["arms"].values()}
    with device_locks(devices, run_dir, complain):
        try:
            versus = {name: arm["versus"] for name, arm in plan["arms"].items()}
            check_study(run_dir, planned_configs(plan), plan["baseline"], versus)
        except (RuntimeError, MemoryError) as error:  # it builds an engine once more; the records stand without it
            complain(f"the arms' tokens could not be compared: {one_line(str(error))}")
        study = read_run(run_dir)  # anew: the comparison wrote into it
        summary = summarize(run_dir, study)
        console = make_console()
        console.print(summary_table(summary))
        for line in warning_lines(summary):
            console.print(line, markup=False, soft_wrap=True)
        build(run_dir, study, summary)
    return [run_dir / "summary.json", run_dir / "report.html"]


def exit_status(run_dir: Path, plan: Plan) -> int:
    """0 if every trial that is due is ok or not_run, else 1."""
    return 0 if all(status in KEPT for status in statuses(run_dir, plan).values()) else 1


def _overrides(argv: Sequence[str]) -> list[str]:
    overrides = [argument for argument in argv if argument not in MULTIRUN_FLAGS]
    for argument in overrides:
        if argument.startswith("-"):
            known = [*HELP_FLAGS, *SHOW_FLAGS, *MULTIRUN_FLAGS]
            raise not_allowed("", argument.partition("=")[0], known, "no such flag; allowed")
    return overrides


if __name__ == "__main__":
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main(sys.argv[1:]))
