"""Line plots and the roofline, as SVG."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element

from flashgen.common.html import element
from flashgen.lab.page.drawings.axes import Axis, number

_WIDTH, _HEIGHT = 340.0, 240.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 46.0, 14.0, 26.0, 38.0
#: Classes of the style sheet.
COLORS = 6


@dataclass(frozen=True, slots=True)
class Series:
    """Points that a line connects; the line of a peer is dashed."""

    name: str
    points: tuple[tuple[float, float], ...]
    color: int
    dashed: bool = False


def line_plot(series: Sequence[Series], x_label: str, y_label: str, *, log_y: bool) -> Element:
    """Lines over a length, which is drawn by powers of two."""
    points = [point for line in series for point in line.points]
    x, y = _axes([x for x, _ in points], [y for _, y in points], 2, 10 if log_y else None)
    drawing = _frame(x, y, x_label, y_label)
    for line in series:
        drawing.extend(_line(line, x, y, f"{y_label} at {x_label}"))
    return drawing


def roofline_plot(copy_gbps: float, matrix_tflops: float, points: Sequence[Series]) -> Element:
    """Rates over arithmetic intensity, below the ceilings of copies and of matrix products."""
    ridge = 1000 * matrix_tflops / copy_gbps
    inside = [point for line in points for point in line.points]
    rates = [rate for _, rate in inside]
    x, y = _axes(
        [*(1.5 * i for i, _ in inside), ridge / 8, ridge * 8], [*rates, matrix_tflops, matrix_tflops / 20], 2, 10
    )
    drawing = _frame(x, y, "FLOP per byte", "TFLOP/s")
    # The slope begins where it enters the frame, from the left or from below.
    start = max(x.low, 1000 * y.low / copy_gbps)
    roof = ((start, start * copy_gbps / 1000), (ridge, matrix_tflops), (x.high, matrix_tflops))
    path = " ".join(f"{x.at(i):.1f},{y.at(rate):.1f}" for i, rate in roof)
    drawing.append(element("polyline", class_="roof", points=path))
    for line in points:
        drawing.extend(_line(line, x, y, "TFLOP/s at FLOP per byte"))
    return drawing


def _axes(xs: list[float], ys: list[float], base_x: int, base_y: int | None) -> tuple[Axis, Axis]:
    x = Axis.around(xs, _LEFT, _WIDTH - _RIGHT, base_x)
    return x, Axis.around(ys, _HEIGHT - _BOTTOM, _TOP, base_y)


def _frame(x: Axis, y: Axis, x_label: str, y_label: str) -> Element:
    label = f"{y_label} over {x_label}"
    drawing = element("svg", class_="plot", viewBox=f"0 0 {_WIDTH:.0f} {_HEIGHT:.0f}", role="img", aria_label=label)
    drawing.extend(_grid(x, y))
    drawing.append(element("text", y_label, x=_LEFT - 40, y=14, class_="label"))
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    drawing.append(element("text", x_label, x=middle, y=_HEIGHT - 6, class_="label", text_anchor="middle"))
    return drawing


def _grid(x: Axis, y: Axis) -> Iterator[Element]:
    for tick in y.ticks():
        at = y.at(tick)
        yield element("line", class_="grid", x1=_LEFT, x2=_WIDTH - _RIGHT, y1=at, y2=at)
        yield element("text", number(tick), x=_LEFT - 8, y=at + 4, text_anchor="end")
    for tick in x.ticks():
        at = x.at(tick)
        yield element("line", class_="grid", x1=at, x2=at, y1=_TOP, y2=_HEIGHT - _BOTTOM)
        yield element("text", number(tick), x=at, y=_HEIGHT - _BOTTOM + 16, text_anchor="middle")


def _line(line: Series, x: Axis, y: Axis, what: str) -> Iterator[Element]:
    color = f"series-{line.color % COLORS}"
    places = [(x.at(a), y.at(b)) for a, b in line.points]
    if len(places) > 1:
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in places)
        yield element("polyline", class_=f"{color} dashed" if line.dashed else color, points=path)
    for (a, b), (value_x, value_y) in zip(places, line.points, strict=True):
        title = f"{line.name}: {significant(value_y)} {what.replace(' at ', f' at {value_x:,g} ')}"
        yield element("circle", element("title", title), class_=color, cx=a, cy=b, r=3.5)


def significant(value: float) -> str:
    """A number to three digits, without an exponent."""
    if not value:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{digits}f}"
