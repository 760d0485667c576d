"""Files of measurements are read strictly, and drawn where their numbers lie."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import flashgen as fg
from flashgen.common.html import markup
from flashgen.lab.page.drawings.axes import Axis, number
from flashgen.lab.page.drawings.plots import Series, line_plot, roofline_plot, significant
from tests.lab.test_page import BENCH, ROOFLINE, written

WRONG_ROWS: dict[str, tuple[Any, str]] = {
    "a string": ({"ms": "1.5"}, "Expected `float`, got `str` - at `$.rows[0].ms`"),
    "zero": ({"ms": 0}, "Expected `float` >= 1e-12 - at `$.rows[0].ms`"),
    "a bool": ({"len": True}, "Expected `int`, got `bool` - at `$.rows[0].len`"),
    "another pass": ({"pass": "sideways"}, "Invalid enum value 'sideways' - at `$.rows[0].pass`"),
    "a huge length": ({"len": 2**60}, "Expected `int` <= 1099511627776 - at `$.rows[0].len`"),
}


def test_files_are_read(tmp_path: Path) -> None:
    bench = fg.lab.read_bench(written(tmp_path / "bench.json", BENCH))
    assert (bench.device, len(bench.rows), bench.rows[0].pass_) == ("a device", 4, "forward")
    roofline = fg.lab.read_roofline(written(tmp_path / "roofline.json", ROOFLINE))
    assert (roofline.ceilings.exp_gops, roofline.kernels[0].bound) == (3900.0, "exp")


@pytest.mark.parametrize("name", WRONG_ROWS)
def test_a_wrong_row_is_named(tmp_path: Path, name: str) -> None:
    change, message = WRONG_ROWS[name]
    path = written(tmp_path / "bench.json", {**BENCH, "rows": [{**BENCH["rows"][0], **change}]})
    with pytest.raises(fg.ArgumentError, match=re.escape(f"{path} holds no bench figures ({message})")):
        fg.lab.read_bench(path)


@pytest.mark.parametrize(
    "text", ["", "[]", "{", "\ud800", '{"schema": 2}', "[" * 100_000, '{"schema":1,"device":1e999}']
)
def test_what_is_no_such_file_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "file.json"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    for read, command in ((fg.lab.read_bench, "bench"), (fg.lab.read_roofline, "roofline")):
        with pytest.raises(fg.ArgumentError, match=f"pass a file that 'flashgen {command}' wrote"):
            read(path)


def test_files_that_are_missing_or_too_large_are_refused(tmp_path: Path) -> None:
    with pytest.raises(fg.ArgumentError, match=r"cannot be read \(No such file or directory\)"):
        fg.lab.read_bench(tmp_path / "none.json")
    with pytest.raises(fg.ArgumentError, match="cannot be read"):
        fg.lab.read_bench(tmp_path)
    (tmp_path / "large.json").write_text(json.dumps(BENCH) + " " * 2**24)
    with pytest.raises(fg.ArgumentError, match="has more than 16 MiB"):
        fg.lab.read_bench(tmp_path / "large.json")


@pytest.mark.parametrize("path", [3, None, b"x", "a\0b"])
def test_what_is_no_path_is_refused(path: Any) -> None:
    with pytest.raises(fg.ArgumentError, match="path="):
        fg.lab.read_bench(path)


def test_axes_hold_their_values_between_round_ends() -> None:
    powers = Axis.around([600.0, 9000.0], 0, 100, 2)
    assert powers.ticks() == [512, 1024, 2048, 4096, 8192, 16384]
    assert [powers.at(512), powers.at(16384)] == [0, 100]
    assert powers.at(2048) == pytest.approx(40)
    decades = Axis.around([0.02, 30], 100, 0, 10)
    assert decades.ticks() == pytest.approx([0.01, 0.1, 1, 10, 100])
    assert decades.at(1) == pytest.approx(50)
    plain = Axis.around([0.0, 620.0], 0, 100)
    assert plain.ticks() == [0, 100, 200, 300, 400, 500, 600, 700]
    assert plain.at(350) == 50


@pytest.mark.parametrize("values", [[], [1.0], [1e-12, 1e12], [1e12, 1e12], [1.0, 2.0**40]])
@pytest.mark.parametrize("base", [None, 2, 10])
def test_axes_have_few_ticks_whatever_the_values(values: list[float], base: int | None) -> None:
    axis = Axis.around(values, 0, 100, base)
    assert 2 <= len(axis.ticks()) <= 10
    assert all(-1e-6 <= axis.at(value) <= 100 + 1e-6 for value in (*values, *axis.ticks()))


def test_numbers_are_short() -> None:
    assert [number(value) for value in (512, 1024, 16384, 2**20, 0.1, 100, 1500)] == [
        "512", "1k", "16k", "1M", "0.1", "100", "1,500",
    ]  # fmt: skip
    assert [significant(value) for value in (0, 0.001234, 1.5, 82, 790.4, 12345.6)] == [
        "0", "0.00123", "1.50", "82.0", "790", "12,346",
    ]  # fmt: skip


def test_points_have_texts_and_lines_of_peers_are_dashed() -> None:
    lines = [Series("fa2", ((512, 100), (1024, 200)), 0), Series("peer", ((512, 90), (1024, 150)), 1, dashed=True)]
    drawing = markup(line_plot(lines, "length", "TFLOP/s", log_y=False))
    assert "<title>fa2: 200 TFLOP/s at 1,024 length</title>" in drawing
    assert drawing.count('class="series-1 dashed"') == 1
    assert drawing.count("<polyline") == 2


def test_the_roof_bends_where_both_ceilings_meet() -> None:
    drawing = markup(roofline_plot(4000, 800, [Series("fa2", ((200, 800),), 0)]))
    (roof,) = re.findall(r'<polyline class="roof" points="([^"]*)"', drawing)
    (point,) = re.findall(r'<circle class="series-0" cx="([^"]*)" cy="([^"]*)"', drawing)
    bend = [float(number) for number in roof.split()[1].split(",")]
    assert bend == pytest.approx([float(number) for number in point], abs=0.1)
