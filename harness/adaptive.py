"""When an adaptive study (`study.half_width`) has run enough blocks (DESIGN section 6). Pure functions, no state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from harness.statistics import ADAPTIVE_CONFIDENCE, interval, paired_log_ratios

METRIC = "output_tokens_per_s"  # what the half-width is about
MIN_TRIALS = 5  # fewer agree by chance too often to stop by

Values = Mapping[int, float | None]  # trial number -> the metric's value


def needs_more(
    values: Mapping[str, Values],
    baseline: str,
    versus: Mapping[str, str | None],
    half_width: float,
    *,
    blocks: int,
    max_trials: int,
) -> bool:
    """Should a study that has run ``blocks`` whole blocks run another?

    Until half the width of the 98 % log-ratio interval is at most ``half_width`` for every arm, against ``baseline``
    and against its ``versus``, from at least `MIN_TRIALS` pairs each; never beyond ``max_trials`` blocks.

    ``values``: arm -> `METRIC` by trial. An arm that more blocks cannot help (not run, its speed emulated, no further
    trials planned) is left out by the caller, and no comparison waits for it. Neither does the study wait for a
    comparison that has no pair in `MIN_TRIALS` blocks: one side fails.
    """
    if blocks >= max_trials:
        return False
    if blocks < MIN_TRIALS:
        return True
    for arm, reference in _comparisons(values, baseline, versus):
        logs = paired_log_ratios(values[arm], values[reference])
        if logs and not _settled(logs, half_width):
            return True
    return False


def _settled(logs: list[float], half_width: float) -> bool:
    bounds = interval(logs, ADAPTIVE_CONFIDENCE)
    return len(logs) >= MIN_TRIALS and bounds is not None and (bounds[1] - bounds[0]) / 2 <= half_width


def _comparisons(
    values: Mapping[str, Values], baseline: str, versus: Mapping[str, str | None]
) -> Iterator[tuple[str, str]]:
    for arm in values:
        for reference in {baseline: None, versus.get(arm): None}:
            if reference is not None and reference != arm and reference in values:
                yield arm, reference
