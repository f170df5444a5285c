from __future__ import annotations

import pandas as pd
import pytest

from harness.launches import launch_notes


def steps(*kinds: tuple[int, int]) -> pd.DataFrame:
    """(prefill_tokens, replayed) of each."""
    return pd.DataFrame(kinds, columns=["prefill_tokens", "replayed"], dtype="Int64")


def notes(execution: str, proposer: str, table: pd.DataFrame, speculation: bool = True) -> list[str]:
    return launch_notes({"execution": {"name": execution}, "proposer": {"name": proposer}}, table, speculation)


def test_decode_steps_that_no_graph_replayed_are_counted():
    table = steps((40, 0), (0, 1), (0, 0), (3, 0), (0, 1))
    told = ["CUDA graphs replayed 2 of 3 decode steps; the others ran eagerly"]
    assert notes("cuda_graph", "ngram", table) == told
    assert notes("eager", "ngram", table) == []


def test_nothing_is_told_where_all_were_replayed():
    assert notes("cuda_graph", "ngram", steps((40, 0), (0, 1), (0, 1))) == []
    assert notes("cuda_graph", "ngram", steps()) == []


@pytest.mark.parametrize(
    ("execution", "proposer", "told"),
    [
        ("cuda_graph", "eagle", True),
        ("cuda_graph", "layer_skip", True),
        ("cuda_graph", "draft_model", False),  # its steps are captured as the target's are
        ("compiled", "medusa", True),
        ("compiled", "layer_skip", False),  # compiled when it is first asked for, which is in the warm-up
        ("eager", "eagle", False),
    ],
)
def test_drafting_that_is_launched_otherwise_is_named(execution, proposer, told):
    found = notes(execution, proposer, steps((0, 1)))
    line = f"execution={execution} launches the target's steps: those of proposer={proposer} ran eagerly"
    assert found == ([line] if told else [])
    assert notes(execution, proposer, steps((0, 1)), speculation=False) == []
