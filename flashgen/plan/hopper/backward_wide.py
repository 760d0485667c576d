"""Planning the backward kernels of wide heads for Hopper: one keeps keys and computes dK and dV, one keeps queries and
computes dQ. Together they take seven products instead of five, but all accumulators stay in registers."""

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
    # Issuing a step's dV and dK before the next step's scores frees slots earlier, but exponentials overlap less. With
    # a score the registers of P are needed until it is rounded.
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
            Constant("q_slots", tiles.count("Q"), "slots for Q"),
            Constant("do_slots", tiles.count("dO"), "slots for dO"),
            Constant("p_slots", tiles.count("P"), "slots for P"),
            share=": one sums dV, one dK",
            own=(Constant("sums_first", sums_first, "dV and dK of a step are issued before the next step's scores"),),
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
            Constant("k_slots", tiles.count("K"), "slots for K"),
            Constant("v_slots", tiles.count("V"), "slots for V"),
            Constant("stats_rows", stats_rows, "queries per row of row_stats"),
            share=", 64 query rows each",
            own=(Constant("longest_first", frame.section_heads() > 1, "the last queries of a head go first"),),
        ),
        params=params.QUERY_SM90 if is_full else params.QUERY_SM90_MASKED,
        switches=() if is_full else ("inspector",),
    )
