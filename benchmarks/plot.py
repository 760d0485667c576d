"""Draws the plots of the pages on speed and on algorithms from the tables beside them.

    pip install '.[lab]'
    python benchmarks/plot.py

Each plot holds a checksum of its table, so that a test can tell a plot which is out of date.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plot_algorithms import roofline, times
from plot_table import Row, Table, number

PAGES = Path(__file__).resolve().parents[1] / "docs" / "explanation"
COLORS = {
    "flashgen": "#d62728",
    "cudnn": "#76b900",
    "fa2": "#7f7f7f",
    "fa3": "#1f77b4",
    "fa4": "#9467bd",
    "e4m3": "#d62728",
    "fa3, e4m3": "#1f77b4",
    "bf16": "#ff7f0e",
}


@dataclass(frozen=True)
class Plot:
    """One plot: the page that shows it, its file beside the page, and how its table is drawn."""

    page: str
    file: str
    draw: Callable[[Any, Table], Any]
    #: Another plot whose table this one shows too.
    same_table_as: Plot | None = None

    @property
    def path(self) -> Path:
        """Where the plot is written."""
        return (PAGES / self.page).parent / self.file

    def table(self) -> Table:
        """The first table below the plot."""
        if self.same_table_as is not None:
            return self.same_table_as.table()
        text = (PAGES / self.page).read_text(encoding="utf-8")
        below = text.split(f"]({self.file})", maxsplit=1)[1]
        found = re.search(r"(?:^\|.*\n)+", below, flags=re.MULTILINE)
        if found is None:
            raise ValueError(f"{self.page} has no table below {self.file}")
        head, _, *rows = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in found[0].splitlines()]
        # Where two columns have one name, the second is "name (2)".
        head = [f"{name} (2)" if name in head[:place] else name for place, name in enumerate(head)]
        return Table(head, [dict(zip(head, row, strict=True)) for row in rows])

    def mark(self) -> str:
        """What the file holds if it shows the table as it is now."""
        return f"table {self.table().checksum}"


def rates(names: Sequence[str]) -> Callable[[Any, Table], Any]:
    """A panel for each head dim and mask: TFLOP/s by length."""

    def draw(plt: Any, table: Table) -> Any:
        dims, masks = table.values("D"), table.values("mask")
        figure, axes = plt.subplots(
            len(masks), len(dims), sharex=True, sharey=True, squeeze=False, figsize=(8, 2.4 * len(masks))
        )
        for line, mask in zip(axes, masks, strict=True):
            for axis, dim in zip(line, dims, strict=True):
                rows = [row for row in table.rows if (row["D"], row["mask"]) == (dim, mask)]
                for name in names:
                    values = [number(row[name]) for row in rows]
                    axis.plot([row["S"] for row in rows], values, marker=".", color=COLORS[name], label=name)
                axis.set_title(f"D={dim}, {mask}", fontsize=9)
                axis.tick_params(axis="x", rotation=45)
        axes[0][0].set_ylim(bottom=0)
        figure.supylabel("TFLOP/s", fontsize=9)
        handles, labels = axes[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=len(names), frameon=False, fontsize=9)
        return figure

    return draw


def bars(
    label: Callable[[Row], str], columns: dict[str, str], axis_label: str, line: float | None = 1
) -> Callable[[Any, Table], Any]:
    """A group of horizontal bars for each row, one for each column; ``columns`` gives their names in the legend.

    ``line`` is where a vertical line stands: at the rate of peers, if bars are ratios.
    """

    def draw(plt: Any, table: Table) -> Any:
        count = len(columns)
        figure, axis = plt.subplots(figsize=(8, 0.8 + len(table.rows) * (0.12 + 0.11 * count)))
        for place, (column, name) in enumerate(columns.items()):
            centers = [number_ + (place - (count - 1) / 2) * 0.8 / count for number_ in range(len(table.rows))]
            values = [number(row[column]) for row in table.rows]
            axis.barh(centers, values, height=0.8 / count, label=name)
        axis.set_yticks(range(len(table.rows)), [label(row) for row in table.rows], fontsize=8)
        axis.margins(y=0.01)
        axis.invert_yaxis()
        if line is not None:
            axis.axvline(line, color="black", linewidth=0.8)
        axis.set_xlabel(axis_label, fontsize=9)
        if count > 1:
            figure.legend(loc="outside upper center", ncols=min(count, 6), frameon=False, fontsize=8)
        return figure

    return draw


def points(columns: Sequence[str], axis_label: str) -> Callable[[Any, Table], Any]:
    """A point for each row and column; rows are head dims."""

    def draw(plt: Any, table: Table) -> Any:
        figure, axis = plt.subplots(figsize=(8, 3))
        for row in table.rows:
            values = [number(row[column]) for column in columns]
            axis.plot(columns, values, "o", label=f"D={row['D']}", markersize=5)
        axis.set_ylim(bottom=0)
        axis.set_ylabel(axis_label, fontsize=9)
        axis.legend(frameon=False, fontsize=8)
        return figure

    return draw


def errors(axis_label: str) -> Callable[[Any, Table], Any]:
    """A line for each way of scaling: the error of O by what the first column says."""
    names = {
        "tensor": "a scale for the tensor",
        "head": "for each head",
        "block 128": "for each block of 128 rows",
        "tensor, rotated": "for the tensor, rotated",
        "block 128, rotated": "for each block, rotated",
    }

    def draw(plt: Any, table: Table) -> Any:
        figure, axis = plt.subplots(figsize=(8, 3))
        places = [row[table.columns[0]] for row in table.rows]
        for column, name in names.items():
            style = "--" if column.endswith("rotated") else "-"
            axis.plot(places, [number(row[column]) for row in table.rows], style, marker=".", label=name)
        axis.set_yscale("log")
        axis.set_xlabel(axis_label, fontsize=9)
        axis.set_ylabel("RMSE of O", fontsize=9)
        axis.legend(frameon=False, fontsize=8)
        return figure

    return draw


def means(plt: Any, table: Table) -> Any:
    """Rates with ``deterministic=True`` by mask and length: each figure of a cell is a point."""
    figure, axis = plt.subplots(figsize=(8, 2.6))
    for place, column in enumerate(("first", "second")):
        cells = [(f"{row['mask']}\n{row['S']}", number(text)) for row in table.rows for text in row[column].split(", ")]
        axis.plot(*zip(*cells, strict=True), "o" if place else "x", label=f"{column} machine", markersize=5)
    axis.set_ylim(0.8, 1)
    axis.set_ylabel("rate over the default", fontsize=9)
    axis.legend(frameon=False, fontsize=8)
    return figure


def _problem(row: Row) -> str:
    return f"D={row['D']}, {row['mask']}, {row['S']}"


TIMES = Plot("algorithms/index.md", "times.svg", times())
PLOTS = (
    TIMES,
    *(
        Plot(f"algorithms/{name}.md", f"time-{name}.svg", times(name), same_table_as=TIMES)
        for name in ("standard", "naive", "fa1", "grid1d", "grid2d", "fa2", "fa3")
    ),
    Plot("algorithms/index.md", "roofline.svg", roofline),
    Plot("speed-hopper.md", "speed-hopper-forward.svg", rates(("flashgen", "cudnn", "fa2", "fa3", "fa4"))),
    Plot("speed-hopper.md", "speed-hopper-others.svg", bars(_problem, {"vs the best": ""}, "rate over the best peer")),
    Plot(
        "speed-hopper.md",
        "speed-hopper-callers.svg",
        bars(
            lambda row: f"{row['what']}, D={row['D']}, {row['heads']}, {row['mask']}, {row['sequences']}",
            {"vs the best": ""},
            "rate over the best peer",
        ),
    ),
    Plot(
        "speed-hopper.md",
        "speed-hopper-decode.svg",
        bars(
            lambda row: row["B, heads, D, keys, page"],
            {
                "paged": "flashgen, 16 bits",
                "e4m3": "flashgen, 8 bits",
                "cudnn": "cuDNN",
                "fa3": "FlashAttention-3",
                "fa3, e4m3": "FlashAttention-3, 8 bits",
            },
            "GB/s",
            line=None,
        ),
    ),
    Plot(
        "speed-hopper.md",
        "speed-hopper-latent.svg",
        bars(
            lambda row: row["B, heads, keys, page"],
            {"flashgen": "flashgen", "fa3": "FlashAttention-3"},
            "TB/s",
            line=None,
        ),
    ),
    Plot("speed-hopper.md", "speed-hopper-fp8.svg", rates(("e4m3", "fa3, e4m3", "bf16"))),
    Plot("speed-hopper.md", "speed-hopper-backward.svg", rates(("flashgen", "cudnn", "fa2", "fa4"))),
    Plot("speed-hopper.md", "speed-hopper-deterministic.svg", means),
    Plot(
        "speed-hopper.md",
        "speed-hopper-memory.svg",
        points(
            ("full 512", "full 4096", "full 16384", "causal 512", "causal 4096", "causal 16384"),
            "sums of dQ of all heads",
        ),
    ),
    Plot("fp8.md", "fp8-lengths.svg", errors("keys, D=128")),
    Plot("fp8.md", "fp8-outliers.svg", errors("size of outliers, D=128 and 4,096 keys")),
    Plot(
        "speed.md",
        "speed.svg",
        bars(lambda row: f"{row['pass']}, {_problem(row)}", {"vs fa2": ""}, "rate over FlashAttention-2"),
    ),
    Plot(
        "speed-masks.md",
        "speed-masks.svg",
        bars(
            lambda row: f"D={row['D']}, {row['S']}, {row['mask or score']}",
            {"ratio": "forward", "ratio (2)": "backward"},
            "time of FlexAttention over that of flashgen",
        ),
    ),
)


def main() -> None:
    """Draw all plots, or those whose files are named."""
    import matplotlib

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", help="which plots; default: all")
    wanted = parser.parse_args().files
    matplotlib.use("svg")
    # Equal tables give equal files: fonts are the reader's, and names inside the file come from a fixed salt.
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "flashgen", "font.size": 8})
    from matplotlib import pyplot

    for plot in PLOTS:
        if wanted and plot.file not in wanted:
            continue
        figure = plot.draw(pyplot, plot.table())
        figure.set_layout_engine("constrained")
        figure.savefig(plot.path, metadata={"Date": None, "Creator": "benchmarks/plot.py", "Description": plot.mark()})
        pyplot.close(figure)
        print(plot.path)


if __name__ == "__main__":
    main()
