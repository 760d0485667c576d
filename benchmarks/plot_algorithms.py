"""How the tables of the pages on algorithms are drawn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from plot_table import Table, number

#: From slowest to fastest, as the pages on algorithms go.
ALGORITHMS = {
    "naive": "#8c564b",
    "math": "#7f7f7f",
    "grid1d": "#bcbd22",
    "grid2d": "#e377c2",
    "standard": "#2ca02c",
    "fa1": "#ff7f0e",
    "fa2": "#1f77b4",
    "fa3": "#d62728",
}
#: What NVIDIA publishes for the H200 (SXM): memory bandwidth, and dense peaks with and without tensor cores.
MEMORY_TBPS, MATRIX_TFLOPS, FP32_TFLOPS = 4.8, 989, 67
#: The axes of the roofline, which all its points lie within: FLOP per byte and TFLOP/s.
INTENSITIES, RATES = (0.003, 1000), (0.03, 3000)
#: Where labels of points that lie close to each other go.
LABEL_OFFSETS = {"fa2": (5, -8), "fa3": (-22, -2), "grid2d": (-34, -3), "standard": (-44, 2), "naive": (-4, 6)}


def tokens(text: str) -> int:
    """A length as tables write it: 512, 4k."""
    return int(text.removesuffix("k")) * (1024 if text.endswith("k") else 1)


def times(highlighted: str = "") -> Callable[[Any, Table], Any]:
    """A panel for each head dim and mask with several lengths: milliseconds of each algorithm, one of them in bold."""

    def draw(plt: Any, table: Table) -> Any:
        groups = [
            (dim, mask, rows)
            for dim in table.values("D")
            for mask in table.values("mask")
            if len(rows := [row for row in table.rows if (row["D"], row["mask"]) == (dim, mask)]) > 1
        ]
        figure, axes = plt.subplots(1, len(groups), sharey=True, figsize=(8, 3.4))
        for axis, (dim, mask, rows) in zip(axes, groups, strict=True):
            lengths = [tokens(row["length"]) for row in rows]
            for name, color in ALGORITHMS.items():
                is_bold = name == highlighted
                axis.plot(
                    lengths,
                    [number(row[name]) for row in rows],
                    marker=".",
                    color=color,
                    label=name,
                    linewidth=3 if is_bold else 1.2,
                    alpha=1 if is_bold or not highlighted else 0.3,
                    zorder=3 if is_bold else 2,
                )
            axis.set_title(f"D={dim}, {mask}", fontsize=9)
            axis.set_xscale("log", base=2)
            axis.set_yscale("log")
            axis.set_xticks(lengths, [row["length"] for row in rows])
            axis.minorticks_off()
            axis.grid(alpha=0.3)
        axes[0].set_ylabel("milliseconds", fontsize=9)
        figure.supxlabel("length", fontsize=9)
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), frameon=False, fontsize=8)
        return figure

    return draw


def roofline(plt: Any, table: Table) -> Any:
    """A panel for each head dim: the rate of each algorithm by its arithmetic intensity, under published ceilings."""
    dims = table.values("D")
    figure, axes = plt.subplots(1, len(dims), sharex=True, sharey=True, figsize=(8, 3.6))
    limits = INTENSITIES
    for axis, dim in zip(axes, dims, strict=True):
        for peak, label in ((MATRIX_TFLOPS, "bf16"), (FP32_TFLOPS, "fp32")):
            ridge = peak / MEMORY_TBPS
            axis.plot((limits[0], ridge, limits[1]), (limits[0] * MEMORY_TBPS, peak, peak), "k-", linewidth=0.8)
            axis.text(limits[1] * 0.8, peak * 1.25, f"{label}: {peak:g} TFLOP/s", fontsize=7, ha="right")
        axis.text(
            0.05, 0.065 * MEMORY_TBPS, f"memory: {MEMORY_TBPS:g} TB/s", fontsize=7, rotation=40, rotation_mode="anchor"
        )
        for row in (row for row in table.rows if row["D"] == dim):
            name, place = row["algorithm"], (number(row["FLOP/byte"]), number(row["TFLOP/s"]))
            axis.plot(*place, "o", color=ALGORITHMS[name], markersize=5)
            axis.annotate(name, place, xytext=LABEL_OFFSETS.get(name, (5, -3)), textcoords="offset points", fontsize=8)
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_xlim(limits)
        axis.minorticks_off()
        axis.set_ylim(RATES)
        axis.set_title(f"D={dim}", fontsize=9)
    axes[0].set_ylabel("TFLOP/s", fontsize=9)
    figure.supxlabel("FLOP per byte of device memory, by the IO model", fontsize=9)
    return figure
