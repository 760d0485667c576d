"""The backward kernels for Hopper of wide heads as machine code: nothing of a loop spills, products are as many as the
plan says, and exponentials run while products do.

A developer's run compiles a few specs; DRAWN_CASES=ci or nightly compiles all of them.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import product

import pytest

from flashgen.plan import plan
from flashgen.plan.hopper.backward_tiles import WIDE_DIMS
from flashgen.plan.model.plans import KernelPlan
from tests.compile.machine_code import (
    compiled,
    each_kernel,
    has_own_memory,
    is_product,
    machine_code,
    products,
)
from tests.compile.test_forward_sm90 import CASES

pytestmark = pytest.mark.in_turns(12)

#: head_dim and head_dim_v, spec, dtype, role.
Build = tuple[tuple[int, int], str, str, str]
BUILDS: list[Build] = [
    (dims, name, dtype, role)
    for dims, name, dtype, role in product(WIDE_DIMS, CASES, ("bf16", "fp16"), ("main", "query"))
    if dtype == "bf16" or name in ("full", "causal")
]
#: What the narrower kernels have specs of their own for.
MORE = {
    "dropout, causal": replace(CASES["causal"], dropout=True),
    "packed, causal": replace(CASES["causal"], varlen=True),
    "packed, dropout": replace(CASES["causal"], varlen=True, dropout=True),
}
BUILDS += [(dims, name, "bf16", role) for dims, name, role in product(WIDE_DIMS, MORE, ("main", "query"))]
SAMPLE: list[Build] = [
    ((256, 256), name, "bf16", role) for name in ("causal", "packed, dropout") for role in ("main", "query")
]
#: What spills in the loop, and how many bytes at most: scores that read something for each pair, or a number of the
#: call, for whose addresses and values there are no registers beside sums of so many columns.
SPILLS: dict[Build, int] = {
    ((192, 128), "bias alone", "bf16", "query"): 32,
    ((192, 128), "bias", "bf16", "query"): 16,
    ((192, 192), "bias alone", "bf16", "query"): 32,
    ((192, 192), "bias", "bf16", "query"): 16,
    ((256, 256), "softcap of a call", "bf16", "query"): 56,
    ((256, 256), "bias alone", "bf16", "main"): 8,
    ((256, 256), "bias alone", "bf16", "query"): 148,
    ((256, 256), "bias, softcap", "bf16", "query"): 160,
    ((256, 256), "wide bias", "bf16", "query"): 160,
    ((256, 256), "bias", "bf16", "query"): 132,
}
BUILT = SAMPLE if os.environ.get("DRAWN_CASES", "sample") == "sample" else BUILDS


def every(builds: list[Build]) -> pytest.MarkDecorator:
    ids = ["x".join(map(str, dims)) + f" {' '.join(rest)}" for dims, *rest in builds]
    return each_kernel(("build",), [(id_, (build,)) for id_, build in zip(ids, builds, strict=True)])


each = every(BUILT)


@cache
def kernel_of(build: Build) -> KernelPlan:
    dims, name, dtype, role = build
    spec = replace((CASES | MORE)[name], head_dim=dims[0], head_dim_v=dims[1], dtype=dtype)
    return plan(spec, None, "sm_90a").kernel(role)


@each
def test_products_wait_for_each_other_nowhere(build: Build) -> None:
    assert not re.findall(r"C75\d\d", compiled(kernel_of(build)).log)


@every([build for build in BUILT if build not in SPILLS and not build[1].startswith("packed")])
def test_nothing_spills(build: Build) -> None:
    found = compiled(kernel_of(build)).resources
    assert (found.spill_bytes, found.stack_bytes) == (0, 0)


@every([build for build in BUILT if build not in SPILLS])
def test_nothing_of_the_loop_has_memory_of_its_own(build: Build) -> None:
    lines = machine_code(kernel_of(build))
    first, last = products(lines)
    assert not has_own_memory(lines[first:last])


@each
def test_there_are_as_many_products_as_the_plan_says(build: Build) -> None:
    (dim, dim_v), role, kernel = build[0], build[3], kernel_of(build)
    queries, keys = int(kernel.constant("tile_q")), int(kernel.constant("tile_kv"))
    pattern = re.compile(r"HGMMA\.64x(\d+)x16\.F32\S* R\d+, (gdesc|R)")
    found = Counter(match.groups() for line in machine_code(kernel_of(build)) if (match := pattern.search(line)))
    wanted: Counter[tuple[str, str]] = Counter()
    # S and dP of the first step, and of the next one; the sums of a step, and of the last one.
    wanted[str(queries if role == "main" else keys), "gdesc"] += 2 * (dim + dim_v) // 16
    if role == "main":
        wanted[str(dim_v), "R"] += 2 * queries // 16
        wanted[str(dim), "R"] += 2 * queries // 16
    else:
        wanted[str(dim), "R"] += 2 * keys // 16
    assert found == wanted
    assert sum(is_product(line) for line in machine_code(kernel_of(build))) == sum(found.values())


@every([build for build in BUILT if build[3] == "query"])
def test_exponentials_run_while_something_is_multiplied(build: Build) -> None:
    """Where dQ is made, dP is issued in front of them and waited for behind them; where dK and dV are, they run while
    the other consumer's products do."""
    lines = machine_code(kernel_of(build))
    first, last = products(lines)
    exponentials = [i for i in range(first, last) if lines[i].startswith("MUFU.EX2")]
    waits = [i for i in range(first, last) if lines[i].startswith("WARPGROUP.DEPBAR")]
    assert len(exponentials) >= 2 * 64 * int(kernel_of(build).constant("tile_kv")) // 128
    for i in exponentials:
        before = [lines[wait] for wait in waits if wait < i]
        assert before
        assert before[-1].endswith("0x1")


def test_every_row_of_the_table_is_compiled_in_every_way() -> None:
    assert {build[0] for build in BUILDS} == set(WIDE_DIMS)
    assert set(SAMPLE) <= set(BUILDS)
    for role in ("main", "query"):
        kernels = [kernel_of(build) for build in BUILDS if build[3] == role]
        assert {"block_sparse" in kernel.switches for kernel in kernels} == {False, True}
        assert {kernel.divides_by_scale for kernel in kernels} == {False, True}
        assert any(kernel.score for kernel in kernels)


@pytest.mark.skipif(BUILT is SAMPLE, reason="a developer's run compiles other specs; DRAWN_CASES=ci compiles these")
def test_no_spec_is_excused_that_has_no_need_of_it() -> None:
    for build, most in SPILLS.items():
        assert build in BUILDS
        assert 0 < compiled(kernel_of(build)).resources.spill_bytes <= most
