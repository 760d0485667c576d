"""The forward kernel for Hopper as machine code: nothing spills, products are as many as the plan says, exponentials
run while products do, and features that a spec does not have leave nothing behind.

A developer's run compiles a few specs; DRAWN_CASES=ci or nightly compiles all of them.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import product

import numpy as np
import pytest

import flashgen as fg
from flashgen.plan import plan
from flashgen.plan.hopper.forward_table import TABLE
from flashgen.plan.model.plans import KernelPlan
from tests.compile.machine_code import code, compiled, each_kernel, has_own_memory, is_product, machine_code

pytestmark = pytest.mark.in_turns(12)

Build = tuple[tuple[int, int], str, str]
#: Head dims that the schedule table has rows for.
HEAD_DIMS = list(TABLE)
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
    "softcap of a call": fg.AttentionSpec(64, score=fg.Score.of(lambda s, b, h, q, k: fg.k_len * fg.tanh(s))),
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
#: What only the forward pass has kernels for Hopper for.
FORWARD_CASES = {
    "packed": fg.AttentionSpec(64, mask=fg.causal(), varlen=True),
    "dropout": fg.AttentionSpec(64, mask=fg.causal(), dropout=True),
    "pages": fg.AttentionSpec(64, mask=fg.causal(), direction="forward", cache="paged"),
    "packed, dropout, documents": fg.AttentionSpec(
        64, mask=fg.causal() & fg.document(np.zeros((1, 1), np.int32)), varlen=True, dropout=True
    ),
}
#: With more values, consumers lack the registers that the producers take.
NARROW_CASES = {
    "pages, chunks": fg.AttentionSpec(
        64, mask=fg.causal() & fg.chunked(100), direction="forward", cache="paged", score=fg.softcap(30.0)
    ),
}
#: What is asked of one pair after another, for which wide heads have few registers.
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
    for dims, name, dtype in product(HEAD_DIMS, CASES | FORWARD_CASES, ("bf16", "fp16"))
    if dtype == "bf16" or name in ("full", "causal", "softcap", "packed", "dropout")
]
BUILDS += [(dims, name, "bf16") for dims, name in product(HEAD_DIMS, ASKED_CASES)]
BUILDS += [(dims, name, "bf16") for dims, name in product(HEAD_DIMS, NARROW_CASES) if dims[1] <= 128]
#: Head dims between those of the schedule table.
ODD_DIMS = [(8, 8), (40, 72), (80, 80), (112, 112), (200, 200)]
BUILDS += [(dims, name, "bf16") for dims, name in product(ODD_DIMS, ("causal", "packed", "dropout"))]
SAMPLE: list[Build] = [
    ((128, 128), "causal", "bf16"),
    ((64, 64), "slopes", "bf16"),
    ((128, 128), "softcap", "bf16"),
    ((80, 80), "packed", "bf16"),
    ((128, 128), "dropout", "bf16"),
    ((128, 128), "pages", "bf16"),
    ((64, 64), "pages, chunks", "bf16"),
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
    case = (CASES | FORWARD_CASES | NARROW_CASES | ASKED_CASES)[name]
    spec = replace(case, head_dim=dims[0], head_dim_v=dims[1], dtype=dtype, direction="forward")
    return plan(spec, None, "sm_90a").kernel("prefill" if spec.cache else "forward")


@each(BUILT)
def test_nothing_spills_and_products_do_not_wait_for_each_other(dims: tuple[int, int], name: str, dtype: str) -> None:
    # What the assembler says of products that wait for each other is an error, so that there is a binary at all.
    kernel = forward(dims, name, dtype)
    found = compiled(kernel).resources
    assert (found.spill_bytes, found.static_smem_bytes) == (0, 0)
    # Products of blocks with non-finite values keep O and P in arrays.
    assert found.stack_bytes <= 4 * (int(kernel.constant("head_dim_v")) // 2 + int(kernel.constant("tile_kv")) // 4)


@each(BUILT)
def test_no_thread_uses_memory_of_its_own_while_products_run(dims: tuple[int, int], name: str, dtype: str) -> None:
    steps = code(forward(dims, name, dtype))
    for at, line in enumerate(steps.lines):
        if is_product(line):
            passed, _ = steps.may_follow(at, lambda line: is_wait(line) and line.endswith("0x0"))
            assert not has_own_memory([steps.lines[i] for i in passed])


@each(BUILT)
def test_consumers_get_the_registers_of_the_producer(dims: tuple[int, int], name: str, dtype: str) -> None:
    kernel = forward(dims, name, dtype)
    found = [line for line in machine_code(kernel) if line.startswith("USETMAXREG")]
    gives, takes = (next(line for line in found if word in line) for word in ("DEALLOC", "TRY_ALLOC"))
    assert len(found) == 2
    assert int(gives.split()[-1], 16) == kernel.constant("producer_registers")
    assert int(takes.split()[-1], 16) == kernel.constant("consumer_registers")


def is_wait(line: str) -> bool:
    """Whether it waits for products."""
    return line.startswith("WARPGROUP.DEPBAR")


def is_exponential(line: str) -> bool:
    return line.startswith("MUFU.EX2")


def copies_of(kernel: KernelPlan) -> int:
    """Steps in the code: by itself, and in the loop, where two consumers have two that round P to other registers."""
    return 3 if kernel.constant("consumers") == 2 else 2


def is_rounding(line: str) -> bool:
    return line.startswith("F2FP")


@each(BUILT)
def test_there_are_as_many_products_as_the_plan_says(dims: tuple[int, int], name: str, dtype: str) -> None:
    kernel = forward(dims, name, dtype)
    keys = int(kernel.constant("tile_kv"))
    pattern = re.compile(r"HGMMA\.64x(\d+)x16\.F32\S* R\d+, (gdesc|R)")
    found = Counter(match.groups() for line in machine_code(kernel) if (match := pattern.search(line)))
    columns, values = int(kernel.constant("head_dim")), int(kernel.constant("head_dim_v"))
    assert found == {
        # The first scores of a stream, and those of a step.
        (str(keys), "gdesc"): copies_of(kernel) * columns // 16,
        # A step's output with the next scores, and alone.
        (str(values), "R"): copies_of(kernel) * keys // 16,
    }
    assert sum("HGMMA" in line for line in machine_code(kernel)) == sum(found.values())


@each([build for build in BUILT if forward(*build).constant("consumers") == 2])
def test_exponentials_stand_before_the_wait_for_the_output(dims: tuple[int, int], name: str, dtype: str) -> None:
    kernel = forward(dims, name, dtype)
    steps = code(kernel)
    # 64 rows of as many columns as keys, divided among 128 threads.
    in_tile = int(kernel.constant("tile_kv")) // 2
    # Each of the two steps in the loop's body waits for its scores alone, and then for the output.
    scores_came = [i for i, line in enumerate(steps.lines) if is_wait(line) and line.endswith("0x1")]
    assert len(scores_came) == 2
    for came in scores_came:
        passed, waits = steps.may_follow(came, is_wait)
        assert sum(is_exponential(steps.lines[i]) for i in passed) >= in_tile
        assert sum(is_rounding(steps.lines[i]) for i in passed) >= in_tile // 2
        for wait in waits:
            assert steps.lines[wait].endswith("0x0")
            after, _ = steps.may_follow(wait, is_product)
            assert sum(is_exponential(steps.lines[i]) for i in after) < in_tile


@each([build for build in BUILT if forward(*build).constant("consumers") == 3])
def test_three_consumers_wait_for_both_products_at_once(dims: tuple[int, int], name: str, dtype: str) -> None:
    waits = [line for line in machine_code(forward(dims, name, dtype)) if is_wait(line)]
    assert waits
    assert all(line.endswith("0x0") for line in waits)


#: Multipliers of Philox, signed or not.
PHILOX = re.compile(r"0xd2511f53|-0x2daee0ad|0xcd9e8d57|-0x326172a9")


@each(BUILT)
def test_features_that_a_spec_does_not_have_leave_nothing_behind(dims: tuple[int, int], name: str, dtype: str) -> None:
    kernel = forward(dims, name, dtype)
    lines = machine_code(kernel)
    assert any(PHILOX.search(line) for line in lines) == kernel.spec.dropout
    # TMA reads Q, K and V. Only the lengths and pages of sequences, the dropout state and captured tensors are loaded.
    loads = kernel.own_lengths != "" or kernel.spec.dropout or bool(kernel.spec.tensors)
    assert any(re.match(r"LDG\b", line) for line in lines) == loads


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


@each([build for build in BUILT if build[1].startswith("pages")])
def test_pages_are_looked_up_before_the_wait_for_an_empty_slot(dims: tuple[int, int], name: str, dtype: str) -> None:
    # A lookup after the wait would delay the copies of every block of keys.
    lines = machine_code(forward(dims, name, dtype))
    copies = [i for i, line in enumerate(lines) if line.startswith("UTMALDG")]
    assert copies
    for copy in copies:
        last = {
            line.split(".")[0]: i for i, line in enumerate(lines[:copy]) if line.startswith(("LDG", "SYNCS.PHASECHK"))
        }
        assert last["LDG"] < last["SYNCS"]


@each([build for build in BUILT if build[1] == "slopes"])
def test_distances_are_turned_into_floats_once_for_a_tile(dims: tuple[int, int], name: str, dtype: str) -> None:
    kernel = forward(dims, name, dtype)
    # Each copy of a step converts one, and each copy of the epilogue converts the powers of two in two sums.
    assert sum(line.startswith("I2FP") for line in machine_code(kernel)) <= copies_of(kernel) * (1 + 2)


def test_every_row_of_the_table_is_compiled_in_every_way() -> None:
    assert {dims for dims, _, _ in BUILDS} == {*HEAD_DIMS, *ODD_DIMS}
    plans = [forward(*build) for build in BUILDS]
    assert {"block_sparse" in plan.switches for plan in plans} == {False, True}
    assert {plan.own_lengths for plan in plans} >= {"", "packed", "cached"}
    assert {plan.applies_dropout for plan in plans} == {plan.evaluates_sink for plan in plans} == {False, True}
    forms = [plan.score for plan in plans if plan.score is not None]
    assert {form.in_products for form in forms} == {False, True}
    assert {"o" in plan.smem.names for plan in plans} == {False, True}
    assert set(SAMPLE) <= set(BUILDS)
