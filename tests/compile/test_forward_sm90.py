"""The forward kernel for Hopper as machine code: nothing spills, products are as many as the plan says, and
exponentials run while products do.

A developer's run compiles a few specs; DRAWN_CASES=ci or nightly compiles all of them.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import product, takewhile

import numpy as np
import pytest

import flashgen as fg
from flashgen.plan import plan
from flashgen.plan.hopper.forward_table import TABLE
from flashgen.plan.model.plans import KernelPlan
from tests.compile.machine_code import code, compiled, each_kernel, has_own_memory, is_product, machine_code

Build = tuple[tuple[int, int], str, str]
#: Head dims that the schedule table has rows for.
HEAD_DIMS = list(TABLE)
CAPS = np.zeros(1, np.float32)
CASES = {
    "full": fg.AttentionSpec(64),
    "causal": fg.AttentionSpec(64, mask=fg.causal()),
    "window": fg.AttentionSpec(64, mask=fg.window(1024, 0)),
    "window, slopes, sink": fg.AttentionSpec(
        64, mask=fg.window(300, 40), score=fg.alibi(np.zeros(1, np.float32)) >> fg.sink(np.zeros(1, np.float32))
    ),
    "documents": fg.AttentionSpec(64, mask=fg.causal() & fg.document(np.zeros((1, 1), np.int32))),
    "softcap": fg.AttentionSpec(64, score=fg.softcap(30.0)),
    "softcap, causal": fg.AttentionSpec(64, mask=fg.causal(), score=fg.softcap(30.0)),
    "softcap, sink": fg.AttentionSpec(64, mask=fg.causal(), score=fg.softcap(30.0) >> fg.sink(np.zeros(1, np.float32))),
    "any softcap": fg.AttentionSpec(
        64, mask=fg.causal(), score=fg.Score.of(lambda s, b, h, q, k: CAPS[h] * fg.tanh(s))
    ),
    "softcap of a call": fg.AttentionSpec(64, score=fg.Score.of(lambda s, b, h, q, k: fg.k_len * fg.tanh(s))),
    "modest softcap": fg.AttentionSpec(64, score=fg.softcap(100.0)),
    "modest softcap, causal": fg.AttentionSpec(64, mask=fg.causal(), score=fg.softcap(70.0)),
    "high softcap": fg.AttentionSpec(64, mask=fg.causal(), score=fg.softcap(200.0)),
    "slopes": fg.AttentionSpec(64, mask=fg.causal(), score=fg.alibi(np.zeros(1, np.float32))),
    "prefix": fg.AttentionSpec(64, mask=fg.prefix_lm(100)),
    "bias alone": fg.AttentionSpec(
        64, score=fg.bias(np.zeros((2, 2), np.float16)) >> fg.alibi(np.zeros(1, np.float32))
    ),
    "bias, softcap": fg.AttentionSpec(64, score=fg.softcap(30.0) >> fg.bias(np.zeros((2, 2), np.float16))),
    "wide bias": fg.AttentionSpec(64, mask=fg.window(300, 40), score=fg.bias(np.zeros((2, 2, 2), np.float32))),
    "bias": fg.AttentionSpec(64, mask=fg.causal(), score=fg.bias(np.zeros((2, 2), np.float16))),
    "bias, documents": fg.AttentionSpec(
        64, mask=fg.document(np.zeros((1, 1), np.int32)), score=fg.bias(np.zeros((2, 2), np.float16))
    ),
}
#: What is asked of one pair after another, for which wide heads have few registers or keep no scores.
ASKED_CASES = {
    "chunks": fg.AttentionSpec(64, mask=fg.chunked(100)),
    "window, every third": fg.AttentionSpec(64, mask=fg.window(300, 300) & fg.dilated(3)),
    "window, documents": fg.AttentionSpec(64, mask=fg.window(300, 0) & fg.document(np.zeros((1, 1), np.int32))),
    "blocks": fg.AttentionSpec(64, mask=fg.causal() & fg.block_sparse(np.zeros((2, 2), bool))),
    "blocks of a head": fg.AttentionSpec(64, mask=fg.block_sparse(np.zeros((4, 5, 5), bool), 64)),
    "blocks of a head, softcap": fg.AttentionSpec(
        64, mask=fg.block_sparse(np.zeros((4, 5, 5), bool), 64), score=fg.softcap(30.0)
    ),
    "blocks of a head, window, softcap": fg.AttentionSpec(
        64, mask=fg.window(200, 50) & fg.block_sparse(np.zeros((4, 5, 5), bool), 64), score=fg.softcap(70.0)
    ),
    "blocks of a head, documents, softcap": fg.AttentionSpec(
        64,
        mask=fg.document(np.zeros((1, 1), np.int32)) & fg.block_sparse(np.zeros((2, 4, 5, 5), bool), 64),
        score=fg.softcap(70.0),
    ),
}
BUILDS: list[Build] = [
    (dims, name, dtype)
    for dims, name, dtype in product(HEAD_DIMS, CASES, ("bf16", "fp16"))
    if dtype == "bf16" or name in ("full", "causal", "softcap", "modest softcap, causal")
]
BUILDS += [(dims, name, "bf16") for dims, name in product(HEAD_DIMS, ASKED_CASES)]
SAMPLE: list[Build] = [
    ((128, 128), "causal", "bf16"),
    ((64, 64), "slopes", "bf16"),
    ((128, 128), "softcap", "bf16"),
    ((192, 192), "bias, documents", "bf16"),
]
BUILT = SAMPLE if os.environ.get("DRAWN_CASES", "sample") == "sample" else BUILDS


def each(builds: list[Build]) -> pytest.MarkDecorator:
    return each_kernel(
        ("dims", "name", "dtype"),
        [("x".join(map(str, dims)) + f" {name} {dtype}", (dims, name, dtype)) for dims, name, dtype in builds],
    )


@cache
def forward(dims: tuple[int, int], name: str, dtype: str) -> KernelPlan:
    case = (CASES | ASKED_CASES)[name]
    spec = replace(case, head_dim=dims[0], head_dim_v=dims[1], dtype=dtype, direction="forward")
    return plan(spec, None, "sm_90a").kernel("forward")


@each(BUILT)
def test_nothing_spills_and_products_do_not_wait_for_each_other(dims: tuple[int, int], name: str, dtype: str) -> None:
    # What the assembler says of products that wait for each other is an error, so that there is a binary at all.
    found = compiled(forward(dims, name, dtype)).resources
    assert (found.spill_bytes, found.stack_bytes, found.static_smem_bytes) == (0, 0, 0)


@each(BUILT)
def test_no_thread_has_memory_of_its_own(dims: tuple[int, int], name: str, dtype: str) -> None:
    assert not has_own_memory(machine_code(forward(dims, name, dtype)))


def copies_of_a_step(kernel: KernelPlan) -> int:
    """Where exponentials are rounded while values are multiplied, steps alternate between two sets of registers."""
    return 2 if "keeps_scores" in kernel.switches and not kernel.switches & {"capped", "values_first"} else 1


def is_wait(line: str) -> bool:
    """Whether it waits for products."""
    return line.startswith("WARPGROUP.DEPBAR")


def is_exponential(line: str) -> bool:
    return line.startswith("MUFU.EX2")


@each(BUILT)
def test_there_are_as_many_products_as_the_plan_says(dims: tuple[int, int], name: str, dtype: str) -> None:
    kernel = forward(dims, name, dtype)
    keys = int(kernel.constant("tile_kv"))
    copies = copies_of_a_step(kernel)
    pattern = re.compile(r"HGMMA\.64x(\d+)x16\.F32\S* R\d+, (gdesc|R)")
    found = Counter(match.groups() for line in machine_code(kernel) if (match := pattern.search(line)))
    assert found == {
        # The first scores of a stream, and those of each copy of a step.
        (str(keys), "gdesc"): (1 + copies) * dims[0] // 16,
        # A step's output with the next scores, and alone.
        (str(dims[1]), "R"): (copies + 1) * keys // 16,
    }
    assert sum("HGMMA" in line for line in machine_code(kernel)) == sum(found.values())


@each([build for build in BUILT if forward(*build).switches & {"keeps_scores", "values_first"} == {"keeps_scores"}])
def test_exponentials_stand_before_the_wait_for_the_output(dims: tuple[int, int], name: str, dtype: str) -> None:
    kernel = forward(dims, name, dtype)
    steps = code(kernel)
    # A step of either set of registers waits for its scores alone, and then for the output.
    scores_came = [i for i, line in enumerate(steps.lines) if is_wait(line) and line.endswith("0x1")]
    assert len(scores_came) == copies_of_a_step(kernel)
    for first in scores_came:
        passed, waits = steps.may_follow(first, is_wait)
        # 64 rows of as many columns as keys, divided among 128 threads.
        assert sum(is_exponential(steps.lines[i]) for i in passed) >= int(kernel.constant("tile_kv")) // 2
        for wait in waits:
            assert steps.lines[wait].endswith("0x0")
            after, _ = steps.may_follow(wait, is_product)
            assert not [i for i in after if is_exponential(steps.lines[i])]


@each([build for build in BUILT if "capped" in forward(*build).switches])
def test_nothing_branches_amid_exponentials_of_capped_logits(dims: tuple[int, int], name: str, dtype: str) -> None:
    """They overlap what makes logits of other products, in either way: polynomials, or shares with powers of their
    own."""
    kernel = forward(dims, name, dtype)
    in_tile = int(kernel.constant("tile_kv")) // 2
    found = [sum(map(is_exponential, run)) for run in code(kernel).straight()]
    assert [count for count in found if in_tile <= count < 2 * in_tile]
    assert [count for count in found if count >= 2 * in_tile]


@each([build for build in BUILT if forward(*build).switches & {"capped", "values_first"} == {"values_first"}])
def test_where_values_come_first_exponentials_are_rounded_as_they_come(
    dims: tuple[int, int], name: str, dtype: str
) -> None:
    kernel = forward(dims, name, dtype)
    lines = machine_code(kernel)
    waits = [i for i, line in enumerate(lines) if "WARPGROUP.DEPBAR" in line]
    assert all(lines[i].endswith("0x0") for i in waits)
    count = int(kernel.constant("tile_kv")) // 2
    steps = 0
    for first in waits:
        # Up to the next products, in the order in which they stand.
        step = list(takewhile(lambda line: "HGMMA" not in line, lines[first + 1 :]))
        exponentials = [i for i, line in enumerate(step) if line.startswith("MUFU.EX2")]
        if len(exponentials) < count:
            continue
        among = [line for line in step[exponentials[-count] : exponentials[-1]] if line.startswith("F2FP")]
        assert len(among) >= count // 4
        steps += 1
    assert steps >= 1


@each(BUILT)
def test_what_a_product_reads_is_not_written_before_it_is_waited_for(
    dims: tuple[int, int], name: str, dtype: str
) -> None:
    # The assembler does not see to it: it lets what comes next take the place of operands that are being read.
    steps = code(forward(dims, name, dtype))
    # Of each instruction, which registers products may be reading when it comes, a bit each; None if none leads to it.
    being_read: list[int | None] = [0, *[None] * (len(steps.lines) - 1)]
    left = [0]
    while left:
        at = left.pop()
        line, before = steps.lines[at], being_read[at]
        assert before is not None
        if product := re.match(r"HGMMA\S* R\d+, R(\d+)", line):
            before |= 0b1111 << int(product[1])
        elif is_wait(line) and line.endswith("0x0"):
            before = 0
        for to in steps.next[at]:
            known = being_read[to]
            if known is None or before & ~known:
                being_read[to] = before | (known or 0)
                left.append(to)
    assert any(being_read)
    for line, before in zip(steps.lines, being_read, strict=True):
        written = re.match(r"((?!ST|RED|SYNCS|HGMMA|BAR)[\w.]+) R(\d+)(?![\w.]*\])", line)
        if written is not None and before:
            width, first = written[1], int(written[2])
            count = 4 if ".128" in width else 2 if ".64" in width or ".WIDE" in width else 1
            assert not before >> first & ((1 << count) - 1), line


@each([build for build in BUILT if build[1] == "slopes"])
def test_distances_are_turned_into_floats_once_for_a_tile(dims: tuple[int, int], name: str, dtype: str) -> None:
    kernel = forward(dims, name, dtype)
    # Each copy of a step converts them, including the copy for a stream's first step. So does the distance by which two
    # reference maxima begin ahead, from a quarter of the columns or from all. Each copy that writes results, which the
    # first does not, and the stream's end convert the powers of two in two sums.
    copies, reference_maxima, sums = copies_of_a_step(kernel), 4, 2
    expected = (1 + copies) * (1 + reference_maxima) + (copies + 1) * sums
    assert sum(line.startswith("I2FP") for line in machine_code(kernel)) <= expected


def test_every_row_of_the_table_is_compiled_in_every_way() -> None:
    assert {dims for dims, _, _ in BUILDS} == set(HEAD_DIMS)
    switches = frozenset().union(*(forward(*build).switches for build in BUILDS))
    assert switches >= {"o_tile", "keeps_scores", "has_mask", "block_sparse", "score", "in_products"}
    assert set(SAMPLE) <= set(BUILDS)
