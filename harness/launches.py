"""Which of an arm's work was not launched in the way that its `execution` names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

# Of what drafts: a head's own modules are called as they are, and steps of the first layers only are not captured.
EAGER_DRAFTS = {"cuda_graph": ("layer_skip", "eagle", "medusa"), "compiled": ("eagle", "medusa")}


def launch_notes(config: Mapping[str, Any], steps: pd.DataFrame, speculation: bool) -> list[str]:
    """For an arm's resolved config and its steps; what read a prompt is no decode step, and nothing captures that."""
    execution, proposer = config["execution"]["name"], config.get("proposer", {}).get("name")
    found = []
    if execution == "cuda_graph":
        decodes = steps[steps["prefill_tokens"] == 0]
        replayed = int(decodes["replayed"].sum())
        if replayed < len(decodes):
            found.append(f"CUDA graphs replayed {replayed} of {len(decodes)} decode steps; the others ran eagerly")
    if speculation and proposer in EAGER_DRAFTS.get(execution, ()):
        found.append(f"execution={execution} launches the target's steps: those of proposer={proposer} ran eagerly")
    return found
