"""Planning sums of dQ that are the same bits in every run, on Hopper: who adds when, and what that takes."""

from __future__ import annotations

import pytest

import flashgen as fg
from flashgen.plan import plan, workspaces
from flashgen.plan.model.choices import choice_lines
from flashgen.plan.model.plans import Problem
from flashgen.render.summary import header
from tests.plan.test_backward_sm90 import ARCH, MASKS, backward


@pytest.mark.parametrize("mask", MASKS)
def test_dq_is_added_in_order_where_that_is_promised_and_nowhere_else(mask: str) -> None:
    """By what else the plan says, which has a turn for each tile of queries and more heads in work at a time."""
    for promised in (False, True):
        made = plan(fg.AttentionSpec(128, mask=MASKS[mask], deterministic=promised), None, ARCH)
        prepare, main = made.kernel("prepare"), made.kernel("main")
        assert main.algorithm == "FlashAttention-3"
        tiles = -(-1000 // int(main.constant("tile_q")))
        found = workspaces(made, Problem(3, 8, 2, 1000, 77)).get("dq_semaphore", 0)
        assert found == (3 * 8 * tiles if promised else 0)
        for kernel in (prepare, main):
            assert ("ordered" in kernel.switches) == ("dq_semaphore" in kernel.params.names) == promised
        regions = {region.name for region in main.smem.regions}
        assert ({"dq_barriers", "sum"} <= regions) == promised
        assert ("added_slowly" in regions) == (promised and mask != "full")
        if promised:
            assert main.constant("section_heads") == 16
        words = " ".join(header(main).replace("//", "").split())
        assert ("two add dQ to its sum in order, and one finishes it" in words) == promised


@pytest.mark.parametrize("mask", MASKS)
def test_tiles_of_keys_add_in_groups_where_the_first_ones_are_the_longest(mask: str) -> None:
    """With a left end, or holes, there are tiles before one that do not add where it does."""
    for promised in (False, True):
        main = backward(mask=MASKS[mask], deterministic=promised)
        groups = {c.name: c.value for c in main.config}.get("order_group")
        assert groups == (8 if promised and mask == "causal" else None)
        lines = [line for line in choice_lines(main) if "tiles of keys add in groups of 8" in line]
        assert len(lines) == (groups is not None)
