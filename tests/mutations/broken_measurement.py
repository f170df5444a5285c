"""The faults of other harnesses (docs/measurement.md, by their numbers there), put into this one."""

from __future__ import annotations

from change import Change

METRICS = "harness/metrics.py"
LATENCIES = "harness/latencies.py"
WINDOW = "harness/window.py"
RECORDER = "harness/recorder.py"
DRIVE = "harness/drive.py"
VALIDITY = "harness/validity.py"
STREAM = "workloads/stream.py"
FAULTS = "harness/test_metrics_faults.py"
DRIVING = "harness/test_faults_driving.py"
TRIAL = "harness/test_faults_trial.py"
COMPARING = "harness/test_faults_comparing.py"
TRAFFIC = "workloads/test_faults_traffic.py"
ENDED = f"{FAULTS}::test_f2_f3_29_and_36_failures_are_inf_so_losing_slow_requests_helps_nobody"
FROM_T0 = f"{FAULTS}::test_9_10_and_14_latency_starts_at_the_intended_arrival_and_lag_is_told"

MEASUREMENT: dict[str, tuple[Change, str]] = {
    "F1: a chunk without a token is the first token": (
        Change(RECORDER, "            if not tokens:\n                continue\n", ""),
        f"{DRIVING}::test_f1_an_emission_without_a_token_is_no_first_token",
    ),
    "F2: a stream that ends early is a success": (
        Change(RECORDER, 'r.finish_reason or "aborted" for r in rows', 'r.finish_reason or "stop" for r in rows'),
        f"{DRIVING}::test_f2_and_46_a_request_whose_end_never_came_is_a_record_and_a_failure",
    ),
    "F3: an error inside a stream is a success": (
        Change(LATENCIES, 'elif reason not in ("length", "stop") or n == 0:', "elif n == 0:"),
        ENDED,
    ),
    "F4: a chunk is a token": (
        Change(LATENCIES, "return np.repeat(gaps / tokens, tokens), gaps", "return gaps, gaps"),
        f"{FAULTS}::test_f4_and_23_a_chunk_is_not_a_token",
    ),
    "F5: nothing finished, and the latency is 0": (
        Change("harness/distribution.py", '"max": None, "n": 0}', '"max": 0.0, "n": 0}'),
        f"{FAULTS}::test_f5_all_failed_is_null_or_inf_never_zero",
    ),
    "F6: the numerator is not trimmed": (
        Change(
            WINDOW, "int(np.asarray(counts, int)[window.holds(np.asarray(times, float))].sum())", "int(sum(counts))"
        ),
        f"{FAULTS}::test_f6_numerator_and_denominator_share_one_window",
    ),
    "F7: constant arrivals are random": (
        Change(
            "workloads/arrivals.py",
            "np.arange(1, n + 1) / self.rate",
            "np.cumsum(rng.standard_exponential(n)) / self.rate",
        ),
        f"{TRAFFIC}::test_f7_constant_is_constant_and_poisson_is_poisson_at_any_rate_and_follows_the_seed",
    ),
    "F8: a late wait makes all that follow late": (
        Change(
            DRIVE,
            "            request = heapq.heappop(pending)[2]\n",
            "            request = heapq.heappop(pending)[2]\n"
            "            late = max(0.0, now - request.arrival_s)\n"
            "            pending = [(due + late, nth, each) for due, nth, each in pending]\n",
        ),
        f"{DRIVING}::test_f8_lateness_of_one_wait_is_not_handed_on_to_the_next",
    ),
    "10: latency starts where the request was sent": (
        Change(LATENCIES, "= times[0] - t0, times[-1] - t0", "= times[0] - scheduled, times[-1] - t0"),
        FROM_T0,
    ),
    "14: the client's lag is not looked at": (
        Change(VALIDITY, "CLIENT_LAG_S = 0.010", "CLIENT_LAG_S = 1e9"),
        FROM_T0,
    ),
    "15: garbage is collected in the window": (
        Change("harness/observe.py", "    gc.disable()\n", ""),
        f"{TRIAL}::test_15_no_garbage_collection_in_the_window_and_again_after_it",
    ),
    "16: every trial has the same traffic": (
        Change("harness/plan.py", "np.random.SeedSequence(seed, spawn_key=(trial,))", "np.random.SeedSequence(seed)"),
        f"{COMPARING}::test_16_trials_of_a_study_never_repeat_their_traffic_and_arms_of_a_block_always_do",
    ),
    "17: the warm-up has measured prompts": (
        Change(STREAM, "self._prompts.warm_up(i, length)", "self._prompts.opening(i, length)"),
        f"{TRAFFIC}::test_17_and_18_warm_up_requests_are_none_of_the_measured_ones",
    ),
    "18: the warm-up is one request, replayed": (
        Change(STREAM, "self._prompts.warm_up(i, length)", "self._prompts.warm_up(0, length)"),
        f"{TRAFFIC}::test_17_and_18_warm_up_requests_are_none_of_the_measured_ones",
    ),
    "24: the first token is a gap": (
        Change(
            LATENCIES,
            "[np.diff(np.asarray(times, float)) for times",
            "[np.diff(np.asarray(times, float), prepend=0.0) for times",
        ),
        f"{FAULTS}::test_24_and_42_the_first_emission_gives_no_gap",
    ),
    "25: a reply without a token is a success": (
        Change(LATENCIES, '("length", "stop") or n == 0:', '("length", "stop"):'),
        f"{FAULTS}::test_25_single_chunk_is_undefined_and_an_empty_reply_is_a_failure",
    ),
    "26: who has no latency is within its limit": (
        Change(
            LATENCIES, 'good = (latencies["outcome"] == "finished").to_numpy()', "good = np.ones(len(latencies), bool)"
        ),
        f"{FAULTS}::test_26_an_undefined_latency_meets_no_slo_by_being_zero",
    ),
    "27: a prompt is shorter than asked": (
        Change(
            "workloads/generate.py",
            "scaled: Lengths = np.clip(np.rint(drawn), 1",
            "scaled: Lengths = np.clip(np.rint(drawn) - 1, 1",
        ),
        f"{TRAFFIC}::test_27_a_prompt_has_exactly_the_tokens_asked_for",
    ),
    "28: ignore_eos is lost": (
        Change("impls/engine.py", "not sampling.ignore_eos and token", "token"),
        f"{TRIAL}::test_28_output_is_as_long_as_was_asked_where_the_end_of_sequence_is_ignored",
    ),
    "29: the survivors speak for the trial": (
        Change(
            "harness/trial_record.py", "if not failed and (finished or not outcomes):", "if finished or not outcomes:"
        ),
        f"{TRIAL}::test_29_and_45_survivors_of_a_failing_trial_do_not_speak_for_it",
    ),
    "30: tokens of who did not finish are dropped": (
        Change(
            METRICS,
            "output_tokens = int(tokens.sum())",
            'output_tokens = int(tokens[latencies["outcome"] == "finished"].sum())',
        ),
        f"{FAULTS}::test_30_tokens_of_unfinished_requests_count_by_their_time",
    ),
    "31: a missing time is 0": (
        Change(
            LATENCIES,
            'values["queueing_s"] = scheduled - t0',
            'values["queueing_s"] = (scheduled if scheduled > 0 else 0) - t0',
        ),
        f"{FAULTS}::test_31_a_missing_time_is_no_time_at_all",
    ),
    "32: telemetry is on a clock of its own": (
        Change("harness/telemetry/sampler.py", "now = self._clock.now()", "now = time.monotonic()"),
        f"{TRIAL}::test_32_and_38_telemetry_and_steps_are_on_one_clock_that_starts_at_the_window",
    ),
    "34: a burst is sent one by one": (
        Change(DRIVE, "while pending and pending[0][0] <= now:", "if pending and pending[0][0] <= now:"),
        f"{DRIVING}::test_34_a_burst_is_submitted_whole_before_its_first_step",
    ),
    "35: what is late is skipped": (
        Change(
            DRIVE,
            "            request = heapq.heappop(pending)[2]\n",
            "            request = heapq.heappop(pending)[2]\n"
            "            if now - request.arrival_s > 0.5:\n"
            "                continue\n",
        ),
        f"{DRIVING}::test_35_a_driver_that_falls_behind_skips_nothing_and_resets_nothing",
    ),
    "36: who failed is in no percentile": (
        Change(
            LATENCIES,
            '("ttft_s", "tpot_s", "e2e_s", "normalized_latency_s"), math.inf)',
            '("ttft_s", "tpot_s", "e2e_s", "normalized_latency_s"), math.nan)',
        ),
        ENDED,
    ),
    "37: all tokens but one are decoded, however many came at first": (
        Change(LATENCIES, "(times[-1] - times[0]) / (n - counts[0])", "(times[-1] - times[0]) / (n - 1)"),
        f"{FAULTS}::test_37_tokens_of_the_first_chunk_are_not_decoded_tokens",
    ),
    "38: energy is that between the nearest samples inside": (
        Change(METRICS, "np.interp(edges, times, values)", "values[np.searchsorted(times, edges)]"),
        f"{FAULTS}::test_38_energy_is_the_counter_at_the_windows_edges",
    ),
    "38: a counter that began anew is energy": (
        Change(METRICS, "(np.diff(values[first : last + 1]) < 0).any()", "False"),
        f"{FAULTS}::test_38_a_counter_that_began_anew_in_the_window_counts_nothing",
    ),
    "39: percentiles are interpolated": (
        Change(
            "harness/distribution.py",
            "float(ordered[max(0, -(-percent * len(ordered) // 100) - 1)])",
            "float(np.percentile(ordered, percent))",
        ),
        f"{FAULTS}::test_39_none_one_two_and_equal_values",
    ),
    "40: twice as many in flight": (
        Change(
            STREAM,
            "return [self._start_session(float(arrival)) for arrival in self.plan.arrivals_s]",
            "return [self._start_session(float(arrival)) for arrival in [*self.plan.arrivals_s] * 2]",
        ),
        f"{DRIVING}::test_40_as_many_in_flight_as_were_asked_for",
    ),
    "41: sessions leak into the next run": (
        Change(
            STREAM,
            "        self._in_flight.clear()\n        self._next_session, self.last_arrival_s = 0, 0.0\n",
            "        self.last_arrival_s = 0.0\n",
        ),
        f"{TRAFFIC}::test_41_nothing_of_one_run_is_left_for_the_next",
    ),
    "43: every limit is one on TTFT": (
        Change(LATENCIES, "latencies[name].to_numpy(float) > bound", 'latencies["ttft_s"].to_numpy(float) > bound'),
        f"{FAULTS}::test_43_an_slo_bounds_the_metric_that_it_names",
    ),
    "44: repetitive output is no warning": (
        Change(VALIDITY, "    if speculation:\n        found +=", "    if not speculation:\n        found +="),
        f"{FAULTS}::test_44_repetitive_output_is_flagged_in_a_speculation_arm_only",
    ),
    "47: shapes are compiled in the window": (
        Change("harness/warm_up.py", "    _warm_up_shapes(engine)\n    collections", "    collections"),
        f"{TRIAL}::test_47_every_shape_has_run_before_the_window_opens",
    ),
    "48: trials are compared as they come, not by number": (
        Change(
            "harness/statistics.py",
            "        ours, theirs = arm[trial], reference[trial]\n",
            "        ours, theirs = arm[trial], next(iter(reference.values()))\n",
        ),
        f"{COMPARING}::test_48_what_a_machine_does_to_a_whole_block_is_no_difference_between_arms",
    ),
    "48: what ran first runs first again": (
        Change("harness/plan.py", "for name in reversed(order[-1])", "for name in order[-1]"),
        f"{COMPARING}::test_48_base_and_head_run_in_every_block_and_neither_is_always_first",
    ),
}
