"""A worker on a host of its own, with its own network and a clock that is a day ahead; and that host's end."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from joiners import ROOT, SECRET, free_port, joiner
from other_host import OtherHost, other_host
from topology_runs import ARM, Run, config_of, requests_of, run, target_of

from harness.records import read_trial
from impls.topology import meeting
from impls.topology.meeting import KEY

REQUESTS = requests_of(10)
PAIR = ("topology=disaggregated", "topology.transfer=distributed")


@pytest.fixture(scope="module")
def over_there() -> Iterator[OtherHost]:
    with other_host() as found:
        yield found


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY, SECRET)


@pytest.mark.parametrize(
    ("worker", "overrides"),
    [
        ("decode0", PAIR),
        pytest.param("prefill0", PAIR, marks=pytest.mark.slow),
        pytest.param("replica1", ("topology=replicas",), marks=pytest.mark.slow),
    ],
)
def test_tokens_are_those_of_one_host_and_all_times_are_the_runs(
    tmp_path: Path, over_there: OtherHost, worker: str, overrides: tuple[str, ...]
) -> None:
    address = f"{over_there.here}:{free_port(over_there.here)}"
    alone = run(target_of(config_of()), REQUESTS)
    with joiner(tmp_path, address, worker, "--once", by=over_there.by) as started:
        target = target_of(config_of(*overrides, f"topology.remote=[{worker}]", f"topology.listen={address}"))
        try:
            target.clock.restart()
            found = run(target, REQUESTS)
            ended = target.clock.now()
            assert 0 < target.clock_errors()[worker] < 0.1
        finally:
            target.close()
        assert started.process.wait(20) == 0
    assert found.tokens == alone.tokens and found.ends == alone.ends
    assert worker in {stats.worker for stats in found.steps}
    for times in found.times.values():
        assert times == sorted(times) and times[0] > 0 and times[-1] < ended
    for stats in found.steps:
        assert 0 <= stats.start_s <= stats.end_s < ended
    if worker == "decode0":
        taken = {name: stats.start_s for stats in found.steps for name in stats.transfers}
        assert all(found.times[name][0] < begun for name, begun in taken.items()), "fetched before it was computed"


@pytest.mark.slow
def test_a_host_that_vanishes_is_noticed_and_its_requests_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "SILENT_S", 3)  # of this side
    with other_host() as lost:
        address = f"{lost.here}:{free_port(lost.here)}"
        with joiner(tmp_path, address, "decode0", by=lost.by) as started:
            target = target_of(config_of(*PAIR, "topology.remote=[decode0]", f"topology.listen={address}"))
            unplugged: list[float] = []

            def unplug(so_far: Run) -> None:
                if not unplugged and sum(map(len, so_far.tokens.values())) >= 40:
                    lost.unplug()
                    unplugged.append(time.monotonic())

            try:
                found = run(target, requests_of(20, output=60), unplug)
                assert unplugged and time.monotonic() - unplugged[0] < 15
                assert len(found.ends) == 20 and set(found.ends.values()) <= {"error", "length"} and found.errors
                why = "worker decode0 was lost, on another host: Connection timed out"
                assert any(error == why for error in found.errors.values())
            finally:
                target.close()
            started.waits_for("the worker has ended")  # which has heard nothing either


@pytest.mark.slow
def test_the_record_of_a_trial_over_two_hosts(tmp_path: Path, over_there: OtherHost) -> None:
    """By the command itself: trials are forked from a server that has the environment of when it was started."""
    address = f"{over_there.here}:{free_port(over_there.here)}"
    command = [*ARM, *PAIR, "topology.remote=[decode0]", f"topology.listen={address}", f"run_dir={tmp_path / 'run'}"]
    with joiner(tmp_path, address, "decode0", by=over_there.by):
        environment = {**os.environ, "TMPDIR": str(tmp_path)}
        subprocess.run([sys.executable, "-m", "harness", *command], cwd=ROOT, env=environment, check=True, timeout=300)
    record = read_trial(tmp_path / "run/single/0")
    run, requests, metrics = record.run, record.requests, record.run["metrics"]
    assert (requests["output_tokens"] == 12).all() and set(record.steps["worker"]) == {"prefill0", "decode0"}
    assert metrics["kv_transfer_bytes"] > 0 and metrics["peak_memory_bytes"] > 3 * 100e6
    assert metrics["mfu"] is None and run["limits"]["source"] == "unknown"
    (worker,) = run["provenance"]["workers"].items()
    assert worker[0] == "decode0" and worker[1]["hardware"]["threads"] == 1 and worker[1]["versions"]["torch"]
    assert 0 < worker[1]["clock_error_s"] < 0.1
    notes = [note.split(":")[0] for note in run["validity"]]
    assert "network bandwidth between hosts" in notes and "other hosts" in notes
    assert (requests["first_token_s"] < requests["finished_s"]).all() and (requests["finished_s"] < 1000).all()
