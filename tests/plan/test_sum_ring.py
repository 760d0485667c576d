"""How many heads there are sums of dQ for."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

import flashgen as fg
from flashgen.launch.call.prepared import tile_counts
from flashgen.plan import plan, workspaces
from flashgen.plan.model.plans import Problem
from flashgen.plan.model.sum_ring import SumRing


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    batch=st.integers(0, 40),
    heads_kv=st.integers(0, 40),
    group=st.integers(1, 4),
    len_kv=st.integers(0, 5000),
    section_heads=st.sampled_from([1, 16]),
    blocks=st.integers(0, 132),
)
def test_heads_that_are_worked_on_at_once_never_share_a_sum(
    batch: int, heads_kv: int, group: int, len_kv: int, section_heads: int, blocks: int
) -> None:
    problem = Problem(batch, heads_kv * group, heads_kv, 77, len_kv)
    heads = SumRing(128, section_heads, blocks).heads(problem)
    assert heads % group == 0
    heads //= group
    # All of a section are; a section that waited for itself would wait for ever.
    assert heads == batch * heads_kv or heads >= section_heads
    assert heads <= batch * heads_kv
    # Nobody waits for a head whose tiles the blocks are still busy with.
    tiles = -(-len_kv // 128) or 1
    assert heads == batch * heads_kv or heads * tiles >= 2 * blocks


def test_the_workspace_does_not_grow_with_heads_that_are_not_under_way() -> None:
    made = plan(fg.AttentionSpec(128), None, "sm_90a")
    # As many rounds of tiles, with none left over.
    few, many = (Problem(batch, 33, 33, 512, 512) for batch in (8, 64))
    assert workspaces(made, few)["dq_accum"] == workspaces(made, many)["dq_accum"] < 25e6 / 4
    assert workspaces(made, many)["head_counts"] == 1 + 2 * 64 * 33


def test_both_kernels_get_the_same_number_of_heads() -> None:
    made = plan(fg.AttentionSpec(64, mask=fg.causal()), None, "sm_90a")
    problem = Problem(9, 24, 12, 300, 700)
    counts = {tile_counts(made.kernel(role), problem)["sum_heads"] for role in ("prepare", "main")}
    (heads,) = counts
    tiles = -(-300 // int(made.kernel("main").constant("tile_q")))
    floats = int(made.kernel("prepare").constant("workspace_floats"))
    assert workspaces(made, problem)["dq_accum"] == int(heads) * tiles * floats


@pytest.mark.parametrize("mask", [fg.full(), fg.causal()], ids=["full", "causal"])
def test_where_dq_is_added_in_order_all_heads_have_a_sum(mask: fg.Mask) -> None:
    made = plan(fg.AttentionSpec(128, mask=mask, deterministic=True), None, "sm_90a")
    assert [kernel.role for kernel in made.kernels if kernel.pass_ == "backward"] == [
        "prepare",
        "main",
        *([] if mask.is_full else ["repair"]),
    ]
    assert all(kernel.sums is None for kernel in made.kernels)
    found = workspaces(made, Problem(64, 16, 16, 512, 512))
    assert found["dq_accum"] == 64 * 16 * 512 * 128
    assert "head_counts" not in found
    # Nobody clears sums, or waits for another head's place.
    main = made.kernel("main")
    finishers = {"sums", "dq_rows", "zeros", "turn_barriers"}
    assert not finishers & {region.name for region in main.smem.regions}
    assert not {"head_counts", "sum_heads", "dq_accum_map"} & set(main.params.names)
    assert finishers <= {
        region.name for region in plan(fg.AttentionSpec(128), None, "sm_90a").kernel("main").smem.regions
    }
