"""The tokens of measured arms that drafted: what their chart says adds up to what their requests got."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.report.charts import speculation
from harness.report.data import Report, load

RECORDS = Path(__file__).parents[2] / "results" / "reference" / "cpu" / "sampling"


@pytest.fixture(scope="module")
def report() -> Report:
    return load(RECORDS)


def test_accepted_and_own_are_all_tokens_that_the_requests_got(report: Report) -> None:
    table = speculation.chart(report).table
    assert len(table.rows) > 1
    for row in table.rows:
        said = dict(zip(table.columns, (cell.value for cell in row), strict=True))
        requests = [trial.requests for trial in report.record.of_arm(row[0].text)]
        drafted, accepted, tokens = (
            sum(int(each[name].sum()) for each in requests)
            for name in ("draft_tokens", "accepted_tokens", "output_tokens")
        )
        assert len(requests) > 1 and 0 < accepted < drafted
        assert (said["drafted (all trials)"], said["accepted"]) == (drafted, accepted)
        assert (said["accepted"] + said["the target's own"]) == tokens


def test_a_sequence_gets_one_own_token_in_a_step(report: Report) -> None:
    """So an emission of k tokens is k - 1 accepted drafts and it, unless a stop token among the drafts was the last."""
    for trial in report.record.trials:
        steps, requests = trial.steps, trial.requests
        emissions = sum(map(len, requests["emission_times_s"]))
        stopped = int((requests["finish_reason"] == "stop").sum())
        own = int((steps["emitted_tokens"] - steps["accepted_tokens"]).sum())
        assert emissions - stopped <= own <= emissions
