"""Planning the backward kernels of wide heads for Hopper: one keeps keys and computes dK and dV, one keeps queries and
computes dQ. Together they take seven products instead of five, but all accumulators stay in registers."""

from __future__ import annotations

from flashgen.plan.hopper.backward_frame import BackwardSm90
from flashgen.plan.hopper.backward_tiles import TILE_Q, keys_kernel, query_kernel
from flashgen.plan.hopper.units import ROWS
from flashgen.plan.model import params
from flashgen.plan.model.budget import chosen
from flashgen.plan.model.failed_tiles import FailedTiles
from flashgen.plan.model.plans import Box, Constant, KernelPlan


def plan_wide_sm90(frame: BackwardSm90) -> tuple[KernelPlan, ...]:
    """The kernels, in the order in which they run."""
    failures = frame.failures(TILE_Q, ROWS)
    main = _main(frame, failures)
    tile_q = int(main.constant("tile_q"))
    return frame.prepare(tile_q, "registers", failures=failures), main, _query(frame, tile_q, failures)


def _main(frame: BackwardSm90, failures: FailedTiles | None) -> KernelPlan:
    """dK and dV."""
    choice = chosen(keys_kernel(frame.padded, frame.arch), "main backward")
    tiles = choice.tiles
    return frame.products(
        "main",
        "hopper/backward_keys.cu.j2",
        choice,
        tile_q=tiles.rows,
        tile_kv=ROWS,
        over="kv",
        config_type="BackwardKeysConfig",
        config=frame.constants(
            choice,
            Constant("stored_columns", frame.spec.head_dim, "of dK"),
            Constant("stored_columns_v", frame.spec.head_dim_v, "of dV"),
            Constant("tile_q", tiles.rows, "B_r: query rows per step"),
            Constant("tile_kv", ROWS, "B_c: keys per tile that a block works on"),
            Constant("q_stages", tiles.count("Q"), "slots for Q"),
            Constant("do_stages", tiles.count("dO"), "slots for dO"),
            Constant("p_stages", tiles.count("P"), "slots for P"),
            share=": one sums dV, one dK",
        ),
        table=params.KEYS_SM90[failures is not None],
        boxes=(Box("row_stats", 1, tiles.rows, swizzle=0, element="fp32"),),
        failures=failures,
    )


def _query(frame: BackwardSm90, stats_rows: int, failures: FailedTiles | None) -> KernelPlan:
    """dQ."""
    choice = chosen(query_kernel(frame.padded, frame.arch), "dQ")
    tiles = choice.tiles
    return frame.products(
        "query",
        "hopper/backward_query.cu.j2",
        choice,
        tile_q=TILE_Q,
        tile_kv=tiles.rows,
        over="q",
        config_type="BackwardQueryConfig",
        config=frame.constants(
            choice,
            Constant("stored_columns", frame.spec.head_dim, "of dQ"),
            Constant("tile_q", TILE_Q, "B_r: query rows per tile that a block works on"),
            Constant("tile_kv", tiles.rows, "B_c: keys per step"),
            Constant("k_stages", tiles.count("K"), "slots for K"),
            Constant("v_stages", tiles.count("V"), "slots for V"),
            Constant("stats_rows", stats_rows, "queries per row of row_stats"),
            share=", 64 query rows each",
        ),
        table=params.QUERY_SM90[failures is not None],
        failures=failures,
    )
