"""The e4m3 forward kernel for Hopper as machine code: registers, products, and what runs while they do."""

from __future__ import annotations

import os
import re
from collections import Counter
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

import flashgen as fg
from flashgen.plan import plan
from flashgen.plan.hopper.forward_table import EIGHT_BITS
from flashgen.plan.model.plans import KernelPlan
from tests.compile.machine_code import code, compiled, each_kernel, machine_code
from tests.compile.test_forward_sm90 import is_exponential, is_product, is_rounding, is_wait

pytestmark = pytest.mark.in_turns(12)

SPEC = fg.AttentionSpec(64, dtype="e4m3", direction="forward")
BIAS = fg.bias(np.zeros((2, 2), np.float16))
CASES = {
    "full": SPEC,
    "causal": replace(SPEC, mask=fg.causal()),
    "window": replace(SPEC, mask=fg.window(300, 40)),
    "documents": replace(SPEC, mask=fg.causal() & fg.document(np.zeros((1, 1), np.int32))),
    "chunks": replace(SPEC, mask=fg.chunked(100)),
    "softcap": replace(SPEC, score=fg.softcap(30.0)),
    "softcap, causal": replace(SPEC, mask=fg.causal(), score=fg.softcap(30.0)),
    "sink": replace(SPEC, mask=fg.causal(), score=fg.sink(np.zeros(1, np.float32))),
    "slopes": replace(SPEC, mask=fg.causal(), score=fg.alibi(np.zeros(1, np.float32))),
    "bias": replace(SPEC, mask=fg.causal(), score=BIAS),
    "packed": replace(SPEC, mask=fg.causal(), varlen=True),
    "blocks of 64": replace(SPEC, scale_block=64),
    "blocks of 128": replace(SPEC, scale_block=128),
    "packed, blocks of 64": replace(SPEC, mask=fg.window(300, 40), varlen=True, scale_block=64),
}
BUILDS = [(dims, name) for dims in [*EIGHT_BITS, (80, 80), (208, 208)] for name in CASES]
SAMPLE = [((128, 128), "full"), ((64, 64), "full"), ((128, 128), "causal"), ((256, 256), "full"), ((96, 96), "softcap")]
BUILT = SAMPLE if os.environ.get("DRAWN_CASES", "sample") == "sample" else BUILDS


@cache
def forward(dims: tuple[int, int], name: str) -> KernelPlan:
    spec = replace(CASES[name], head_dim=dims[0], head_dim_v=dims[1])
    return plan(spec, None, "sm_90a").kernel("forward")


def each(builds: list[tuple[tuple[int, int], str]]) -> pytest.MarkDecorator:
    return each_kernel(
        ("dims", "name"), [("x".join(map(str, dims)) + f" {name}", (dims, name)) for dims, name in builds]
    )


@each(BUILT)
def test_nothing_spills_and_products_do_not_wait_for_each_other(dims: tuple[int, int], name: str) -> None:
    kernel = forward(dims, name)
    assert kernel.algorithm == "FlashAttention-3"
    found = compiled(kernel).resources
    assert (found.spill_bytes, found.static_smem_bytes) == (0, 0)
    # Products of blocks with non-finite values keep O and P in arrays.
    assert found.stack_bytes <= 4 * (int(kernel.constant("head_dim_v")) // 2 + int(kernel.constant("tile_kv")) // 8)


@each(BUILT)
def test_there_are_as_many_products_as_the_plan_says(dims: tuple[int, int], name: str) -> None:
    kernel = forward(dims, name)
    keys, values = int(kernel.constant("tile_kv")), int(kernel.constant("head_dim_v"))
    pattern = re.compile(r"QGMMA\.64x(\d+)x32\.F32\.E4M3\.E4M3 R\d+, (gdesc|R)")
    found = Counter(match.groups() for line in machine_code(kernel) if (match := pattern.search(line)))
    # Steps in the code: the first one and, if steps overlap, those in the loop, of which there are two if each rounds P
    # to registers of its own.
    overlaps = "overlaps_steps" in kernel.switches
    has_two_operands = kernel.constant("consumers") == 2 and keys // 2 + keys // 4 + values <= 200
    copies = 1 + overlaps * (2 if has_two_operands else 1)
    parts = 2 if values > 128 else 1
    assert found == {
        (str(keys), "gdesc"): copies * int(kernel.constant("head_dim")) // 32,
        (str(values // parts), "R"): copies * parts * keys // 32,
    }


def overlaps_own_products(dims: tuple[int, int], name: str) -> bool:
    kernel = forward(dims, name)
    return "overlaps_steps" in kernel.switches and kernel.constant("consumers") == 2


@each([build for build in BUILT if overlaps_own_products(*build)])
def test_exponentials_stand_before_the_wait_for_the_output(dims: tuple[int, int], name: str) -> None:
    kernel = forward(dims, name)
    steps = code(kernel)
    in_tile = int(kernel.constant("tile_kv")) // 2
    scores_came = [i for i, line in enumerate(steps.lines) if is_wait(line) and line.endswith("0x1")]
    assert scores_came
    for came in scores_came:
        passed, waits = steps.may_follow(came, is_wait)
        assert sum(is_exponential(steps.lines[i]) for i in passed) >= in_tile
        if len(scores_came) == 2:
            assert sum(is_rounding(steps.lines[i]) for i in passed) >= in_tile // 2
        for wait in waits:
            after, _ = steps.may_follow(wait, is_product)
            assert sum(is_exponential(steps.lines[i]) for i in after) < in_tile


@pytest.mark.parametrize("dim", [64, 128])
def test_a_step_without_a_mask_takes_few_instructions(dim: int) -> None:
    """For each probability an FFMA, an exponential, an addition to the row's sum, half a conversion, three eighths of a
    test whether it is too large, and few others."""
    kernel = forward((dim, dim), "full")
    in_tile = int(kernel.constant("tile_kv")) // 2
    runs = [run for run in code(kernel).straight() if sum(map(is_exponential, run)) == in_tile]
    assert runs
    assert all(len(run) <= in_tile * 3.875 + 12 for run in runs)


@each(BUILT)
def test_transposers_read_four_blocks_before_they_write_any(dims: tuple[int, int], name: str) -> None:
    """A load after a store must wait for it, because they might touch the same bytes."""
    runs = [run for run in code(forward(dims, name)).straight() if any("LDSM.16.MT88.4" in line for line in run)]
    if dims[1] % 128 == 0:
        (run,) = runs
        moves = [line[:4] for line in run if line.startswith(("LDSM", "STSM"))]
        assert moves == ["LDSM"] * 4 + ["STSM"] * 4
    assert runs
