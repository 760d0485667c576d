"""The committed plots show the tables beside them (``python benchmarks/plot.py`` draws them)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def plotting(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import plot

    return plot


def test_every_plot_shows_its_table(plotting: Any) -> None:
    stale = [plot.file for plot in plotting.PLOTS if plot.mark() not in plot.path.read_text(encoding="utf-8")]
    assert not stale, "run python benchmarks/plot.py"


def test_every_plot_of_the_pages_on_speed_errors_and_algorithms_is_drawn_from_a_table(plotting: Any) -> None:
    shown = {
        (page.relative_to(plotting.PAGES).as_posix(), image)
        for pattern in ("speed*.md", "fp8.md", "algorithms/*.md")
        for page in plotting.PAGES.glob(pattern)
        for image in re.findall(r"^!\[[^]]+\]\((\S+)\)", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    }
    assert shown == {(plot.page, plot.file) for plot in plotting.PLOTS}


def test_the_axes_of_the_roofline_show_every_point(plotting: Any) -> None:
    import plot_algorithms

    (plot,) = (plot for plot in plotting.PLOTS if plot.file == "roofline.svg")
    for column, (low, high) in (("FLOP/byte", plot_algorithms.INTENSITIES), ("TFLOP/s", plot_algorithms.RATES)):
        outside = [row["algorithm"] for row in plot.table().rows if not low < float(row[column]) < high]
        assert not outside, f"widen the axis of {column}"


def test_a_changed_figure_needs_another_plot(plotting: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    page = plotting.PAGES / "speed.md"
    (plot,) = (plot for plot in plotting.PLOTS if plot.page == page.name)
    before = plot.mark()
    text = page.read_text(encoding="utf-8")
    cell: Any = re.search(r"\| 1\.15 \|", text)
    (tmp_path / page.name).write_text(text[: cell.start()] + "| 1.16 |" + text[cell.end() :], encoding="utf-8")
    monkeypatch.setattr(plotting, "PAGES", tmp_path)
    assert plot.mark() != before
