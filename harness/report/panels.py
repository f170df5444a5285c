"""Figures of one panel per arm above one another, on one time axis."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from harness.records import TrialRecord
from harness.report.data import Arm, Report
from harness.report.parts import label

MAX_PANELS = 12
TITLE_PX, BOTTOM_PX = 26, 44


def panel_arms(
    report: Report, has_something: Callable[[TrialRecord], bool] = lambda trial: True
) -> tuple[list[tuple[Arm, TrialRecord]], int]:
    """The arms whose shown trial has something to draw, at most `MAX_PANELS`, and how many there are."""
    ran = [(arm, arm.shown) for arm in report.arms if arm.shown is not None and has_something(arm.shown)]
    return ran[:MAX_PANELS], len(ran)


def time_range(drawn: Sequence[tuple[Arm, TrialRecord]]) -> list[float]:
    """From 0 to the end of the longest arm; one whose speed is emulated does not stretch the others' axis."""
    ends = [(arm, float(trial.steps["end_s"].max())) for arm, trial in drawn]
    counted = [end for arm, end in ends if not arm.emulated] or [end for _, end in ends]
    return [0.0, round(max(counted, default=1.0), 3)]


def stack(heights_px: Sequence[int], titles: Sequence[str], span: Sequence[float]) -> tuple[dict[str, Any], int]:
    """Layout and total height in px: panel i has y axis i + 1 (the first is "y") under a title of its own."""
    inner = sum(heights_px) + TITLE_PX * len(heights_px)
    layout: dict[str, Any] = {
        "margin": {"l": 58, "r": 12, "t": 4, "b": BOTTOM_PX},
        "xaxis": {
            "range": list(span),
            "title": {"text": "time since the run's start (s)"},
            "anchor": axis_name(len(heights_px) - 1),
            "showline": True,
            "automargin": False,  # charts side by side keep their panels level
        },
        "annotations": [],
    }
    top = float(inner)
    for index, (height_px, title) in enumerate(zip(heights_px, titles, strict=True)):
        top -= TITLE_PX
        layout["annotations"].append(
            {
                "text": title,
                "x": 0,
                "y": top / inner,
                "xref": "paper",
                "yref": "paper",
                "xanchor": "left",
                "yanchor": "bottom",
                "showarrow": False,
            }
        )
        domain = [max(0.0, (top - height_px) / inner), top / inner]
        layout[axis_key(index)] = {"domain": domain, "anchor": "x", "automargin": False}
        top -= height_px
    return layout, inner + BOTTOM_PX + 4


def axis_name(index: int) -> str:
    """What a trace calls the y axis of panel ``index``."""
    return "y" if index == 0 else f"y{index + 1}"


def axis_key(index: int) -> str:
    """What the layout calls it."""
    return "yaxis" if index == 0 else f"yaxis{index + 1}"


def panel_title(arm: Arm, *facts: str) -> str:
    status = "" if arm.shown is None or arm.shown.run["status"] == "ok" else label(arm.shown.run["status"])
    return " \u00b7 ".join(["<b>" + label(arm.name, 40) + "</b>", *filter(None, (status, *facts))])


def which_trials(drawn: Sequence[tuple[Arm, TrialRecord]], total: int) -> str:
    """For a caption: whose timelines these are."""
    numbers = sorted({trial.run["trial"] for _, trial in drawn})
    left_out = f"; the first {len(drawn)} of {total} arms" if len(drawn) < total else ""
    return f"Trial {', '.join(map(str, numbers))}{left_out}."
