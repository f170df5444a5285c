"""What the browser's tests do with an open report, and where they look."""

from __future__ import annotations

from pathlib import Path

from browser import Page

ALL_DRAWN = "document.querySelectorAll('.chart').length === document.querySelectorAll('.chart[data-drawn]').length"
TALL_PX = 9000  # higher than any page here: everything is near, so everything is drawn
COMPARED = """[...document.querySelectorAll("table.verdict tbody tr")].map(r => r.cells[2])
  .map(c => c && ({...c.dataset, text: c.textContent}))"""
VISIBLE = """[...document.querySelectorAll('table.verdict tbody tr')].filter(r => r.offsetHeight > 0)
  .map(r => r.querySelector('.name').textContent)"""
PAPERS = "[...document.querySelectorAll('.chart > .plot-container .main-svg:first-child')].map(s => s.style.background)"
CURVES = "document.querySelectorAll('#chart-ttft .scatterlayer .trace').length"


def open_whole(page: Page, run_dir: Path, printed: bool = False) -> None:
    """Every chart of it is drawn, none of them and nothing else complains, and nothing is fetched.

    printed: as for printing, what lies far below too.
    """
    page.requests.clear()
    page.open(run_dir / "report.html", height=TALL_PX)
    if printed:
        page.evaluate("dispatchEvent(new Event('beforeprint'))")
    page.wait_for(ALL_DRAWN, seconds=120 if printed else 45)
    assert page.evaluate("document.documentElement.dataset.problem ?? null") is None
    assert [url for url in page.requests if not url.startswith(("file:", "data:", "blob:"))] == []
    assert page.console == []


def choose(page: Page, baseline: int) -> None:
    page.evaluate(f"""(() => {{ const s = document.querySelector("#compare select"); s.value = "{baseline}";
      s.dispatchEvent(new Event("change", {{bubbles: true}})); }})()""")


def toggle(page: Page, arm: int) -> None:
    page.evaluate(f"document.querySelector('#compare input[value=\"{arm}\"]').click()")
