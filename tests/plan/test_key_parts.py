"""Into how many parts the last tiles of keys are cut."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

import flashgen as fg
from flashgen.launch.call import tile_counts
from flashgen.plan import plan, workspaces
from flashgen.plan.key_parts import KeyParts
from flashgen.plan.model import Problem

ARCH = "sm_90a"


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    batch=st.integers(0, 40),
    heads_kv=st.integers(0, 40),
    group=st.integers(1, 4),
    len_q=st.integers(0, 9000),
    len_kv=st.integers(0, 9000),
    tile_q=st.sampled_from([64, 128]),
    blocks=st.integers(1, 132),
)
def test_parts_end_sooner_than_whole_tiles_and_have_steps(
    batch: int, heads_kv: int, group: int, len_q: int, len_kv: int, tile_q: int, blocks: int
) -> None:
    problem = Problem(batch, heads_kv * group, heads_kv, len_q, len_kv)
    cuts = KeyParts(128, tile_q, 128 * 2 * 128, blocks)
    tiles, parts, whole = batch * heads_kv * -(-len_kv // 128), cuts.parts(problem), cuts.whole_tiles(problem)
    if parts == 1:
        assert whole == tiles
        assert cuts.floats(problem) == 0
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
    # For each tile sums of dK and dV, and for each warp a count; the copy engine takes all of it in whole lines.
    assert cuts.floats(problem) % 512 == 0
    assert 0 <= cuts.floats(problem) - (tiles - whole) * (128 * 2 * 128 + 8) < 512
    assert cuts.floats(problem) * 4 < blocks * 132e3


@pytest.mark.parametrize(
    ("head_dim", "length", "parts", "cut"),
    [(128, 512, 1, 0), (128, 4096, 5, 68), (128, 16384, 9, 68), (64, 16384, 32, 4)],
)
def test_sixteen_rounds_for_fifteen_and_a_half_are_not_taken(head_dim: int, length: int, parts: int, cut: int) -> None:
    made = plan(fg.AttentionSpec(head_dim), None, ARCH)
    heads = 2048 // head_dim
    counts = tile_counts(made.kernel("main"), Problem(16384 // length, heads, heads, length, length))
    assert (counts["tile_parts"], counts["tiles"] - counts["whole_tiles"]) == (parts, cut)  # type: ignore[operator]


def test_both_kernels_are_told_of_what_the_workspace_has_behind_the_sums_of_dq() -> None:
    made = plan(fg.AttentionSpec(128), None, ARCH)
    problem = Problem(4, 16, 16, 4096, 4096)
    prepare, main = (tile_counts(made.kernel(role), problem) for role in ("prepare", "main"))
    assert prepare["sum_heads"] == main["sum_heads"]
    sums = int(str(main["sum_heads"])) * 4096 * 128
    assert workspaces(made, problem)["dq_accum"] == sums + int(str(prepare["part_floats"]))


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
        assert not {"whole_tiles", "tile_parts", "part_floats"} & set(kernel.params.names)
        assert "part_floats" not in tile_counts(kernel, problem)
