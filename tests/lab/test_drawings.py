"""Drawings are to scale, and notebooks show explanations, plans and kernels."""

from __future__ import annotations

from typing import Any
from xml.etree.ElementTree import Element

import numpy as np
import pytest

import flashgen as fg
from flashgen.common.html import element, markup, table
from flashgen.explanation.svg import Bins, tile_map
from flashgen.lab.page.drawings.smem import smem_map
from flashgen.plan import plan
from tests.lab.test_page import Page


def number(drawn: Element, name: str) -> float:
    return float(str(drawn.get(name)))


def rectangles(drawing: Element, role: str) -> list[Element]:
    return [rect for group in drawing.iter("g") if role in str(group.get("class")) for rect in group.iter("rect")]


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_regions_of_shared_memory_are_to_scale_and_never_overlap(arch: str) -> None:
    kernel = plan(fg.AttentionSpec(128, mask=fg.causal()), None, arch).kernel("forward")
    drawing = smem_map(kernel)
    drawn = rectangles(drawing, "region")
    regions = {region.name: region for region in kernel.smem.regions}
    assert len(drawn) == len(regions)
    scale = 760 / kernel.arch.max_smem_per_block
    for group in (group for group in drawing.iter("g") if "region" in str(group.get("class"))):
        title, rect = str(group.findtext("title")), group.find("rect")
        assert rect is not None
        region = regions[title.partition(",")[0]]
        assert f"{region.bytes:,} bytes from {region.offset:,} to {region.offset + region.bytes - 1:,}" in title
        assert number(rect, "x") == pytest.approx(region.offset * scale, abs=0.01)
        assert number(rect, "width") == pytest.approx(max(region.bytes * scale, 0.6), abs=0.01)
    lanes = {rect.get("y") for rect in drawn}
    assert len(lanes) == (2 if arch == "sm_80" else 1)


def test_cells_of_the_tile_map_cover_it_and_have_the_color_of_their_kind() -> None:
    found = fg.explain(fg.window(100, 30), 500, 300, tile=(64, 32))
    bins = Bins.of(found.kinds, (64, 32), (500, 300))
    (cells,) = (group for group in tile_map(bins, titles=True).iter("g") if group.get("class") == "fg-cells")
    areas = dict.fromkeys(("empty", "partial", "full"), 0.0)
    for rect in cells.iter("rect"):
        areas[str(rect.get("class")).removeprefix("fg-")] += number(rect, "width") * number(rect, "height")
    pairs = dict.fromkeys(areas, 0)
    for (i, j), kind in np.ndenumerate(found.kinds):
        pairs[("empty", "partial", "full")[kind]] += min(64, 500 - i * 64) * min(32, 300 - j * 32)
    scale = (520 / 500) ** 2
    assert areas == pytest.approx({kind: count * scale for kind, count in pairs.items()}, rel=1e-2)
    assert "queries 192 to 255, keys 96 to 299: empty" in {title.text for title in cells.iter("title")}


@pytest.mark.parametrize(("len_q", "len_kv"), [(1, 2**20), (2**20, 1), (1, 1)])
def test_flat_maps_can_be_seen(len_q: int, len_kv: int) -> None:
    found = fg.explain(fg.causal(), len_q, len_kv, tile=(64, 64))
    drawing = tile_map(Bins.of(found.kinds, (64, 64), (len_q, len_kv)), titles=False)
    _, _, width, height = map(float, str(drawing.get("viewBox")).split())
    assert min(width, height) >= 36


def test_bins_are_of_one_kind_only_if_all_their_tiles_are() -> None:
    kinds = np.array([[0, 0, 2, 2, 0], [0, 0, 2, 2, 2], [1, 1, 2, 0, 0]], np.uint8)
    bins = Bins.of(kinds, (10, 10), (30, 50), most=3)
    assert (bins.down, bins.across) == (1, 2)
    assert bins.rows == ("020", "022", "110")
    assert bins.step == (10, 20)
    assert Bins.of(kinds, (10, 10), (30, 50), most=2).rows == ("11", "10")


def test_notebooks_show_explanations_plans_and_kernels() -> None:
    spec = fg.AttentionSpec(64, mask=fg.causal())
    found = fg.explain(spec, 512, arch="sm_80")
    shown = Page(found._repr_html_())
    assert {"svg", "rect", "title", "pre"} <= set(shown.tags)
    assert "script" not in shown.tags
    assert "512 queries, 512 keys" in shown.text
    assert "Blue is full, orange partial, and gray empty" in shown.text
    page = Page(plan(spec, None, "sm_80")._repr_html_())
    assert page.tags.count("tr") == 5
    assert "head_dim 64, bf16, causal, for sm_80 (A100)" in page.text
    kernel = Page(fg.build(spec, target="emulator", arch="sm_80")._repr_html_())
    assert "registers" in kernel.text
    assert "forward_d64_causal_sm80" in kernel.text


def test_elements_escape_what_they_hold() -> None:
    made = markup(element("p", "<b>", element("i", "&"), "tail", title='"<'))
    assert made == '<p title="&quot;<">&lt;b&gt;<i>&amp;</i>tail</p>'


def test_columns_of_numbers_are_aligned_as_numbers() -> None:
    rows: Any = [("a", "12", "x"), ("b", "-", "3")]
    made = markup(table(("name", "count", "note"), rows))
    assert '<th scope="col" class="number">count</th>' in made
    assert '<td class="number">12</td>' in made
    assert '<th scope="col">note</th>' in made
    assert "<td>3</td>" in made
