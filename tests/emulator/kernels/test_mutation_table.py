"""The table of planted bugs in docs/explanation/trust.md is the one that the tests plant."""

from __future__ import annotations

import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PAGE = Path(__file__).resolve().parents[3] / "docs" / "explanation" / "trust.md"
BEGIN, END = "<!-- planted bugs -->\n", "<!-- end of planted bugs -->\n"
#: The modes in which the tests run each bug, and what the page calls them.
MODES = {"plain": "sequential", "random": "random", "race": "race"}
HOPPER = " for Hopper"
WIDE = ", wide heads"
LINEAGE = ("naive", "fa1", "grid1d", "grid2d")
KERNELS = (
    *(
        "forward",
        "forward for Hopper",
        "forward of e4m3",
        "prepare",
        "prepare for Hopper",
        "main",
        "main for Hopper",
        "main for Hopper, wide heads",
    ),
    *("query", "query for Hopper, wide heads", "finish"),
    *("repair for Hopper", "repair for Hopper, wide heads"),
    *("append", "combine", "prefill for Hopper", "decode", "decode for Hopper", "quantize"),
    *(
        "forward, naive",
        "forward, fa1",
        "main, fa1",
        "forward, grid1d",
        "forward, grid2d",
        "grid_products, grid2d",
        "grid_merge, grid2d",
    ),
    *("scores", "softmax", "forward of standard", "ds", "dv", "dq", "dk"),
)


def mutations() -> list[dict[str, Any]]:
    with (Path(__file__).parent / "mutations.toml").open("rb") as file:
        return list(tomllib.load(file)["mutation"])


def kernel_of(row: dict[str, Any]) -> str:
    case = row["case"]
    if (algorithm := case.partition(",")[0]) in LINEAGE:
        return f"{row['role']}, {algorithm}"
    # Only the forward kernel of standard attention has a role that others have, too.
    standard = " of standard" * (case.startswith("standard") and row["role"] == "forward")
    eight_bits = " of e4m3" * case.startswith("e4m3")
    return str(row["role"]) + standard + eight_bits + HOPPER * ("Hopper" in case) + WIDE * (WIDE in case)


def table() -> str:
    rows = sorted(mutations(), key=lambda row: KERNELS.index(kernel_of(row)))
    heads = ["kernel", "bug", *MODES.values()]
    lines = [f"| {' | '.join(heads)} |", "| --- " * len(heads) + "|"]
    for row in rows:
        caught = ["yes" if mode in row.get("caught_by", MODES) else "no" for mode in MODES]
        lines.append(f"| {kernel_of(row)} | {row['name']} | {' | '.join(caught)} |")
    return "\n".join(lines) + "\n"


def test_the_table_is_current() -> None:
    """UPDATE_DOCS=1 writes it; read the diff."""
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    shown, end, after = rest.partition(END)
    assert end, "docs/explanation/trust.md has lost the marks around its table"
    if os.environ.get("UPDATE_DOCS") == "1":
        PAGE.write_text(before + BEGIN + table() + END + after, encoding="utf-8")
    else:
        assert shown == table()


def test_every_kernel_has_bugs_planted_and_race_mode_catches_all() -> None:
    planted = Counter(kernel_of(row) for row in mutations())
    assert planted.total() >= 30
    assert all(planted[kernel] >= (1 if kernel.startswith("grid_") else 3) for kernel in KERNELS)
    assert all("race" in row.get("caught_by", MODES) for row in mutations())
