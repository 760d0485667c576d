"""Whatever is asked for is either planned, soundly, or refused in a sentence that says what to do instead."""

from __future__ import annotations

import os
import re
from itertools import pairwise, product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import flashgen as fg
from flashgen.arch import ARCHS
from flashgen.plan import plan
from flashgen.plan.model.plans import AttentionPlan, KernelPlan

LEVEL = os.environ.get("DRAWN_CASES", "sample")
ROLES = {
    (False, False): ["forward"],
    (False, True): ["forward"],
    (True, False): ["forward", "prepare", "main", "finish"],
    (True, True): ["forward", "prepare", "main", "query"],
}
#: Where TMA adds to dQ in order.
ORDERED_ROLES = ["forward", "prepare", "main", "finish"]
dims = st.one_of(st.sampled_from([16, 40, 64, 80, 96, 128, 160, 192, 256]), st.integers(1, 256))
distances = st.one_of(st.none(), st.integers(0, 300), st.just(2**63 - 1))
alignments = st.sampled_from(["bottom-right", "top-left"])
masks = st.one_of(
    st.just(fg.full()),
    st.builds(fg.causal, alignments),
    st.builds(lambda left, right, align: fg.window(left, right, align=align), distances, distances, alignments),
)
specs = st.builds(
    lambda dim, dim_v, **rest: fg.AttentionSpec(dim, head_dim_v=dim_v, **rest),
    dims,
    st.one_of(st.just(0), dims),
    dtype=st.sampled_from(["fp16", "bf16", "fp32"]),
    mask=masks,
    direction=st.sampled_from(["forward", "both"]),
    deterministic=st.booleans(),
)
tiles = st.one_of(st.none(), st.integers(1, 16).map(lambda n: 16 * n))
stages = st.one_of(st.none(), st.integers(1, 4))
counts = st.sampled_from([1, 2, 4, 8, 16])
schedules = st.one_of(
    st.none(),
    st.builds(
        fg.Schedule,
        tile_q=tiles,
        tile_kv=tiles,
        stages=stages,
        warps=st.one_of(st.none(), st.builds(fg.WarpPartition, st.sampled_from(["split_q", "split_k"]), counts)),
        backward=st.builds(
            fg.BackwardSchedule,
            tile_q=tiles,
            tile_kv=tiles,
            stages=stages,
            warps=st.one_of(st.none(), counts),
        ),
    ),
)
archs = st.sampled_from(sorted(ARCHS))
many = settings(max_examples=400, deadline=None, derandomize=True)


def constants(kernel: KernelPlan) -> dict[str, int]:
    return {c.name: int(c.value) for c in kernel.config}


def padded(dim: int) -> int:
    return (dim + 15) // 16 * 16


@many
@given(spec=specs, schedule=schedules, arch=archs, access=st.sampled_from([None, 2, 4, 8, 16]))
def test_a_spec_is_planned_or_refused_with_a_remedy(
    spec: fg.AttentionSpec, schedule: fg.Schedule | None, arch: str, access: int | None
) -> None:
    try:
        made = plan(spec, schedule, arch, access_bytes=access)
    except fg.PlanError as error:
        check_refusal(spec, schedule, arch, access, str(error))
        return
    is_ordered = any(k.adds_in_order for k in made.kernels)
    assert [k.role for k in made.kernels] == (
        ORDERED_ROLES if is_ordered else ROLES[spec.needs_backward, spec.deterministic]
    )
    asked = schedule or fg.Schedule()
    assert_honoured(asked, made.schedule, ("tile_q", "tile_kv", "stages", "warps"))
    if spec.needs_backward:
        assert_honoured(asked.backward, made.schedule.backward, ("tile_q", "tile_kv", "stages", "warps"))
    for kernel in made.kernels:
        check_kernel(made, kernel)
    if access is not None:
        assert {k.access_bytes for k in made.kernels} == {access}


def assert_honoured(asked: Any, made: Any, names: tuple[str, ...]) -> None:
    for name in names:
        value = getattr(asked, name)
        assert value is None or getattr(made, name) == value, name


def check_refusal(
    spec: fg.AttentionSpec, schedule: fg.Schedule | None, arch: str, access: int | None, sentence: str
) -> None:
    """The sentence says what to use instead, and what it says would fit does fit."""
    assert re.search(r"\buse \S", sentence), sentence
    offered = re.search(
        r"The (\S+) kernel .*What would fit: tile_q=(\d+), tile_kv=(\d+), stages=(\d+), warps=(\d+)\.$",
        sentence,
    )
    if offered is None:
        return
    tile_q, tile_kv, ring, warps = map(int, offered.groups()[1:])
    asked = schedule or fg.Schedule()
    if offered[1] == "forward":
        kind = asked.warps.kind if asked.warps else "split_q"
        remedy = fg.Schedule(tile_q, tile_kv, ring, fg.WarpPartition(kind, warps))
    else:
        remedy = fg.Schedule(backward=fg.BackwardSchedule(tile_q, tile_kv, ring, warps))
    # The remedy is for one kernel; another may not fit for reasons of its own.
    remaining = refusal(spec, remedy, arch, access)
    assert not remaining.startswith(f"The {offered[1]} kernel"), f"{sentence}\nbut then: {remaining}"


def refusal(spec: fg.AttentionSpec, schedule: fg.Schedule, arch: str, access: int | None) -> str:
    """Why it cannot be planned; empty when it can."""
    try:
        plan(spec, schedule, arch, access_bytes=access)
    except fg.PlanError as error:
        return str(error)
    return ""


def check_kernel(made: AttentionPlan, kernel: KernelPlan) -> None:
    assert re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", kernel.name)
    assert kernel.pass_ == ("forward" if kernel.role == "forward" else "backward")
    assert kernel.threads % 32 == 0
    assert 32 <= kernel.threads <= 1024
    assert len(set(kernel.params.names)) == len(kernel.params.names)
    assert all(reason and "  " not in reason for reason in kernel.reasons)
    if kernel.algorithm == "FlashAttention-3":
        # What those for Hopper must be is said by tests of their own.
        return
    check_shared_memory(made, kernel)
    c = constants(kernel)
    assert c["access_bytes"] == kernel.access_bytes
    assert (made.spec.head_dim * made.spec.element.bytes) % kernel.access_bytes == 0
    assert (made.spec.head_dim_v * made.spec.element.bytes) % kernel.access_bytes == 0
    if kernel.role == "prepare":
        return
    assert c["stages"] == 1 or (c["async_copy"] and kernel.arch.has_cp_async and kernel.access_bytes >= 4)
    assert (c["has_lower"], c["has_upper"]) == (made.spec.mask.has_lower, made.spec.mask.has_upper)
    assert kernel.threads == 32 * c["warps"]
    if kernel.role == "forward":
        check_forward(kernel, c)
    else:
        check_backward(kernel, c)


def check_shared_memory(made: AttentionPlan, kernel: KernelPlan) -> None:
    regions = kernel.smem.regions
    assert kernel.smem.bytes <= kernel.arch.max_smem_per_block
    assert len({r.name for r in regions}) == len(regions)
    assert all(r.bytes > 0 and r.offset % 128 == 0 for r in regions)
    # What starts at 0 again belongs to a later phase, which has the space to itself.
    first_phase = [r for i, r in enumerate(regions) if i == 0 or r.offset > 0]
    for one, next_ in pairwise(first_phase):
        assert one.offset + one.bytes <= next_.offset, (one, next_)
    needed = {r.name: r.bytes for r in regions}
    c, size = constants(kernel), made.spec.element.bytes
    if kernel.role in ("main", "query", "forward"):
        dim, dim_v = padded(c["head_dim"]), padded(c["head_dim_v"])
        over_keys = kernel.role != "main"
        key_slots, query_slots = (c["stages"], 1) if over_keys else (1, c["stages"])
        assert needed["k"] == key_slots * c["tile_kv"] * dim * size
        assert needed["v"] == key_slots * c["tile_kv"] * dim_v * size
        assert needed["q"] == query_slots * c["tile_q"] * dim * size


def check_forward(kernel: KernelPlan, c: dict[str, int]) -> None:
    split_k = bool(c["split_k"])
    rows = c["tile_q"] if split_k else c["tile_q"] // c["warps"]
    keys = c["tile_kv"] // c["warps"] if split_k else c["tile_kv"]
    assert rows * (1 if split_k else c["warps"]) == c["tile_q"]
    assert keys * (c["warps"] if split_k else 1) == c["tile_kv"]
    assert rows % 16 == keys % 16 == 0
    # Scores, output and, where they are kept, the fragments of Q leave a thread some registers to compute with.
    held = rows * padded(c["head_dim"]) / 2 / 32 if c["q_in_registers"] else 0
    assert rows * (keys + padded(c["head_dim_v"])) / 32 + held <= 224
    assert split_k == ("splitk" in kernel.name)


def check_backward(kernel: KernelPlan, c: dict[str, int]) -> None:
    dim, dim_v = padded(c["head_dim"]), padded(c["head_dim_v"])
    products = {
        "main": [
            (c["tile_q"], c["tile_kv"], "score_warps"),
            (c["tile_kv"], dim, "dk_warps"),
            (c["tile_kv"], dim_v, "dv_warps"),
            (c["tile_q"], dim, "dq_warps"),
        ],
        "query": [(c["tile_q"], c["tile_kv"], "score_warps"), (c["tile_q"], dim, "dq_warps")],
        "finish": [(c["tile_q"], dim, "dq_warps")],
    }[kernel.role]
    for rows, columns, name in products:
        above = c[name]
        assert above > 0
        assert c["warps"] % above == 0
        assert rows % (16 * above) == 0, name
        assert columns % (8 * (c["warps"] // above)) == 0, name
    if kernel.role == "main":
        accumulators = c["tile_kv"] * (dim + dim_v) + max(2 * c["tile_q"] * c["tile_kv"], c["tile_q"] * dim)
        assert accumulators / kernel.threads <= 224


def kinds(dim: int) -> list[tuple[fg.Mask, bool]]:
    """What a head dim is planned with; in a developer's run one for each, so that dims padded alike have them all."""
    every = list(product((fg.full(), fg.causal()), (False, True)))
    return every if LEVEL != "sample" else [every[(dim + dim // 16) % len(every)]]


@pytest.mark.parametrize("arch", sorted(ARCHS))
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_every_head_dim_is_planned_on_every_arch(arch: str, dtype: str) -> None:
    refused = []
    for dim in range(1, 257):
        for mask, deterministic in kinds(dim):
            spec = fg.AttentionSpec(dim, dtype=dtype, mask=mask, deterministic=deterministic)
            try:
                plan(spec, None, arch)
            except fg.PlanError as error:
                refused.append((dim, str(error)))
    if (arch, dtype) == ("sm_75", "bf16"):
        assert {dim for dim, _ in refused} == set(range(1, 257))
        assert all("sm_80" in sentence for _, sentence in refused)
    elif (arch, dtype) == ("sm_75", "fp32"):
        # 64 KiB of shared memory do not hold 16 rows each of K, V, Q and dO in float.
        assert {dim for dim, _ in refused} == set(range(241, 257))
        assert plan(fg.AttentionSpec(256, dtype="fp32", direction="forward"), None, arch)
    else:
        assert refused == []
