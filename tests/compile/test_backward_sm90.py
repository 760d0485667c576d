"""The main backward kernel for Hopper as machine code: nothing of the loop spills, products are as many as the plan
says, and exponentials run while products do.

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
from flashgen.plan.hopper.backward_tiles import NARROW_DIMS
from flashgen.plan.model.plans import KernelPlan
from tests.compile.machine_code import compiled, has_own_memory, is_product, machine_code, products
from tests.compile.test_forward_sm90 import CASES, Build, each

pytestmark = pytest.mark.in_turns(12)

SPECS = {
    **CASES,
    **{f"{name}, ordered": replace(CASES[name], deterministic=True) for name in ("full", "causal", "documents")},
    "dropout, causal": replace(CASES["causal"], dropout=True),
    **{f"packed, {name}": replace(CASES[name], varlen=True) for name in ("full", "causal")},
    "packed, dropout": replace(CASES["causal"], varlen=True, dropout=True),
    "packed, dropout, ordered": replace(CASES["causal"], varlen=True, dropout=True, deterministic=True),
}
BUILDS: list[Build] = [
    (dims, name, dtype)
    for dims, name, dtype in product(NARROW_DIMS, SPECS, ("bf16", "fp16"))
    # fp16 multiplies dS in float32, which is the only difference.
    if dtype == "bf16" or name.startswith(("full", "causal", "documents", "slopes"))
]
SAMPLE: list[Build] = [
    ((128, 128), "causal", "bf16"),
    ((64, 64), "documents", "bf16"),
    ((64, 64), "bias alone", "bf16"),
    ((96, 96), "slopes", "fp16"),
    ((128, 128), "causal, ordered", "bf16"),
    ((128, 128), "dropout, causal", "bf16"),
    ((64, 64), "packed, causal", "bf16"),
    ((128, 128), "packed, dropout, ordered", "bf16"),
]
BUILT = SAMPLE if os.environ.get("DRAWN_CASES", "sample") == "sample" else BUILDS
#: What spills in the loop, and how many bytes at most: scores that read something for each pair.
SPILLS: dict[Build, int] = {
    ((64, 64), "bias alone", "bf16"): 44,
    ((64, 64), "wide bias", "bf16"): 20,
    ((64, 64), "bias, softcap", "bf16"): 124,
    ((128, 128), "bias, documents", "bf16"): 24,
}


@cache
def main(dims: tuple[int, int], name: str, dtype: str) -> KernelPlan:
    spec = replace((SPECS | CASES)[name], head_dim=dims[0], head_dim_v=dims[1], dtype=dtype)
    return plan(spec, None, "sm_90a").kernel("main")


@each(BUILT)
def test_products_wait_for_each_other_nowhere(dims: tuple[int, int], name: str, dtype: str) -> None:
    # What the assembler says of most waits of its own is an error; there is none at all.
    found = compiled(main(dims, name, dtype))
    assert not re.findall(r"C75\d\d", found.log)
    assert found.resources.static_smem_bytes == 0


@each([build for build in BUILT if build not in SPILLS and not build[1].startswith("packed")])
def test_nothing_spills(dims: tuple[int, int], name: str, dtype: str) -> None:
    found = compiled(main(dims, name, dtype)).resources
    assert (found.spill_bytes, found.stack_bytes) == (0, 0)


@each([build for build in BUILT if build[1].startswith("packed")])
def test_of_packed_sequences_only_the_producer_s_warps_spill(dims: tuple[int, int], name: str, dtype: str) -> None:
    """They count the tiles of sequences, once for each tile. The consumers begin where they take registers."""
    lines = machine_code(main(dims, name, dtype))
    begin = next(i for i, line in enumerate(lines) if "USETMAXREG.TRY_ALLOC" in line)
    assert not has_own_memory(lines[begin : products(lines)[1]])


@each([build for build in BUILT if build not in SPILLS])
def test_nothing_of_the_loop_has_memory_of_its_own(dims: tuple[int, int], name: str, dtype: str) -> None:
    lines = machine_code(main(dims, name, dtype))
    first, last = products(lines)
    assert not has_own_memory(lines[first:last])


@each([build for build in BUILT if build[1].endswith("ordered")])
def test_whoever_has_waited_for_a_turn_does_not_wait_for_memory_before_the_copy_engine_may_go_on(
    dims: tuple[int, int], name: str, dtype: str
) -> None:
    lines = machine_code(main(dims, name, dtype))
    fences = [i for i, line in enumerate(lines) if "FENCE.VIEW.ASYNC.G" in line]
    polls = [i for i, line in enumerate(lines) if line.startswith("LDG.E.STRONG.GPU")]
    assert fences
    for fence in fences:
        poll = max(i for i in polls if i < fence)
        assert not any("MEMBAR" in line for line in lines[poll:fence])


@each(BUILT)
def test_there_are_as_many_products_as_the_plan_says(dims: tuple[int, int], name: str, dtype: str) -> None:
    kernel = main(dims, name, dtype)
    queries, keys = int(kernel.constant("tile_q")), int(kernel.constant("tile_kv"))
    pattern = re.compile(r"HGMMA\.64x(\d+)x16\.F32\S* R\d+, (gdesc|R)")
    found = Counter(match.groups() for line in machine_code(kernel) if (match := pattern.search(line)))
    wanted: Counter[tuple[str, str]] = Counter()
    # S and dP of a step.
    wanted[str(queries), "gdesc"] += sum(dims) // 16
    # dQ of the step before, and of the last step; 64 columns of a row for each warpgroup.
    wanted["64", "gdesc"] += 2 * keys // 16
    # dV and dK of a step, of scores that are transposed: queries are summed over.
    wanted[str(dims[1]), "R"] += queries // 16
    wanted[str(dims[0]), "R"] += queries // 16
    assert found == +wanted
    assert sum(is_product(line) for line in machine_code(kernel)) == sum(found.values())


@each(BUILT)
def test_exponentials_run_while_dp_and_dv_are_multiplied(dims: tuple[int, int], name: str, dtype: str) -> None:
    """Half of dP is issued, then exponentials and what is made of them in turns; then dP is waited for, and not dV."""
    kernel = main(dims, name, dtype)
    queries = int(kernel.constant("tile_q"))
    lines = machine_code(kernel)
    first, last = products(lines)
    of_shared = [i for i in range(first, last) if is_product(lines[i], "gdesc")]
    # Scores, and then dP.
    dp = of_shared[dims[0] // 16 : sum(dims) // 16]
    dv = [i for i in range(dp[0], last) if is_product(lines[i], "R")][: queries // 16]
    exponentials = [i for i in range(first, last) if lines[i].startswith("MUFU.EX2")]
    # 64 rows of as many columns as queries, divided among 128 threads.
    assert len(exponentials) >= queries // 2
    assert dp[len(dp) // 2 - 1] < exponentials[0] < dp[-1]
    assert exponentials[-1] < dv[-1]
    assert sum(i > dv[0] for i in exponentials) >= queries // 16
    # Nobody waits for all products meanwhile, and dP is waited for while dV is on its way, 32 queries a group, and dQ
    # unless it comes last.
    under_way = queries // 32 + (not kernel.constant("dq_last"))
    waits = [i for i in range(dp[0], last) if lines[i].startswith("WARPGROUP.DEPBAR")]
    assert [lines[i] for i in waits if i < dv[-1] and lines[i].endswith("0x0")] == []
    assert lines[next(i for i in waits if i > dv[-1])].endswith(f"{under_way:#x}")


@each(BUILT)
def test_dS_of_bf16_is_multiplied_two_elements_at_a_time(dims: tuple[int, int], name: str, dtype: str) -> None:  # noqa: N802
    kernel = main(dims, name, dtype)
    packed = [line for line in machine_code(kernel) if re.match(r"HMUL2\S*BF16|HFMA2\S*BF16", line)]
    # 64 rows of as many columns as queries, divided among 128 threads.
    assert len(packed) == (int(kernel.constant("tile_q")) // 4 if dtype == "bf16" else 0)


def test_every_row_of_the_table_is_compiled_in_every_way() -> None:
    assert {dims for dims, _, _ in BUILDS} == set(NARROW_DIMS)
    switches = frozenset().union(*(main(*build).switches for build in BUILDS))
    assert switches >= {"block_sparse", "loads_ahead"}
    for name in ("presets_ahead", "dq_last"):
        assert {main(*build).constant(name) for build in BUILDS} == {False, True}
    for name in ("divides_by_scale", "adds_in_order"):
        assert {getattr(main(*build), name) for build in BUILDS} == {False, True}
    assert set(SAMPLE) <= set(BUILDS)


@pytest.mark.skipif(BUILT is SAMPLE, reason="a developer's run compiles other specs; DRAWN_CASES=ci compiles these")
def test_no_spec_is_excused_that_has_no_need_of_it() -> None:
    for build, most in SPILLS.items():
        assert build in BUILDS
        assert 0 < compiled(main(*build)).resources.spill_bytes <= most
