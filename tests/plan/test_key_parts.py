"""Into how many parts the last tiles of keys are cut."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

import flashgen as fg
from flashgen.launch.call.prepared import tile_counts
from flashgen.plan import plan, workspaces
from flashgen.plan.model.key_parts import KeyParts
from flashgen.plan.model.plans import Problem
from flashgen.plan.model.sum_ring import SumRing

ARCH = "sm_90a"
SHAPES = {
    "batch": st.integers(0, 40),
    "heads_kv": st.integers(0, 40),
    "group": st.integers(1, 4),
    "len_q": st.integers(0, 9000),
    "len_kv": st.integers(0, 9000),
    "tile_q": st.sampled_from([64, 128]),
}


@settings(max_examples=300, deadline=None, derandomize=True)
@given(**SHAPES, blocks=st.integers(1, 132))
def test_parts_end_sooner_than_whole_tiles_and_have_steps(
    batch: int, heads_kv: int, group: int, len_q: int, len_kv: int, tile_q: int, blocks: int
) -> None:
    problem = Problem(batch, heads_kv * group, heads_kv, len_q, len_kv)
    cuts = KeyParts(128, tile_q, 128 * 2 * 128, tile_q * 128, blocks)
    tiles, parts, whole = batch * heads_kv * -(-len_kv // 128), cuts.parts(problem), cuts.whole_tiles(problem)
    if parts == 1:
        assert whole == tiles
        assert cuts.counts(problem) == 0
        return
    # All blocks have had as many whole tiles, and fewer are left than there are blocks.
    assert 0 < tiles - whole < blocks
    assert whole > 0
    assert whole % blocks == 0
    # A part and its number fit a byte, and none is without steps.
    assert parts <= 255
    steps = -(-len_q // tile_q) * group
    assert all(steps * (part + 1) // parts > steps * part // parts for part in range(parts))
    # The rounds of parts take less than the one of whole tiles.
    assert -(-(tiles - whole) * parts // blocks) * (steps / parts) < steps
    # A count for each tile and warp; TMA takes all of it in whole lines.
    assert cuts.counts(problem) % 512 == 0
    assert 0 <= cuts.counts(problem) - (tiles - whole) * 8 < 512


@settings(max_examples=300, deadline=None, derandomize=True)
@given(**SHAPES)
def test_sums_of_parts_find_place_where_dq_of_heads_was_summed_that_wait_for_no_part(
    batch: int, heads_kv: int, group: int, len_q: int, len_kv: int, tile_q: int
) -> None:
    problem = Problem(batch, heads_kv * group, heads_kv, len_q, len_kv)
    cuts = KeyParts(128, tile_q, 128 * 2 * 128, tile_q * 128)
    heads, tiles_of_head = batch * heads_kv, -(-len_kv // 128)
    places = SumRing(128, 1, cuts=cuts).heads(problem) // group
    cut = heads * tiles_of_head - cuts.whole_tiles(problem)
    counted, sums_of_head = cuts.heads(problem), cuts.sums_of_head(problem)
    assert sums_of_head * 128 * 2 * 128 <= group * -(-len_q // tile_q) * tile_q * 128
    assert counted * sums_of_head >= cut
    assert counted == 0 or (counted - 1) * sums_of_head < cut
    # All of its tiles are whole and begin before any part; nor does a head have a place twice at once.
    assert places <= heads
    assert counted <= places
    assert all((heads + i - places + 1) * tiles_of_head <= cuts.whole_tiles(problem) for i in range(counted))


@pytest.mark.parametrize(
    ("head_dim", "length", "parts", "cut"),
    [(128, 512, 1, 0), (128, 4096, 5, 68), (128, 16384, 9, 68), (64, 16384, 32, 4)],
)
def test_sixteen_rounds_for_fifteen_and_a_half_are_not_taken(head_dim: int, length: int, parts: int, cut: int) -> None:
    made = plan(fg.AttentionSpec(head_dim), None, ARCH)
    heads = 2048 // head_dim
    counts = tile_counts(made.kernel("main"), Problem(16384 // length, heads, heads, length, length))
    assert (counts["tile_parts"], counts["tiles"] - counts["whole_tiles"]) == (parts, cut)  # type: ignore[operator]


def test_both_kernels_get_what_the_workspace_has_behind_the_sums_of_dq() -> None:
    made = plan(fg.AttentionSpec(128), None, ARCH)
    problem = Problem(4, 16, 16, 4096, 4096)
    prepare, main = (tile_counts(made.kernel(role), problem) for role in ("prepare", "main"))
    assert prepare["sum_heads"] == main["sum_heads"]
    sums = int(str(main["sum_heads"])) * 4096 * 128
    assert workspaces(made, problem)["dq_accum"] == sums + int(str(prepare["part_counts"]))


@pytest.mark.parametrize(
    ("batch", "heads", "length", "parts"),
    [
        (2, 12, 1024, 2),
        (1, 10, 2048, 4),
        (1, 16, 1280, 4),
        (1, 3, 8448, 2),
        # The only head, or two of three, would have tiles that are cut: there are too few others for their sums.
        (1, 1, 20480, 1),
        (1, 3, 9216, 1),
    ],
)
def test_a_small_problem_takes_no_more_than_sums_of_all_heads(batch: int, heads: int, length: int, parts: int) -> None:
    made = plan(fg.AttentionSpec(128), None, ARCH)
    problem = Problem(batch, heads, heads, length, length)
    counts = tile_counts(made.kernel("main"), problem)
    assert counts["tile_parts"] == parts
    assert counts["sum_heads"] == batch * heads
    assert counts["part_heads"] == (0 if parts == 1 else -(-(batch * heads * length // 128 % 132) // (length // 256)))
    counters = -(-132 * 8 // 512) * 512
    assert workspaces(made, problem)["dq_accum"] <= batch * heads * length * 128 + counters


@pytest.mark.parametrize(
    "fields",
    [{"deterministic": True}, {"mask": fg.causal()}, {"mask": fg.window(100, 100)}, {"score": fg.softcap(30.0)}],
    ids=["in order", "causal", "window", "softcap"],
)
def test_nothing_is_cut_where_results_are_reproducible_or_tiles_differ(fields: dict[str, object]) -> None:
    made = plan(fg.AttentionSpec(128, **fields), None, ARCH)  # type: ignore[arg-type]
    problem = Problem(4, 16, 16, 4096, 4096)
    for role in ("prepare", "main"):
        kernel = made.kernel(role)
        assert kernel.sums is None or kernel.sums.cuts is None
        assert not {"whole_tiles", "tile_parts", "part_counts"} & set(kernel.params.names)
        assert "part_counts" not in tile_counts(kernel, problem)
