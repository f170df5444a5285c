"""Which steps of a trial are run again, and with what."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest

from harness.driven import Driven
from harness.telemetry.excerpt import Excerpt, excerpt
from impls.request import Request, SamplingParams


def steps_of(prefill_tokens: list[int]) -> pd.DataFrame:
    """One a second."""
    starts = [float(i) for i in range(len(prefill_tokens))]
    return pd.DataFrame({"start_s": starts, "prefill_tokens": pd.array(prefill_tokens, "Int64")})


def row(scheduled_s: float | None, times: list[float], tokens: list[int], finished_s: float | None) -> dict[str, Any]:
    ids = list(range(100, 100 + sum(tokens)))
    return {
        **{"scheduled_s": scheduled_s, "finished_s": finished_s, "output_token_ids": ids},
        **{"emission_times_s": times, "emission_tokens": tokens},
    }


def excerpt_of(prefill_tokens: list[int], rows: list[dict[str, Any]], count: int, at: float) -> Excerpt | None:
    sent = [Request(f"r{i}", (1, 2, 3), SamplingParams(max_tokens=10)) for i in range(len(rows))]
    names = ["scheduled_s", "finished_s", "output_token_ids", "emission_times_s", "emission_tokens"]
    table = pd.DataFrame(rows, columns=names).astype({"scheduled_s": float, "finished_s": float})
    return excerpt(Driven(sent, table, steps_of(prefill_tokens)), count=count, at=at)


@pytest.mark.parametrize(
    ("at", "count", "first"),
    [
        (0.5, 4, 3),  # the prompt of step 5
        (0.8, 4, 6),  # that of step 8, and as many steps as there are after it
        (0.0, 4, 0),  # that of step 0
        (1.0, 2, 7),
        (0.5, 99, 0),  # all there are
        (0.5, 1, 5),
    ],
)
def test_the_steps_lie_around_the_prompt_that_is_nearest(at: float, count: int, first: int) -> None:
    found = excerpt_of([5, 0, 0, 0, 0, 5, 0, 0, 5, 0], [], count, at)
    assert found is not None
    assert (found.first, found.count) == (first, min(count, 10))


def test_requests_stand_as_they_did() -> None:
    rows = [
        row(0.0, [0.5, 1.5, 2.5], [1, 2, 1], 2.5),  # over before step 3
        row(0.0, [0.5, 1.5, 3.5, 4.5], [1, 2, 3, 4], 4.5),  # has yielded 3 tokens by then
        row(2.0, [], [], 9.0),  # has yielded nothing
        row(3.0, [3.5], [1], 6.0),  # joins in the first of the steps
        row(5.0, [5.5], [1], 6.0),
        row(7.0, [7.5], [1], 8.0),  # joins after them
        row(None, [], [], 3.5),  # was rejected
    ]
    found = excerpt_of([5, 0, 5, 5, 0, 5, 0, 5, 0], rows, 3, 3.9 / 8)
    assert found is not None and found.first == 2
    found = excerpt_of([5, 0, 0, 0, 5, 5, 0, 0, 0], rows, 3, 0.5)
    assert found is not None and found.first == 3
    assert [(r.request_id, r.prompt_token_ids, r.sampling.max_tokens) for r in found.running] == [
        ("r1", (1, 2, 3, 100, 101), 8),  # computing these yields the third
        ("r2", (1, 2, 3), 10),
    ]
    assert {step: [r.request_id for r in joining] for step, joining in found.joining.items()} == {0: ["r3"], 2: ["r4"]}
    assert found.joining[0][0].prompt_token_ids == (1, 2, 3)


def test_a_trial_without_a_step_has_none() -> None:
    assert excerpt_of([], [], 4, 0.5) is None
