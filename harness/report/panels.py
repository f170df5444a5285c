"""Figures of one panel per arm above one another, on one time axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from harness.report.data import Arm, Report
from harness.report.parts import label

MAX_PANELS = 12
TITLE_PX, BOTTOM_PX = 26, 44


@dataclass(frozen=True)
class Panel:
    """``rows``: slots that its occupancy shows; None where the arm shows no slots."""

    arm: Arm
    height_px: int


def panel_arms(report: Report) -> tuple[list[Arm], int]:
    """The arms with a timeline, at most `MAX_PANELS`, and how many there are."""
    ran = [arm for arm in report.arms if arm.shown is not None]
    return ran[:MAX_PANELS], len(ran)


def time_range(arms: Sequence[Arm]) -> list[float]:
    """From 0 to the end of the longest arm; one whose speed is emulated does not stretch the others' axis."""
    ends = {arm.name: float(arm.shown.steps["end_s"].max()) for arm in arms if arm.shown is not None}
    counted = [ends[arm.name] for arm in arms if arm.name in ends and not arm.emulated] or list(ends.values())
    return [0.0, round(max(counted, default=1.0), 3)]


def stack(panels: Sequence[Panel], titles: Sequence[str], span: Sequence[float]) -> tuple[dict[str, Any], int]:
    """Layout and total height in px: panel i has y axis i + 1 (the first is "y") under a title of its own."""
    inner = sum(panel.height_px + TITLE_PX for panel in panels)
    layout: dict[str, Any] = {
        "margin": {"l": 58, "r": 12, "t": 4, "b": BOTTOM_PX},
        "xaxis": {
            "range": list(span),
            "title": {"text": "time since the run's start (s)"},
            "anchor": axis_name(len(panels) - 1),
            "showline": True,
        },
        "annotations": [],
    }
    top = float(inner)
    for index, (panel, title) in enumerate(zip(panels, titles, strict=True)):
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
        layout[axis_key(index)] = {"domain": [max(0.0, (top - panel.height_px) / inner), top / inner], "anchor": "x"}
        top -= panel.height_px
    return layout, inner + BOTTOM_PX + 4


def axis_name(index: int) -> str:
    return "y" if index == 0 else f"y{index + 1}"


def axis_key(index: int) -> str:
    return "yaxis" if index == 0 else f"yaxis{index + 1}"


def panel_title(arm: Arm, *facts: str) -> str:
    status = "" if arm.shown is None or arm.shown.run["status"] == "ok" else label(arm.shown.run["status"])
    return " \u00b7 ".join(["<b>" + label(arm.name, 40) + "</b>", *filter(None, (status, *facts))])


def which_trials(arms: Sequence[Arm], total: int) -> str:
    """For a caption: whose timelines these are."""
    numbers = sorted({arm.shown.run["trial"] for arm in arms if arm.shown is not None})
    trials = f"Trial {', '.join(map(str, numbers))}" if numbers else "No trial"
    return trials + (f"; the first {len(arms)} of {total} arms" if len(arms) < total else "") + "."
