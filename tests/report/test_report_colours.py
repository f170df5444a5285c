"""Both themes can be read: text and marks stand out from the page by the ratios that WCAG 2.1 asks for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from browser import Page
from open_report import PAPERS, open_whole

import harness.report

CSS = (Path(harness.report.__file__).parent / "assets" / "report.css").read_text("utf-8")
TEXT = ("ink", "soft", "muted", "better", "worse", "warn")
FAINT = {"prefill", "ahead"}  # areas beside stronger ones, from which they are told below
GROUNDS = {"paper", "free", "grid", "deadback"}  # what marks lie on, what is left of a bar, the ground of a hatching
MARKS = ("used", "dead", *(f"arm{i}" for i in range(7)), *(f"phase{i}" for i in range(6)))


def colours(selector: str) -> dict[str, str]:
    block = CSS[CSS.index(f"{selector} {{") :]
    return dict(re.findall(r"--(\w+): (#[0-9a-f]{6});", block[: block.index("}")]))


THEMES = {"light": colours(":root"), "dark": colours(':root[data-theme="dark"]')}


def luminance(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_contrast_is_that_of_the_standard() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21) and contrast("#777777", "#777777") == 1
    assert contrast("#767676", "#ffffff") == pytest.approx(4.54, abs=0.01)  # the grey that is just dark enough


@pytest.mark.parametrize("theme", THEMES)
def test_text_and_marks_stand_out_from_the_page(theme: str) -> None:
    palette = THEMES[theme]
    for name in TEXT:
        assert contrast(palette[name], palette["paper"]) >= 4.5, name
    for name in MARKS:
        assert contrast(palette[name], palette["paper"]) >= 3, name
    for faint, other in (("prefill", "paper"), ("prefill", "used"), ("prefill", "ahead"), ("ahead", "paper")):
        assert contrast(palette[faint], palette[other]) >= 1.4, (faint, other)


def test_a_system_that_prefers_dark_gets_the_same_colours_as_the_button() -> None:
    assert set(THEMES["dark"]) == set(THEMES["light"])
    assert colours(':root:not([data-theme="light"])') == THEMES["dark"]


# --- charts -----------------------------------------------------------------------------------------------------------

SOURCES = sorted(Path(harness.report.__file__).parent.rglob("*.py"))
TEXTS = """[...document.querySelectorAll(".chart")].flatMap((chart) => [...chart.querySelectorAll("svg text")]
  .filter((text) => text.textContent.trim()).map((text) => [chart.id, getComputedStyle(text).fill]))"""


def test_charts_name_every_colour_and_each_is_one_that_stands_out() -> None:
    known = {re.sub(r"\d", "", name) for name in (*MARKS, *TEXT)} | FAINT | GROUNDS | {"name"}  # in an explanation
    for path in SOURCES:
        source = path.read_text("utf-8")
        assert not re.findall(r"#[0-9a-fA-F]{6}\b|#[0-9a-fA-F]{3}\b|rgba?\(|hsla?\(", source), path.name
        assert set(re.findall(r'"@([a-z]+)', source)) <= known, path.name


@pytest.mark.parametrize("theme", THEMES)
def test_every_text_in_every_chart_can_be_read(page: Page, ladder: Path, theme: str) -> None:
    open_whole(page, ladder)
    page.prefer(theme)
    page.wait_for(f"new Set([...{PAPERS}, getComputedStyle(document.body).backgroundColor]).size === 1")
    found = {(chart, fill) for chart, fill in page.evaluate(TEXTS)}
    assert len({chart for chart, _ in found}) > 8
    for chart, fill in found:
        red, green, blue = (int(part) for part in re.findall(r"\d+", fill)[:3])
        assert contrast(f"#{red:02x}{green:02x}{blue:02x}", THEMES[theme]["paper"]) >= 4.5, (chart, fill)
