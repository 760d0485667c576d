"""The roofline as a plot."""

from __future__ import annotations

from pathlib import Path

from flashgen.lab.plotting import figure, save
from flashgen.lab.roofline.points import Measured


def draw(measured: Measured, path: Path) -> Path:
    """Ceilings as lines, kernels as points, both axes logarithmic."""
    made = figure(9, 6)
    axes = made.subplots()
    c = measured.ceilings
    ridge = 1e3 * c.matrix_tflops / c.copy_gbps
    intensities = [point.intensity for point in measured.points]
    low, high = min([ridge / 8, *intensities]) / 2, max([ridge * 8, *intensities]) * 2
    rates = [min(c.matrix_tflops, x * c.copy_gbps / 1e3) for x in (low, ridge, high)]
    axes.plot(
        [low, ridge, high], rates, "k-", label=f"copy {c.copy_gbps:.0f} GB/s, products {c.matrix_tflops:.0f} TFLOP/s"
    )
    markers = {"copy": "v", "matrix": "s", "exp": "o"}
    for point in measured.points:
        axes.plot([point.intensity], [point.tflops], markers[point.bound], label=f"{point.name} ({point.bound})")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("FLOP per byte of device memory")
    axes.set_ylabel("TFLOP/s")
    axes.set_title(measured.device)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="x-small")
    return save(made, path)
