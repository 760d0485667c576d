"""``flashgen report`` and ``flashgen explain --html``: pages that are written where the user said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import flashgen as fg
from tests.lab.test_page import BENCH, ROOFLINE, written

SPEC = ("--head-dim", "64", "--causal", "--arch", "sm_80", "--len-q", "256")


def test_explain_writes_the_page_of_the_explanation(flashgen: Any, own_cache: Path, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    result = flashgen("explain", *SPEC, "--html", str(file))
    assert (result.code, result.out) == (0, "")
    assert result.err == f"wrote {file}\n"
    assert file.read_text() == fg.explain(fg.AttentionSpec(64, mask=fg.causal()), 256, arch="sm_80").html()
    found = json.loads(flashgen("explain", *SPEC, "--html", str(file), "--json").out)
    assert found["len_q"] == 256


def test_report_adds_measurements(flashgen: Any, own_cache: Path, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    bench, roofline = written(tmp_path / "b.json", BENCH), written(tmp_path / "r.json", ROOFLINE)
    result = flashgen("report", *SPEC, "-o", str(file), "--bench", str(bench), "--roofline", str(roofline))
    assert (result.code, result.out) == (0, "")
    page = file.read_text()
    assert all(title in page for title in ("Tile map", "Tile estimator", "Shared memory", "Timings", "Roofline"))
    assert flashgen("report", *SPEC, "-o", str(file)).code == 0
    assert "Timings" not in file.read_text()


def test_wrong_files_are_usage_errors(flashgen: Any, own_cache: Path, tmp_path: Path) -> None:
    result = flashgen("report", *SPEC, "-o", str(tmp_path / "report.html"), "--bench", str(tmp_path / "none.json"))
    assert (result.code, result.out) == (2, "")
    assert "cannot be read (No such file or directory); pass a file that 'flashgen bench' wrote" in result.err
    assert not (tmp_path / "report.html").exists()
    for command in (("explain", "--html"), ("report", "--out")):
        result = flashgen(command[0], *SPEC, command[1], str(tmp_path / "none" / "page.html"))
        assert (result.code, result.out) == (2, "")
        assert "cannot be written (No such file or directory); name a file in a directory that exists" in result.err
