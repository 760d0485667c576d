"""What follows from a plan and the sizes of a call: alignment, workspace, grid, names, shared memory."""

from __future__ import annotations

import re
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import flashgen as fg
from flashgen.arch import ARCHS
from flashgen.plan import default_access_bytes, plan, workspaces
from flashgen.plan.model.plans import Problem
from flashgen.plan.model.smem import SmemLayout

sizes = st.integers(0, 5000)


@pytest.mark.parametrize(
    ("dim", "dim_v", "dtype", "expected"),
    [
        (128, 128, "fp16", 16),
        (8, 16, "bf16", 16),
        (4, 4, "fp32", 16),
        (128, 20, "fp16", 8),
        (12, 64, "bf16", 8),
        (2, 64, "fp16", 4),
        (1, 64, "fp32", 4),
        (64, 3, "fp16", 2),
        (1, 1, "fp16", 2),
    ],
)
def test_contiguous_rows_are_accessed_as_widely_as_divides_them(
    dim: int, dim_v: int, dtype: str, expected: int
) -> None:
    assert default_access_bytes(fg.AttentionSpec(dim, head_dim_v=dim_v, dtype=dtype)) == expected


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    batch=st.integers(0, 9),
    heads_kv=st.integers(0, 9),
    group=st.integers(1, 5),
    len_q=sizes,
    len_kv=sizes,
    dim=st.sampled_from([1, 40, 64, 128, 256]),
)
def test_the_workspace_is_what_the_prepare_kernel_clears(
    batch: int, heads_kv: int, group: int, len_q: int, len_kv: int, dim: int
) -> None:
    problem = Problem(batch, heads_kv * group, heads_kv, len_q, len_kv)
    made = plan(fg.AttentionSpec(dim), None, "sm_80")
    prepare, finish = made.kernel("prepare"), made.kernel("finish")
    tiles, heads, sequences = prepare.grid(problem)
    cleared = tiles * heads * sequences * int(prepare.constant("workspace_floats"))
    assert workspaces(made, problem)["dq_accum"] == cleared
    assert finish.grid(problem) == prepare.grid(problem)
    # Every query has its row, and no tile is wholly past the end.
    rows = tiles * int(prepare.constant("tile_q"))
    assert len_q <= rows < len_q + int(prepare.constant("tile_q"))
    assert cleared == batch * heads_kv * group * rows * ((dim + 15) // 16 * 16)


def test_what_needs_no_workspace_gets_none() -> None:
    problem = Problem(2, 4, 4, 100, 100)
    for spec in (fg.AttentionSpec(64, deterministic=True), fg.AttentionSpec(64, direction="forward")):
        assert "dq_accum" not in workspaces(plan(spec, None, "sm_80"), problem)


def test_a_block_per_tile_of_each_head_of_each_sequence() -> None:
    schedule = fg.Schedule(tile_q=64, backward=fg.BackwardSchedule(tile_q=32, tile_kv=128))
    problem = Problem(batch=3, heads_q=8, heads_kv=2, len_q=65, len_kv=257)
    made = plan(fg.AttentionSpec(64), schedule, "sm_90")
    grids = {k.role: k.grid(problem) for k in made.kernels}
    assert grids == {"forward": (2, 8, 3), "prepare": (3, 8, 3), "main": (3, 2, 3), "finish": (3, 8, 3)}
    deterministic = plan(fg.AttentionSpec(64, deterministic=True), schedule, "sm_90").kernel("query")
    assert deterministic.grid(problem) == (-(-65 // deterministic.grid_tile), 8, 3)
    assert made.kernel("forward").grid(Problem(1, 1, 1, 0, 9)) == (0, 1, 1)
    assert made.kernel("main").grid(Problem(1, 1, 1, 9, 0)) == (0, 1, 1)


def test_no_two_kernels_of_a_build_have_one_name() -> None:
    masks = (fg.full(), fg.causal(), fg.window(5, 0))
    names = {}
    for dim, dim_v, dtype, mask, deterministic, arch in product(
        (64, 7), (64, 9), ("fp16", "bf16", "fp32"), masks, (False, True), sorted(ARCHS)
    ):
        if (arch, dtype) == ("sm_75", "bf16"):
            continue
        spec = fg.AttentionSpec(dim, head_dim_v=dim_v, dtype=dtype, mask=mask, deterministic=deterministic)
        for kernel in plan(spec, None, arch).kernels:
            assert re.fullmatch(r"[a-z][a-z0-9_]*", kernel.name)
            key = (kernel.role, dim, dim_v, dtype, mask, arch, deterministic and kernel.role != "forward")
            assert names.setdefault(kernel.name, key) == key
    assert "forward_d64_causal_sm80" in names
    assert "backward_main_d7x9_fp16_window_deterministic_sm90a" in names


def test_regions_follow_one_another_and_later_phases_start_anew() -> None:
    layout = SmemLayout().then("a", 100).then("b", 256).then("c", 1).over("d", 300, "later")
    smem = layout.map()
    assert [(r.name, r.offset, r.bytes) for r in smem.regions] == [
        ("a", 0, 100),
        ("b", 128, 256),
        ("c", 384, 1),
        ("d", 0, 300),
    ]
    assert smem.bytes == 385
    assert smem["d"].note == "later"
    assert SmemLayout().then("a", 16).over("b", 999).map().bytes == 999
    assert SmemLayout().map().bytes == 0
    with pytest.raises(KeyError):
        smem["e"]
