"""The recorder: what it refuses, held-back emissions, preemption, KV parts by hand, and what it costs."""

from __future__ import annotations

import gc
import time

import pytest
from golden import request

from harness.recorder import Recorder
from impls.seams import Emission, KVReservation, StepResult, StepStats


def test_ids_are_unique_and_known_and_an_end_is_final() -> None:
    recorder = Recorder()
    recorder.submitted(request("a", 2, 4), 0.0)
    with pytest.raises(ValueError, match="'a' was submitted twice"):  # 41: repeated requests
        recorder.submitted(request("a", 2, 4), 0.0)
    recorder.step(StepResult([Emission("a", (1,), 1.0, "stop")]))
    with pytest.raises(ValueError, match=r"'a' ended twice \(stop, then aborted\)"):
        recorder.aborted("a", 2.0)
    with pytest.raises(ValueError, match="'b' was never submitted"):
        recorder.aborted("b", 2.0)
    recorder.step(StepResult([Emission("a", (2,), 3.0)]))
    with pytest.raises(ValueError, match=r"'a' emitted after its end \(stop\)"):
        recorder.requests()


def test_an_unknown_request_cannot_slip_in() -> None:
    recorder = Recorder()
    recorder.step(StepResult([Emission("ghost", (1,), 1.0)]))
    with pytest.raises(ValueError, match="'ghost' was never submitted"):
        recorder.requests()


def test_an_unended_request_is_aborted_without_an_end() -> None:
    recorder = Recorder()
    recorder.submitted(request("a", 2, 4), 0.5)
    recorder.submitted(request("b", 2, 4), 0.5)
    recorder.step(StepResult([Emission("a", (1,), 1.0)]))
    recorder.aborted("b", 2.0)
    rows = recorder.requests().set_index("request_id")
    assert rows["finish_reason"].tolist() == ["aborted", "aborted"]
    assert rows["finished_s"].isna().tolist() == [True, False]


def test_scheduled_is_the_start_of_the_first_step_that_ran_it() -> None:
    recorder = Recorder()
    recorder.submitted(request("a", 2, 4), 0.0)
    recorder.step(StepResult([], StepStats(0.0, 1.0, scheduled=[])))
    recorder.step(StepResult([], StepStats(1.25, 2.0, scheduled=["a"])))
    recorder.step(StepResult([], StepStats(2.0, 3.0, preempted=1, preempted_ids=["a"])))
    recorder.step(StepResult([], StepStats(3.0, 4.0, scheduled=["a"])))
    row = recorder.requests().iloc[0]
    assert (row["scheduled_s"], row["preemptions"]) == (1.25, 1)


def test_tables_can_be_built_twice() -> None:
    recorder = Recorder()
    recorder.submitted(request("a", 2, 4), 0.0)
    stats = StepStats(0.0, 1.0, scheduled=["a"], drafted={"a": (4, 2)})
    recorder.step(StepResult([Emission("a", (1, 2, 3), 1.0)], stats))
    first, _ = recorder.requests(), recorder.steps()
    assert recorder.requests().equals(first)
    assert first.iloc[0][["output_tokens", "draft_tokens", "accepted_tokens"]].tolist() == [3, 4, 2]


def test_an_empty_run_has_empty_tables() -> None:
    assert len(Recorder().requests()) == len(Recorder().steps()) == 0


def test_held_back_tokens_arrive_once_but_count_where_they_were_made() -> None:
    """emit=batch_end: a yields 3 tokens, b 1 and then lies dead; all are shown when the batch ends."""
    recorder = Recorder()
    for name in ("a", "b"):
        recorder.submitted(request(name, 2, 3), 0.0)
    recorder.step(StepResult([], StepStats(0.0, 1.0, scheduled=["a", "b"])))
    recorder.step(StepResult([], StepStats(1.0, 2.0, scheduled=["a"], dead_rows=1)))
    held = [Emission("a", (1,), 3.0), Emission("b", (9,), 3.0, "length"), Emission("a", (2,), 3.0)]
    last = StepStats(2.0, 3.0, scheduled=["a"], dead_rows=1)
    recorder.step(StepResult([*held, Emission("a", (3,), 3.0, "length")], last))
    rows = recorder.requests().set_index("request_id")
    assert rows.loc["a", "emission_times_s"].tolist() == [3.0] and rows.loc["a", "emission_tokens"].tolist() == [3]
    assert rows.loc["a", "output_token_ids"].tolist() == [1, 2, 3]
    assert recorder.steps()["kept_rows"].tolist() == recorder.steps()["emitted_tokens"].tolist() == [2, 1, 1]


def test_a_step_emitted_what_its_sequences_kept_and_nothing_else_counts() -> None:
    """A stop token that is an accepted draft ends it: 3 accepted, 3 emitted, no bonus; (rows + accepted) would be 4."""
    recorder = Recorder()
    for name in ("a", "b"):
        recorder.submitted(request(name, 2, 9), 0.0)
    first = StepStats(0.0, 1.0, scheduled=["a", "b"])
    recorder.step(StepResult([Emission("a", (1,), 1.0), Emission("b", (1,), 1.0)], first))
    drafting = StepStats(1.0, 2.0, scheduled=["a", "b"], draft_tokens=8, accepted_tokens=4)
    drafting.drafted = {"a": (4, 3), "b": (4, 1)}
    recorder.step(StepResult([Emission("a", (5, 6, 0), 2.0, "stop"), Emission("b", (5, 6), 2.0)], drafting))
    recorder.step(StepResult([Emission("b", (7, 8), 2.5)]))  # with no step of ours
    recorder.step(StepResult([Emission("b", (), 3.0, "error")], StepStats(2.0, 3.0, scheduled=["b"])))
    steps = recorder.steps()
    assert steps["kept_rows"].tolist() == [2, 2, 0] and steps["emitted_tokens"].tolist() == [2, 5, 0]


def test_kv_parts_by_hand() -> None:
    """Paged, blocks of 4, 10 free positions (a remainder of 2). p: 5 in, 6 out; n yields nothing; s holds drafts."""
    recorder = Recorder()
    for name, prompt in (("p", 5), ("n", 3), ("s", 2)):
        recorder.submitted(request(name, prompt, 8), 0.0)
    holds = [
        KVReservation("p", 8, 5, False),  # writes 5 + 6 - 1 = 10 in the end: 3 ahead, none internal
        KVReservation("n", 4, 3, False),  # no output, no length to come: 1 internal
        KVReservation("s", 12, 4, False),  # 2 in, 5 out: writes 6; 2 ahead, 6 internal (room for rejected drafts)
    ]
    stats = StepStats(
        0.0, 1.0, scheduled=["p", "n", "s"], kv_capacity_tokens=34, kv_allocation_unit=4, kv_free_tokens=10
    )
    stats.kv_reservations, stats.waiting = holds, 1
    recorder.step(StepResult([Emission("p", tuple(range(6)), 1.0), Emission("s", tuple(range(5)), 1.0)], stats))
    row = recorder.steps().iloc[0]
    names = ("used", "reserved_ahead", "internal", "unusable", "capacity")
    assert [row[f"kv_{name}_tokens"] for name in names] == [12, 5, 7, 2, 34]


def test_the_parts_always_add_up_to_what_is_reserved() -> None:
    recorder = Recorder()
    recorder.submitted(request("a", 7, 50), 0.0)
    for written in range(7, 57):
        hold = KVReservation("a", -(-written // 16) * 16, written, False)
        stats = StepStats(float(written), written + 1.0, scheduled=["a"], kv_capacity_tokens=64, kv_free_tokens=0)
        stats.kv_reservations = [hold]
        recorder.step(StepResult([Emission("a", (1,), written + 1.0)], stats))
    steps = recorder.steps()
    parts = steps[["kv_used_tokens", "kv_reserved_ahead_tokens", "kv_internal_tokens"]]
    assert (parts >= 0).all().all()
    assert parts.sum(axis=1).tolist() == [-(-written // 16) * 16 for written in range(7, 57)]
    # it writes 7 + 50 - 1 = 56 positions, so only the last block has room that is for nothing: 64 - 56
    assert steps["kv_internal_tokens"].tolist() == [0] * 42 + [8] * 8


def test_a_step_of_32_rows_costs_little() -> None:
    """16 us a step where nothing else runs. The bound is loose for a busy machine: a lookup per row would break it."""
    recorder, ids = Recorder(), [f"r{i}" for i in range(32)]
    for name in ids:
        recorder.submitted(request(name, 64, 999), 0.0)
    costs = []
    gc.disable()
    try:
        for step in range(400):
            stats = StepStats(
                *(float(step), step + 1.0),
                scheduled=ids,
                slot_request_ids=list(ids),
                kv_capacity_tokens=30_000,
                kv_reservations=[KVReservation(name, 512, 64 + step, False) for name in ids],
                query_lens=[1] * 32,
                kv_lens=[64 + step] * 32,
            )
            result = StepResult([Emission(name, (step,), step + 1.0) for name in ids], stats)
            begun = time.perf_counter()
            recorder.step(result)
            costs.append(time.perf_counter() - begun)
    finally:
        gc.enable()
    assert sorted(costs)[40] < 60e-6


def test_a_step_says_how_many_of_its_sequences_drafted_and_how_long_it_attended() -> None:
    recorder = Recorder()
    drafted = {"a": (4, 2), "b": (1, 0)}
    recorder.step(StepResult([], StepStats(0.0, 1.0, drafted=drafted, attention_s=0.25)))
    recorder.step(StepResult([], StepStats(1.0, 2.0)))
    for request_id in drafted:
        recorder.submitted(request(request_id, 2, 9), 0.0)
    steps = recorder.steps()
    assert steps["drafting_sequences"].tolist() == [2, 0]
    assert steps["attention_s"][0] == 0.25 and steps["attention_s"].isna().tolist() == [False, True]
