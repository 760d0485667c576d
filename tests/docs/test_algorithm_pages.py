"""The figures of the pages on algorithms follow from the IO model and from the table of measured times.

UPDATE_DOCS=1 writes the tables; then draw the plots with benchmarks/plot.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache

import pytest

import flashgen as fg
from flashgen.lab.io.result import IOModel
from flashgen.lab.io.traffic import AlgorithmIO
from flashgen.lab.text import bytes_text
from flashgen.plan import plan
from flashgen.plan.calls import runs_at_once
from flashgen.plan.model.plans import Problem
from flashgen.spec.schedule import ALGORITHMS, Algorithm
from tests.docs.marked_tables import line, marked_tables, table
from tests.docs.pages import ROOT

PAGES = ROOT / "docs" / "explanation" / "algorithms"
INDEX = PAGES / "index.md"
LEN, DIMS, ARCH = 4096, (64, 128), "sm_90a"
#: Of the table of memory.
LENGTHS = (1024, 2048, 4096, 8192)
#: The calls that were timed.
TOKENS, HEADS = 16384, 16
#: What NVIDIA publishes for the H200: bytes and operations per second.
MEMORY, MATRIX = 4.8e12, 989e12
MULTIPROCESSORS = 132

Case = tuple[int, str, str]


@cache
def times() -> dict[Case, dict[str, float]]:
    """Milliseconds by head dimension, mask and length, and then by algorithm: the first table of the index."""
    found = re.search(r"(?:^\|.*\n)+", INDEX.read_text(encoding="utf-8").split("](times.svg)")[1], flags=re.MULTILINE)
    assert found
    head, _, *rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in found[0].splitlines()]
    assert head[:3] == ["D", "mask", "length"]
    return {
        (int(row[0]), row[1], row[2]): {
            name: float(cell) for name, cell in zip(head[3:], row[3:], strict=True) if cell != "-"
        }
        for row in rows
    }


def tokens(length: str) -> int:
    return int(length.removesuffix("k")) * (1024 if length.endswith("k") else 1)


def teraflops(case: Case, algorithm: str) -> float:
    """By the papers' convention: 4 N^2 d for each head, and half of that with a causal mask."""
    dim, mask, length = case
    flop = 4 * TOKENS * tokens(length) * dim * HEADS / (2 if mask == "causal" else 1)
    return flop / times()[case][algorithm] / 1e9


@cache
def modelled(dim: int, length: int = LEN) -> IOModel:
    spec = fg.AttentionSpec(head_dim=dim, dtype="bf16", direction="forward")
    return fg.lab.io_model(spec, length, arch=ARCH)


@cache
def built(algorithm: Algorithm, dim: int) -> AlgorithmIO:
    """The IO of the kernels that a schedule of this algorithm builds."""
    spec = fg.AttentionSpec(head_dim=dim, dtype="bf16", direction="forward")
    return fg.lab.io_model(spec, LEN, arch=ARCH, schedule=fg.Schedule(algorithm=algorithm))["plan"]


def timed(algorithm: Algorithm, dim: int) -> AlgorithmIO:
    """The IO of what was timed: the grid of grid2d was too large for one launch."""
    return modelled(dim)["grid2d_phased"] if algorithm == "grid2d" else built(algorithm, dim)


def io_table(model: AlgorithmIO, wider: AlgorithmIO) -> str:
    """Bytes by kernel and array."""
    lines = []
    for kernel in model.kernels:
        for array in dict.fromkeys((*kernel.reads, *kernel.writes)):
            sides = (bytes_text(side[array]) if array in side else "-" for side in (kernel.reads, kernel.writes))
            lines.append(line(kernel.name, array, *sides))
    for name, row in ((f"total, D={DIMS[0]}", model), (f"total, D={DIMS[1]}", wider)):
        lines.append(line(f"**{name}**", "", bytes_text(row.read), bytes_text(row.written)))
    return table(["kernel", "array", "read", "written"], lines)


def times_table(algorithm: str) -> str:
    """Each measured time of an algorithm, and how it compares with standard attention's."""
    lines = []
    for case, row in times().items():
        if algorithm not in row:
            continue
        dim, mask, length = case
        cells = [str(dim), mask, length, f"{row[algorithm]:g}", f"{teraflops(case, algorithm):.3g}"]
        if algorithm != "standard":
            cells.append(f"{row['standard'] / row[algorithm]:.2g}" if "standard" in row else "-")
        lines.append(line(*cells))
    heads = ["D", "mask", "length", "ms", "TFLOP/s", "times as fast as standard"]
    return table(heads[: len(cells)], lines)


def roofline_table() -> str:
    """Where each algorithm lies under the published ceilings, at 4k without a mask."""
    lines = []
    for dim in DIMS:
        for algorithm in ALGORITHMS:
            total, rate = timed(algorithm, dim).total, teraflops((dim, "full", "4k"), algorithm)
            intensity = 4 * LEN**2 * dim / total
            roof = min(MEMORY * intensity, MATRIX) / 1e12
            cells = (bytes_text(total), f"{intensity:.3g}", f"{rate:.3g}", f"{roof:.3g}", f"{100 * rate / roof:.0f} %")
            lines.append(line(str(dim), algorithm, *cells))
    return table(["D", "algorithm", "bytes a head", "FLOP/byte", "TFLOP/s", "roof", "of the roof"], lines)


def savings(length: int) -> float:
    """The memory of standard attention over FlashAttention-2's, with Q, K, V and O."""
    model = modelled(64, length)
    inputs = model.inputs + model.output
    return (inputs + model["standard"].memory) / (inputs + model["fa2"].memory)


def savings_beside_output(baseline: str) -> tuple[str, ...]:
    """The memory of a row of standard attention over FlashAttention-2's, with O alone, at 1k to 8k."""
    found = []
    for length in LENGTHS:
        model = modelled(64, length)
        ratio = (model[baseline].memory + model.output) / (model["fa2"].memory + model.output)
        found.append(f"{ratio:.0f}x")
    return tuple(found)


def memory_table() -> str:
    """What algorithms store between their kernels, and the whole memory of a call."""
    lines = []
    for length in LENGTHS:
        model = modelled(64, length)
        inputs = model.inputs + model.output
        stored = (bytes_text(model[name].memory) for name in ("standard", "fa1", "fa2"))
        one = bytes_text(2 * length**2)
        lines.append(line(f"{length // 1024}k", bytes_text(inputs), one, *stored, f"{savings(length):.0f}x"))
    heads = ["length", "Q, K, V, O", "one 16-bit N x N matrix", "standard", "fa1", "fa2", "standard over fa2"]
    return table(heads, lines)


def tables(name: str) -> dict[str, str]:
    if name == "index":
        return {"roofline": roofline_table(), "memory": memory_table()}
    algorithm = next(a for a in ALGORITHMS if a == name)
    found = {
        "bytes": io_table(built(algorithm, DIMS[0]), built(algorithm, DIMS[1])),
        "times": times_table(algorithm),
    }
    if algorithm == "grid2d":
        phased = [modelled(dim)["grid2d_phased"] for dim in DIMS]
        found["bytes in three launches"] = io_table(phased[0], phased[1])
    return found


@pytest.mark.parametrize("name", ["index", *ALGORITHMS])
def test_the_tables_are_those_of_the_model_and_the_measurements(name: str) -> None:
    assert marked_tables(PAGES / f"{name}.md", lambda: tables(name)) == tables(name)


def test_every_algorithm_has_a_page() -> None:
    assert {page.stem for page in PAGES.glob("*.md")} == {"index", *ALGORITHMS}


def range_of(first: str, second: str) -> tuple[str, ...]:
    """The smallest and the largest of the times of one algorithm over those of another, as the pages write them."""
    ratios = sorted(row[first] / row[second] for row in times().values() if first in row and second in row)
    return tuple(f"{ratio:.3g}" if ratio >= 10 else f"{ratio:.2g}" for ratio in (ratios[0], ratios[-1]))


def backward_times() -> dict[str, str]:
    """The table of the backward pass, as written."""
    (found,) = re.findall(r"^\| algorithm \| ms \|\n\|.*\n((?:\|.*\n)+)", INDEX.read_text(encoding="utf-8"), flags=re.M)
    return dict(re.findall(r"^\| (.*?) \| ([\d.]+) \|$", found, flags=re.M))


def figures() -> Iterator[tuple[str, tuple[str, ...]]]:
    """What a line of the index is about, and the figures that it gives."""
    yield "17M elements", tuple(f"{modelled(64)[name].total / 2e6:.3g}M" for name in ("standard", "fa1", "fa2"))
    sides = [(modelled(64, length), length) for length in (2048, 4096)]
    one_matrix = [
        (model.inputs + model.output + 2 * length**2) / (model.inputs + model.output + model["fa2"].memory)
        for model, length in sides
    ]
    yield (
        "10x less memory",
        (*(f"{savings(length):.0f}x" for _, length in sides), *(f"{ratio:.2g}x" for ratio in one_matrix)),
    )
    # The kernels store six bytes a pair, and Algorithm 0 of the paper four.
    yield "beside O alone", (*savings_beside_output("standard"), *savings_beside_output("paper_standard"))
    yield "FlashAttention-1 over standard", (*range_of("standard", "fa1"), *range_of("math", "standard"))
    yield "FlashAttention-2 over FlashAttention-1", range_of("fa1", "fa2")
    yield "FlashAttention-2 over standard", (*range_of("standard", "fa2"), *range_of("math", "fa2"))
    yield "FlashAttention-3 over FlashAttention-2", range_of("fa2", "fa3")
    peak = (128, "full", "4k")
    rates = [teraflops(peak, name) for name in ("fa2", "fa3")]
    yield "fp16 rates", tuple(f"{number:.0f}" for rate in rates for number in (rate, 100 * rate / (MATRIX / 1e12)))
    halves = [times()[64, "causal", "4k"][name] / times()[64, "full", "4k"][name] for name in ("fa2", "fa3")]
    yield "A causal mask", tuple(f"{half:.2g}" for half in halves)
    backward = backward_times()
    stored, again = (
        backward[f"standard, P {how}"] for how in ("stored by the forward pass", "computed again in device memory")
    )
    yield "Computing P again in the backward pass", (stored, again, backward["fa1"], backward["fa2"])
    yield "1-D grid loses to the naive kernel", range_of("naive", "grid1d")


@pytest.mark.parametrize(("claim", "expected"), [pytest.param(*each, id=each[0]) for each in figures()])
def test_claims_give_the_measured_figures(claim: str, expected: tuple[str, ...]) -> None:
    (row,) = (row for row in INDEX.read_text(encoding="utf-8").splitlines() if row.startswith("|") and claim in row)
    # Not in the columns of the claim and its source.
    ours = row.split("|", maxsplit=3)[3]
    absent = [figure for figure in expected if not re.search(rf"(?<![\d.]){re.escape(figure)}(?![\d.]*\d)", ours)]
    assert not absent, f"{claim}: the measurements give {expected}"


@pytest.mark.parametrize("dim", DIMS)
def test_moving_s_and_p_takes_two_thirds_of_the_time_of_standard_attention(dim: int) -> None:
    stored = built("standard", dim).stored
    # Both are written and read.
    moved = 2 * (stored["S"] + stored["P"]) * HEADS * TOKENS // LEN
    assert (f"{moved / 2e9:.1f}", f"{moved / 1e9:.1f}") == ("6.4", "12.9")
    assert 1000 * moved / MEMORY / times()[dim, "full", "4k"]["standard"] == pytest.approx(2 / 3, abs=0.03)


def test_the_page_on_fa1_says_how_large_tiles_of_keys_are_and_what_the_papers_would_move() -> None:
    page = " ".join((PAGES / "fa1.md").read_text(encoding="utf-8").split())
    tiles = {name: [modelled(dim)[name].tile or (0, 0) for dim in DIMS] for name in ("fa1", "paper_fa1")}
    assert f"B_c: {tiles['fa1'][0][1]} at D=64, {tiles['fa1'][1][1]} at D=128" in page
    assert f"B_c for an H200 is {tiles['paper_fa1'][0][1]} at D=64 and {tiles['paper_fa1'][1][1]} at D=128" in page
    printed, built = ([bytes_text(modelled(dim)[name].total) for dim in DIMS] for name in ("paper_fa1", "fa1"))
    assert f"moves {printed[0]} and {printed[1]} in all, where the kernel moves {built[0]} and {built[1]}." in page


def test_the_page_on_grid2d_says_which_calls_fit_one_launch() -> None:
    spec = fg.AttentionSpec(head_dim=64, dtype="bf16", direction="forward")
    (kernel,) = (k for k in plan(spec, fg.Schedule(algorithm="grid2d"), ARCH).kernels if k.is_cooperative)
    assert kernel.min_blocks == 2
    resident = kernel.min_blocks * MULTIPROCESSORS

    def runs_at_once_with(length: int, *, batch: int = 1, heads: int = 1) -> bool:
        problem = Problem(batch=batch, heads_q=heads, heads_kv=heads, len_q=length, len_kv=length)
        return runs_at_once(kernel, problem, resident)

    assert runs_at_once_with(1024)
    assert not runs_at_once_with(1025)
    assert not any(runs_at_once_with(n, batch=TOKENS // n, heads=HEADS) for n in (512, 1024, 2048, 4096))


def test_the_section_on_the_course_project_gives_measured_times() -> None:
    section = INDEX.read_text(encoding="utf-8").split("## Why the course project")[1]
    row = times()[64, "full", "4k"]
    assert all(re.search(rf"\b{row[name]:g}\b", section) for name in ("naive", "grid1d", "grid2d", "fa2"))
