"""What several rooms' tests share: the real model, a fixed number of threads, and Ctrl-C as a terminal has it."""

from __future__ import annotations

import importlib.util
import os
import signal
from contextlib import suppress
from pathlib import Path

# Waiting threads that spin starve each other when tests share the cores; read once, when torch loads its OpenMP.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import case_scripts
import pytest
import torch
import yaml

from impls.models.errors import ModelError
from impls.models.source import ModelSource, open_model

with suppress(ImportError):  # a GPU machine may come without it (scripts/gpu_check.sh)
    from hypothesis import settings

    settings.register_profile("repeatable", derandomize=True, deadline=None)  # a busy machine fails nobody
    settings.load_profile("repeatable")

MODEL_CONFIGS = Path(__file__).parents[1] / "conf" / "model"

# A shell ignores it in what it runs in the background, and the processes that are started here would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

torch.set_num_threads(2)  # small tensors: more threads only slow a large machine down


@pytest.hookimpl(optionalhook=True)  # a GPU machine may come without xdist (scripts/gpu_check.sh)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Several workers for the whole suite; none for a file or folder that is named, be it a benchmark."""
    return 0 if config.args_source is pytest.Config.ArgsSource.ARGS else min(4, os.cpu_count() or 1)


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> dict[str, str]:
    """Of the cases in the module's SCRIPT, which wants Triton."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed here")
    return case_scripts.outcomes(request.module.SCRIPT)


@pytest.fixture(scope="session")
def real_model() -> ModelSource:
    """SmolLM2-135M-Instruct from the user's cache, downloaded there once."""
    try:
        return open_model(yaml.safe_load((MODEL_CONFIGS / "smollm2_135m.yaml").read_text()))
    except ModelError as error:
        if not str(error).startswith("cannot fetch model"):
            raise
        pytest.skip(f"no real model: {error}")
