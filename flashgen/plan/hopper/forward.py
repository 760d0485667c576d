"""Planning the forward kernel for Hopper: warp-specialized and persistent, by wgmma and TMA."""

from __future__ import annotations

from flashgen.arch import Arch
from flashgen.errors import PlanError
from flashgen.plan.hopper.forward_table import Row
from flashgen.plan.hopper.forward_tiles import chosen_row, fault_of, has_mask, records_of, row_of, smem_of
from flashgen.plan.hopper.forward_traits import (
    changes_scores,
    has_any_cap,
    has_fine_cap,
    has_modest_cap,
    is_capped,
    is_in_products,
    looks_up_pairs,
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

#: Columns of all heads whose tiles are given out together where tiles differ in length. With more heads blocks end at
#: more nearly the same time, as long as keys and values stay in the L2 cache: best of 16, 32 and 64 heads at S = 512
#: were 64 at D=64, 32 at D=128 and 16 at D=256.
_SECTION_COLUMNS = 4096
#: Up to so many keys, of each query head, the last heads that are given out together are twice as many, so that blocks
#: end at more nearly the same time: on an H200 512 keys with a causal mask take .957 of the time at D=256, .989 at 128
#: and 1.00 at 64, 1k .986, 1.009 and 1.006, and 2k 1.000, 1.019 and .994.
_KEYS_TO_DOUBLE = 640
#: Why exponentials are relative to maxima where nobody asked for it.
_BY_MAXIMA = (
    "Exponentials are relative to the maximum so far: under a cap that may be above 50 rows go on growing, and with "
    "reference maxima ahead of them logits near the cap took up to 1.88 times as long as small ones, and 1.46 times by "
    "maxima (H100, D=64, causal, 2k)."
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
        return f"it cannot be laid out so: {fault}".removesuffix(".")
    return None


def _is_asked(schedule: Schedule) -> bool:
    """Whether the schedule names this kernel, and not only sizes that others have too."""
    by_warps = schedule.warps is not None and schedule.warps.kind == "specialized"
    return by_warps or schedule.algorithm == "fa3" or schedule.softmax is not None or schedule.registers is not None


def is_planned(spec: AttentionSpec, schedule: Schedule, arch: Arch, access_bytes: int) -> bool:
    """Whether this kernel is planned. A PlanError if the schedule asks for it and it cannot be."""
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
    producer, consumer = row.split()
    has_end = spec.mask.has_upper or is_block_sparse(spec)
    capped = is_capped(spec)
    fine_cap, modest_cap = capped and has_fine_cap(spec), capped and has_modest_cap(spec)
    by_maxima = capped and not fine_cap and schedule.softmax is None
    running = by_maxima or schedule.softmax == "running-max"
    keeps = row.keeps_scores and not running
    in_products = is_in_products(spec)
    foresees = capped and not running
    recompute_scores = not keeps and not running and not foresees
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
            Constant("stages", row.stages, "tiles of values under way at once"),
            Constant("k_slots", row.k_slots, "and of keys"),
            Constant("non_finite_records", records_of(row), "tiles of V whose non-finite values are recorded at once"),
            Constant("q_rows", row.q_rows, "queries of a slot: a tile, or each consumer's by themselves"),
            Constant("q_slots", row.q_slots, "slots for queries"),
            Constant("tile_slots", TILE_SLOTS, "tiles of queries known ahead"),
            Constant("consumers", row.consumers, "warpgroups that compute, 64 query rows each"),
            Constant("producer_registers", producer),
            Constant("consumer_registers", consumer),
            Constant(
                "section_heads",
                _SECTION_COLUMNS // spec.head_dim if has_end else 1,
                "heads that are worked on at the same time",
            ),
            Constant("doubles_to", _KEYS_TO_DOUBLE, "keys up to which the last of these are twice as many"),
            Constant("longest_first", has_end, "the last queries of a head go first"),
            Constant("running_maximum", running, "exponentials relative to the maximum so far"),
            Constant("keeps_scores", keeps, "exponentials do not take the place of scores"),
            Constant("foresees", foresees, "how far rows may grow is known before exponentials are taken"),
            Constant("holds_waits", row.consumers < 3, "exponentials overlap the products, as registers allow"),
            Constant(
                "packs_finished",
                row.consumers > 2 or (running and spec.head_dim_v > 192),
                "finished rows have one register of each lane, as registers are short",
            ),
            Constant("ends_alone", row.ends_alone, "the last values of a tile are multiplied without the next scores"),
            Constant("keys_lead", row.keys_lead, "the next tile's first keys come before the last values"),
            Constant("draws_late", _draws_late(spec, row), "the next tile is drawn when few keys are left"),
            Constant("has_lower", spec.mask.has_lower, "the mask ends on the left"),
            Constant("has_upper", spec.mask.has_upper, "the mask ends on the right"),
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
                # A mask that reads an element for each pair needs its address. Groups of pairs take fewer registers.
                ("in_groups", looks_up_pairs(spec) and (changes_scores(spec) or row.looks_up_in_groups)),
                ("fine_cap", fine_cap),
                ("modest_cap", modest_cap),
                ("any_cap", capped and has_any_cap(spec)),
                # Where streams end within a block, results of their last tiles are written behind the next scores, by
                # the text that writes others, so that a step of logits beyond their cap, which has the longest way,
                # finds its instructions: 16 times normal data under a cap of 200, causal, with 512 keys, take 1.47
                # times as long as these on an H200, and 1.52 with two texts. Without a cap normal data are up to 4 %
                # slower so.
                ("writes_once", capped and not fine_cap and not modest_cap and row.values_first and skips),
                # Three consumers have their instructions beside each other: a text that few warps take has others wait
                # for theirs. With two that is less than what a barrier in each step costs.
                ("go_together", capped and not fine_cap and row.consumers > 2),
                # Whose instructions lie first. On an H200 calls of up to 1k keys are up to 1 % faster where it is
                # consumers', but under a cap all are up to 2 % slower.
                ("consumers_first", not capped),
                # To apply a mask, recompute which columns a lane has: keeping them takes one register too many where
                # scores may be recomputed, and under a softcap with a band.
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
    # With a block-sparse mask the producer knows only the last tile of keys, not how many are left. Drawing late then
    # costs 4 % where queries have room before the last keys come (a window with four global keys at head_dim 128), and
    # saves 5 % elsewhere (3 of 10 blocks at 256, 2k, on an H200).
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
