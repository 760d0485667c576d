"""Planning the forward kernel for Hopper: warp-specialized and persistent, by wgmma and TMA."""

from __future__ import annotations

from flashgen.arch import Arch
from flashgen.errors import PlanError
from flashgen.plan.hopper.forward_table import Row
from flashgen.plan.hopper.forward_tiles import chosen_row, fault_of, has_mask, record_count, row_of, smem_of
from flashgen.plan.hopper.forward_traits import (
    changes_scores,
    has_any_cap,
    has_fine_cap,
    has_modest_cap,
    is_capped,
    is_in_products,
    mask_loads_per_pair,
)
from flashgen.plan.hopper.units import (
    HEAD_DIMS,
    PANEL,
    STORED_ROWS,
    TILE_SLOTS,
    WARPGROUP,
    is_block_sparse,
    made_for,
    why_not_hopper,
)
from flashgen.plan.model.naming import kernel_name
from flashgen.plan.model.params import FORWARD_SM90, FORWARD_SM90_SCORE
from flashgen.plan.model.plans import Box, Constant, KernelPlan
from flashgen.spec import AttentionSpec, Schedule, WarpPartition

#: Head dims times heads of a section, if tiles differ in length. More heads balance the blocks better, as long as K and
#: V stay in the L2 cache. Of 16, 32 and 64 heads, at S = 512, the fastest were 64 at D=64, 32 at 128 and 16 at 256.
_SECTION_COLUMNS = 4096
#: Up to this many keys per query head the last section has twice as many heads, which balances the blocks better.
#: Times relative to a single section, H200, causal, at D = 256, 128, 64: 512 keys .957, .989, 1.00; 1k .986, 1.009,
#: 1.006; 2k 1.000, 1.019, .994.
_KEYS_TO_DOUBLE = 640
#: Why the plan uses the running maximum although the schedule does not ask for it.
_BY_MAXIMA = (
    "Exponentials use the running maximum: under a cap that may be above 50 the row maximum keeps growing. Logits near "
    "the cap took up to 1.88 times as long as small ones with reference maxima, and 1.46 times with running maxima "
    "(H100, D=64, causal, 2k)."
)


def why_not(spec: AttentionSpec, schedule: Schedule, arch: Arch, access_bytes: int) -> str | None:
    """Why a spec cannot use this kernel and runs by the portable one, as a clause; None if it can."""
    if (reason := why_not_hopper(spec, schedule, arch, access_bytes)) is not None:
        return reason
    if (spec.head_dim, spec.head_dim_v) not in HEAD_DIMS:
        return f"it is {made_for(spec, HEAD_DIMS)}"
    if schedule.algorithm is None and schedule.warps is not None and schedule.warps.kind != "specialized":
        return f"warps={schedule.warps.kind!r} is a partition of the other kernels"
    if not _is_asked(schedule) and (fault := fault_of(spec, schedule, arch)) is not None:
        return f"it cannot be planned: {fault}".removesuffix(".")
    return None


def _is_asked(schedule: Schedule) -> bool:
    """Whether the schedule asks for this kernel, not only for sizes that the portable kernel has too."""
    by_warps = schedule.warps is not None and schedule.warps.kind == "specialized"
    return by_warps or schedule.algorithm == "fa3" or schedule.softmax is not None or schedule.registers is not None


def is_planned(spec: AttentionSpec, schedule: Schedule, arch: Arch, access_bytes: int) -> bool:
    """Whether to plan this kernel. Raises PlanError if the schedule asks for it and it cannot be planned."""
    reason = why_not(spec, schedule, arch, access_bytes)
    if reason is not None and _is_asked(schedule) and schedule.algorithm != "fa2":
        raise PlanError(f"algorithm='fa3' cannot be planned for {spec.describe()}: {reason}; leave algorithm out.")
    return reason is None


def plan_forward_sm90(spec: AttentionSpec, schedule: Schedule, arch: Arch) -> KernelPlan:
    """The forward kernel of a spec on Hopper."""
    fault = fault_of(spec, schedule, arch)
    if fault is not None:
        fits = row_of(spec)
        remedy = f"What would fit: tile_q={fits.tile_q}, tile_kv={fits.tile_kv}, stages={fits.stages}."
        raise PlanError(f"The forward kernel cannot be planned: {fault} {remedy}")
    row = chosen_row(spec, schedule, arch)
    smem = smem_of(spec, row)
    producer, consumer = row.register_split()
    has_end = spec.mask.has_upper or is_block_sparse(spec)
    capped = is_capped(spec)
    fine_cap, modest_cap = capped and has_fine_cap(spec), capped and has_modest_cap(spec)
    by_maxima = capped and not fine_cap and schedule.softmax is None
    running = by_maxima or schedule.softmax == "running-max"
    keeps = row.keeps_scores and not running
    in_products = is_in_products(spec)
    bounds_growth = capped and not running
    recompute_scores = not keeps and not running and not bounds_growth
    skips = row.tile_q > row.tile_kv
    return KernelPlan(
        name=kernel_name(
            spec,
            "forward",
            arch,
            "runningmax" if running else "",
            "modestcap" if modest_cap else "anycap" if capped and not fine_cap else "",
        ),
        pass_="forward",
        role="forward",
        algorithm="FlashAttention-3",
        template="forward_sm90.cu.j2",
        spec=spec,
        arch=arch,
        threads=WARPGROUP * (row.consumers + 1),
        config_type="ForwardSm90Config",
        config=(
            Constant("head_dim", spec.head_dim),
            Constant("head_dim_v", spec.head_dim_v),
            Constant("tile_q", row.tile_q, "B_r: query rows per block"),
            Constant("tile_kv", row.tile_kv, "B_c: keys per step"),
            Constant("stages", row.stages, "slots for V"),
            Constant("k_slots", row.k_slots, "slots for K"),
            Constant("non_finite_records", record_count(row), "tiles of V with a record of non-finite values"),
            Constant("q_rows", row.q_rows, "query rows in a slot: a tile, or one consumer's part"),
            Constant("q_slots", row.q_slots, "slots for Q"),
            Constant("tile_slots", TILE_SLOTS, "slots of the ring that announces tiles of queries"),
            Constant("consumers", row.consumers, "warpgroups that compute, 64 query rows each"),
            Constant("producer_registers", producer),
            Constant("consumer_registers", consumer),
            Constant(
                "section_heads",
                _SECTION_COLUMNS // spec.head_dim if has_end else 1,
                "heads of a section, whose tiles are scheduled together",
            ),
            Constant("doubles_to", _KEYS_TO_DOUBLE, "keys up to which the last section has twice as many heads"),
            Constant("longest_first", has_end, "the last queries of a head go first"),
            Constant("running_maximum", running, "exponentials relative to the maximum so far"),
            Constant("keeps_scores", keeps, "P does not overwrite S"),
            Constant("bounds_growth", bounds_growth, "the cap bounds how far row maxima can grow"),
            Constant("computes_before_wait", row.consumers < 3, "exponentials overlap the products"),
            Constant(
                "packs_statistics",
                row.consumers > 2 or (running and spec.head_dim_v > 192),
                "row statistics of a finished tile take one register per lane",
            ),
            Constant("ends_alone", row.ends_alone, "the last P V of a tile is issued without the next scores"),
            Constant("prefetches_next_k", row.prefetches_next_k, "the next tile's first K is loaded before the last V"),
            Constant("draws_late", _draws_late(spec, row), "the next tile is drawn when few tiles of keys are left"),
            Constant("has_lower", spec.mask.has_lower, "the band has a lower bound on k - q"),
            Constant("has_upper", spec.mask.has_upper, "the band has an upper bound on k - q"),
        ),
        params=FORWARD_SM90 if spec.score is None else FORWARD_SM90_SCORE,
        smem=smem,
        grid_tile=row.tile_q,
        grid_over="q",
        grid_heads="q",
        access_bytes=16,
        is_persistent=True,
        overlaps_predecessor=True,
        divides_by_scale=in_products,
        refuses_spills=True,
        boxes=(
            Box("q", row.q_rows, PANEL),
            Box("k", row.tile_kv, PANEL),
            Box("v", row.tile_kv, PANEL),
            Box("o", STORED_ROWS, PANEL),
        ),
        reasons=(row.reason, _BY_MAXIMA) if by_maxima else (row.reason,),
        schedule=schedule if schedule != Schedule() else None,
        switches=frozenset(
            name
            for name, on in (
                ("o_tile", row.o_tile),
                ("keeps_scores", keeps),
                ("values_first", row.values_first),
                ("recompute_scores", recompute_scores),
                ("skips", skips),
                ("has_mask", has_mask(spec)),
                ("block_sparse", is_block_sparse(spec)),
                ("scrubs_first", has_mask(spec) and _scrubs_first(spec)),
                ("hoists_tile_rules", is_block_sparse(spec)),
                ("in_products", in_products),
                ("capped", capped),
                # A mask that loads an element for each pair needs its address: groups of pairs take fewer registers.
                ("in_groups", mask_loads_per_pair(spec) and (changes_scores(spec) or row.mask_loads_in_groups)),
                ("fine_cap", fine_cap),
                ("modest_cap", modest_cap),
                ("any_cap", capped and has_any_cap(spec)),
                # One copy of the epilogue saves instruction cache. Steps with logits near the cap have the most code.
                # N(0, 16^2) data, cap 200, causal, 512 keys, H200: 1.47x the time of N(0, 1) data, and 1.52x with two
                # copies. Without a cap one copy costs N(0, 1) data up to 4 %.
                ("writes_once", capped and not fine_cap and not modest_cap and row.values_first and skips),
                # All warps of a consumer take the same branch, which spares three consumers instruction cache misses.
                # With two consumers a barrier in each step costs more.
                ("go_together", capped and not fine_cap and row.consumers > 2),
                # Consumer code first is up to 1 % faster up to 1k keys (H200), but up to 2 % slower under a cap.
                ("consumers_first", not capped),
                # Recompute lane ids to apply a mask. Keeping them takes one register too many.
                ("rematerialize_lane_ids", recompute_scores or (capped and not is_block_sparse(spec))),
            )
            if on
        ),
    )


def _scrubs_first(spec: AttentionSpec) -> bool:
    """Whether a block scrubs V for its first tile of queries, rather than recompute it if V is not finite."""
    # Scrubbing first limits the slowdown by non-finite values to 1.47x on an H200. Without it the slowdown is:
    # - 1.50x and 1.54x at head_dim 96 and 128 with a window of 200 keys to both sides (8k),
    # - 1.56x at 192 and 256 with a window of 256 (1k),
    # - 1.54x at 256, causal, with 512 keys, and 1.64x with a softcap,
    # - 1.54x and 1.85x at 64 and 128 with 3 of 10 blocks (8k),
    # - 1.40x at 64 with windows, and 1.37x at 64 and 128, causal: these do not scrub first.
    # Finite data pay 2 to 4 % up to 1k keys and with windows, 1 % at 2k, 0 % at 8k, 1 to 4 % with block-sparse masks.
    if is_block_sparse(spec):
        return True
    return spec.head_dim_v > (64 if spec.mask.has_lower else 128)


def _draws_late(spec: AttentionSpec, row: Row) -> bool:
    """Whether a block draws its next tile of queries late, so that none waits that another block could begin."""
    # With a block-sparse mask the producer knows which tile of keys is the last, not how many are left. On an H200
    # drawing late then costs 4 % with two slots for Q (a window with four global keys at head_dim 128), and saves 5 %
    # with one (3 of 10 blocks at 256, 2k).
    if is_block_sparse(spec):
        return row.q_slots == 1
    # With a window all tiles take equally long, but announcing a tile late means fewer tiles to recompute if V is not
    # finite: windows of 100 to 256 keys, at 1k keys, take .97 to 1.00 of the time on an H200. A producer beside three
    # consumers has no registers for it.
    lacks_registers = spec.mask.has_lower and row.consumers == 3
    return not (row.ends_alone or lacks_registers)


def chosen_schedule_sm90(kernel: KernelPlan) -> Schedule:
    """The schedule that would give this plan."""
    return Schedule(
        tile_q=int(kernel.constant("tile_q")),
        tile_kv=int(kernel.constant("tile_kv")),
        stages=int(kernel.constant("stages")),
        warps=WarpPartition("specialized", consumers=int(kernel.constant("consumers"))),
        algorithm="fa3",
        softmax="running-max" if kernel.constant("running_maximum") else "reference-max",
        registers=(int(kernel.constant("producer_registers")), int(kernel.constant("consumer_registers"))),
    )
