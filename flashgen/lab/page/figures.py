"""What the page shows of measurements: plots of timings, and the roofline."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from flashgen.common.html import markup, table
from flashgen.lab.page.drawings.plots import COLORS, Series, line_plot, roofline_plot, significant
from flashgen.lab.page.measurements import Bench, BenchRow, Roofline, RooflineKernel

_HEADS = ("algorithm", "length", "batch", "heads", "ms", "TFLOP/s", "peak bytes")
_BOUNDS = {"copy": "copies", "matrix": "matrix products", "exp": "exponentials"}


def bench_section(bench: Bench) -> dict[str, Any]:
    """Plots and a table for each pass, dtype, head dimension and mask."""
    groups: dict[tuple[str, str, int, bool], list[BenchRow]] = defaultdict(list)
    for row in bench.rows:
        groups[row.pass_, row.dtype, row.head_dim, row.causal].append(row)
    colors = {name: number for number, name in enumerate(dict.fromkeys(row.algorithm for row in bench.rows))}
    return {
        "device": bench.device,
        "groups": [
            {
                "title": f"{pass_}, {dtype}, head dimension {head_dim}, {'causal' if causal else 'full'}",
                "legend": _legend(rows, colors),
                "plots": _plots(rows, colors),
                "table": Markup(markup(table(_HEADS, map(_cells, rows)))),
            }
            for (pass_, dtype, head_dim, causal), rows in groups.items()
        ],
    }


def _legend(rows: Sequence[BenchRow], colors: dict[str, int]) -> list[dict[str, Any]]:
    peers = {row.algorithm: row.peer for row in rows}
    return [{"name": name, "color": colors[name] % COLORS, "dashed": peer} for name, peer in peers.items()]


def _plots(rows: Sequence[BenchRow], colors: dict[str, int]) -> list[Markup]:
    drawings = (
        line_plot(_series(rows, colors, "ms"), "length", "ms", log_y=True),
        line_plot(_series(rows, colors, "tflops"), "length", "TFLOP/s", log_y=False),
        line_plot(_series([row for row in rows if row.bytes], colors, "mebibytes"), "length", "MiB", log_y=True),
    )
    return [Markup(markup(drawing)) for drawing in drawings]


def _series(rows: Sequence[BenchRow], colors: dict[str, int], value: str) -> list[Series]:
    lines: dict[tuple[str, bool], list[tuple[float, float]]] = defaultdict(list)
    for row in rows:
        lines[row.algorithm, row.peer].append((float(row.len), float(getattr(row, value))))
    return [Series(name, tuple(sorted(points)), colors[name], dashed=peer) for (name, peer), points in lines.items()]


def _cells(row: BenchRow) -> tuple[str, ...]:
    numbers = f"{row.len:,}", f"{row.batch:,}", f"{row.heads:,}", significant(row.ms), significant(row.tflops)
    return row.algorithm, *numbers, f"{row.bytes:,}" if row.bytes else "-"


def roofline_section(roofline: Roofline) -> dict[str, Any]:
    """The plot, and which ceiling binds each kernel, in a sentence."""
    ceilings = roofline.ceilings
    points = [Series(k.name, ((k.intensity, k.tflops),), number) for number, k in enumerate(roofline.kernels)]
    return {
        "device": roofline.device,
        "ceilings": (
            f"copies {significant(ceilings.copy_gbps)} GB/s, matrix products "
            f"{significant(ceilings.matrix_tflops)} TFLOP/s, exponentials {significant(ceilings.exp_gops)} billion/s"
        ),
        "plot": Markup(markup(roofline_plot(ceilings.copy_gbps, ceilings.matrix_tflops, points))),
        "legend": [{"name": point.name, "color": point.color % COLORS} for point in points],
        "sentences": [_sentence(kernel) for kernel in roofline.kernels],
    }


def _sentence(kernel: RooflineKernel) -> str:
    return (
        f"{kernel.name} reaches {significant(kernel.tflops)} TFLOP/s at {significant(kernel.intensity)} FLOP per byte; "
        f"{_BOUNDS[kernel.bound]} bind it."
    )
