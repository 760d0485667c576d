"""Planning the backward kernels for Hopper of wide heads: one keeps keys and sums dK and dV, one keeps queries and sums
dQ. Seven products instead of five, but every sum stays in registers: nothing is added in memory."""

from __future__ import annotations

from flashgen.plan.hopper.backward_frame import BackwardSm90
from flashgen.plan.hopper.backward_tiles import TILE_Q, keys_kernel, query_kernel
from flashgen.plan.hopper.units import ROWS
from flashgen.plan.model import params
from flashgen.plan.model.budget import chosen
from flashgen.plan.model.plans import Box, Constant, KernelPlan


def plan_wide_sm90(frame: BackwardSm90) -> tuple[KernelPlan, ...]:
    """The kernels, in the order in which they run."""
    main = _main(frame)
    tile_q = int(main.constant("tile_q"))
    return frame.prepare(tile_q, params.PREPARE_WIDE_SM90), main, _query(frame, tile_q)


def _main(frame: BackwardSm90) -> KernelPlan:
    """dK and dV."""
    choice = chosen(keys_kernel(frame.spec, frame.arch), "main backward")
    tiles = choice.tiles
    # With a score P is rounded while its registers are still needed. Else it is a matter of how many tiles of queries
    # there are: slots are free earlier if a step's sum comes first, and exponentials overlap less.
    sums_first = tiles.count("Q") < 3 or not frame.scales
    return frame.products(
        "main",
        "backward_keys_sm90.cu.j2",
        choice,
        tile_q=tiles.rows,
        tile_kv=ROWS,
        over="kv",
        config_type="BackwardKeysConfig",
        config=frame.constants(
            choice,
            Constant("tile_q", tiles.rows, "B_r: query rows per step"),
            Constant("tile_kv", ROWS, "B_c: keys per tile that a block works on"),
            Constant("q_slots", tiles.count("Q"), "tiles of Q under way at once"),
            Constant("do_slots", tiles.count("dO"), "tiles of dO under way at once"),
            Constant("p_slots", tiles.count("P"), "tiles of P that wait for dS"),
            share=": one sums dV, one dK",
            own=(Constant("sums_first", sums_first, "a step's sum is issued before the next step"),),
        ),
        params=params.KEYS_SM90,
        boxes=(Box("row_stats", 1, tiles.rows, swizzle=0, element="fp32"),),
    )


def _query(frame: BackwardSm90, stats_rows: int) -> KernelPlan:
    """dQ."""
    choice = chosen(query_kernel(frame.spec, frame.arch), "dQ")
    tiles, is_full = choice.tiles, frame.spec.mask.is_full
    return frame.products(
        "query",
        "backward_query_sm90.cu.j2",
        choice,
        tile_q=TILE_Q,
        tile_kv=tiles.rows,
        over="q",
        config_type="BackwardQueryConfig",
        config=frame.constants(
            choice,
            Constant("tile_q", TILE_Q, "B_r: query rows per tile that a block works on"),
            Constant("tile_kv", tiles.rows, "B_c: keys per step"),
            Constant("k_slots", tiles.count("K"), "tiles of K under way at once"),
            Constant("v_slots", tiles.count("V"), "tiles of V under way at once"),
            Constant("stats_rows", stats_rows, "queries whose statistics lie together"),
            share=", 64 query rows each",
            own=(Constant("longest_first", frame.section_heads() > 1, "the last queries of a head go first"),),
        ),
        params=params.QUERY_SM90 if is_full else params.QUERY_SM90_MASKED,
        switches=() if is_full else ("inspector",),
    )
