"""The shared-memory map of a kernel, to scale: the whole width is what a block may have."""

from __future__ import annotations

from collections.abc import Iterable
from xml.etree.ElementTree import Element

from flashgen.common.html import element
from flashgen.plan.model.parts import SmemRegion
from flashgen.plan.model.plans import KernelPlan

_WIDTH, _LANE, _GAP = 760.0, 34.0, 4.0
#: Of a letter, about; a name that does not fit stays in the table.
_LETTER = 8.0
#: Classes of the style sheet. The same operand has the same color in every kernel.
_COLORS = ("q", "k", "v", "o", "do", "ds", "p", "dq")


def smem_map(kernel: KernelPlan) -> Element:
    """The regions along their offsets; those of a later phase that take over space lie in a lane below."""
    limit = max(kernel.arch.max_smem_per_block, kernel.smem.bytes)
    lanes = _lanes(kernel.smem.regions)
    height = len(lanes) * (_LANE + _GAP) + 20
    drawing = element(
        "svg",
        class_="smem",
        viewBox=f"0 0 {_WIDTH:.0f} {height:.0f}",
        role="img",
        aria_label=f"Shared memory of {kernel.name}: {kernel.smem.bytes} of {limit} bytes: {kernel.smem.sizes}",
    )
    for number, lane in enumerate(lanes):
        y = number * (_LANE + _GAP)
        drawing.append(element("rect", class_="room", x=0, y=y, width=_WIDTH, height=_LANE))
        drawing.extend(_region(region, y, _WIDTH / limit) for region in lane)
    drawing.extend(_scale(limit, height))
    return drawing


def _lanes(regions: Iterable[SmemRegion]) -> list[list[SmemRegion]]:
    lanes: list[list[SmemRegion]] = []
    for region in regions:
        free = (lane for lane in lanes if not any(_overlap(region, other) for other in lane))
        lane = next(free, None)
        if lane is None:
            lanes.append([region])
        else:
            lane.append(region)
    return lanes


def _overlap(one: SmemRegion, other: SmemRegion) -> bool:
    return one.offset < other.offset + other.bytes and other.offset < one.offset + one.bytes


def _region(region: SmemRegion, y: float, scale: float) -> Element:
    x, width = region.offset * scale, region.bytes * scale
    last = region.offset + region.bytes - 1
    note = f": {region.note}" if region.note else ""
    title = f"{region.name}, {region.bytes:,} bytes from {region.offset:,} to {last:,}{note}"
    color = region.name if region.name in _COLORS else "other"
    drawn = element("g", element("title", title), class_=f"region region-{color}")
    drawn.append(element("rect", x=x, y=y, width=max(width, 0.6), height=_LANE))
    if width > _LETTER * len(region.name) + 6:
        drawn.append(element("text", region.name, x=x + width / 2, y=y + _LANE / 2 + 4, text_anchor="middle"))
    return drawn


def _scale(limit: int, height: float) -> Iterable[Element]:
    for quarter in range(5):
        anchor = ("start", "middle", "middle", "middle", "end")[quarter]
        text = f"{limit * quarter / 4 / 1024:.0f} KiB"
        yield element("text", text, class_="scale", x=_WIDTH * quarter / 4, y=height - 4, text_anchor=anchor)
