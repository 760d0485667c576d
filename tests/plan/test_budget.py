"""Choosing tiles by what a block has: the first way that there is room for, and what was passed over says why."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import flashgen as fg
from flashgen.arch import get_arch
from flashgen.errors import PlanError
from flashgen.plan import plan
from flashgen.plan.hopper.backward import HEAD_DIMS, NARROW_DIMS, WIDE_DIMS
from flashgen.plan.hopper.backward_tiles import keys_kernel, one_kernel, query_kernel
from flashgen.plan.model.budget import Budget, Choice, Tiles, chosen, first_that_fits
from flashgen.plan.model.choices import choice_lines, choice_plain
from flashgen.plan.model.plans import KernelPlan
from flashgen.plan.model.smem import SmemLayout
from tests.plan.test_backward_sm90 import MASKS

ARCH = get_arch("sm_90a")
WAYS = [Tiles(rows, "keys", (("K", slots),), (40, 232), "why") for rows in (256, 128, 64) for slots in (3, 2)]


def weigh(tiles: Tiles) -> Budget:
    """A register for each row, and a KiB of shared memory for each row of each slot."""
    smem = SmemLayout().then("k", 1024 * tiles.rows * tiles.count("K")).map()
    return Budget((("rows", tiles.rows),), smem)


def found(**limits: int) -> Choice | tuple[str, ...]:
    return first_that_fits(WAYS, weigh, replace(ARCH, **limits), "operands")


def test_the_first_way_that_fits_is_chosen_and_each_fault_of_those_before_is_named_once() -> None:
    choice = found(max_smem_per_block=256 * 1024)
    assert isinstance(choice, Choice)
    assert (choice.tiles.rows, choice.tiles.count("K")) == (128, 2)
    assert choice.passed_over == (
        "256 keys a step: 256 registers, and there are 232",
        "128 keys a step, 3 of K: 393216 bytes of shared memory",
    )
    assert chosen(choice, "main") is choice


def test_where_nothing_fits_an_error_names_every_fault() -> None:
    faults = found(max_smem_per_block=1024)
    assert isinstance(faults, tuple)
    assert len(faults) == 5
    with pytest.raises(
        PlanError, match=r"The main kernel cannot be planned: not 256 keys .* 64 keys a step, 2 of K: 1310"
    ):
        chosen(faults, "main")


@pytest.mark.parametrize("dims", HEAD_DIMS)
def test_registers_decide_whether_one_kernel_makes_all_gradients(dims: tuple[int, int]) -> None:
    spec = fg.AttentionSpec(dims[0], head_dim_v=dims[1])
    choice = one_kernel(spec, ARCH)
    assert isinstance(choice, Choice) == (dims in NARROW_DIMS) == (dims not in WIDE_DIMS)
    if isinstance(choice, tuple):
        assert all("registers" in fault for fault in choice)
        wide = keys_kernel(spec, ARCH)
        assert isinstance(wide, Choice)
        assert wide.passed_over[: len(choice)] == tuple(f"dQ in the same kernel, {fault}" for fault in choice)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dims", HEAD_DIMS)
def test_the_plan_is_what_was_chosen(dims: tuple[int, int], mask: str) -> None:
    spec = fg.AttentionSpec(dims[0], head_dim_v=dims[1], mask=MASKS[mask])
    made = plan(spec, None, ARCH)
    wanted = {"main": one_kernel} if dims in NARROW_DIMS else {"main": keys_kernel, "query": query_kernel}
    for role, choose in wanted.items():
        kernel, choice = made.kernel(role), choose(spec, ARCH)
        assert kernel.choice == choice
        assert isinstance(choice, Choice)
        registers = kernel.constant("producer_registers"), kernel.constant("consumer_registers")
        assert registers == choice.tiles.registers
        assert choice.budget.all_registers <= registers[1]
        assert kernel.smem == choice.budget.smem
        assert kernel.constant("tile_kv" if role == "query" else "tile_q") == choice.tiles.rows
        counts = {"Q": "q_slots", "dO": "do_slots", "K": "k_slots", "V": "v_slots", "P": "p_slots"}
        counts |= {"sums of dQ": "sum_slots", "them rounded": "rounded_slots", "dS": "ds_slots"}
        assert all(kernel.constant(counts[name]) == count for name, count in choice.tiles.slots)


def test_a_choice_says_where_operands_lie_what_they_take_and_what_was_passed_over() -> None:
    kernel = plan(fg.AttentionSpec(128), None, ARCH).kernel("main")
    text = "\n".join(choice_lines(kernel))
    for words in (
        "128 keys of a block, 64 queries a step, 3 of Q, 2 of dO",
        "P and dS are left operands of dV and dK from registers",
        "registers: 236 of 240: dK 64, dV 64, S or dQ 32, dP 32, P rounded 16, addresses 28",
        f"shared memory: {kernel.smem.bytes} of {ARCH.max_smem_per_block} bytes: k 32768, v 32768, q 49152, ",
        f"because: {kernel.reasons[0]}",
        "dQ between dV and dK: 594 at 4,096, full",
        "not 128 queries a step: 288 registers, and there are 240",
        "3 of sums of dQ, 2 of them rounded: 233888 bytes of shared memory",
    ):
        assert words in text
    plain = choice_plain(kernel)
    assert plain["registers"]["dK"] == 64
    assert plain["max_registers"] == 240
    assert plain["smem"]["q"] == plain["slots"]["Q"] * plain["tile_q"] * 256
    assert len(plain["passed_over"]) == 4


def test_kernels_for_all_gpus_say_their_sizes_and_why() -> None:
    kernel = plan(fg.AttentionSpec(64), None, "sm_80").kernel("main")
    assert choice_lines(kernel) == (
        "64 keys of a block: tile_q 128, tile_kv 64, stages 1, warps 4",
        f"shared memory: {kernel.smem.bytes} of 166912 bytes: {kernel.smem.sizes}",
        f"because: {kernel.reasons[0]}",
    )
    assert "slots" not in choice_plain(kernel)


@pytest.mark.parametrize("deterministic", [False, True])
def test_where_producers_look_for_tiles_they_have_registers_for_it_and_fewer_products_are_under_way(
    deterministic: bool,
) -> None:
    def main(dim: int, mask: str, **fields: object) -> KernelPlan:
        spec = fg.AttentionSpec(dim, mask=MASKS[mask], deterministic=deterministic, **fields)  # type: ignore[arg-type]
        return plan(spec, None, ARCH).kernel("main")

    for dim in (64, 96, 128):
        assert main(dim, "causal").constant("producer_registers") == (40 if dim == 96 else 24)
        assert main(dim, "causal", dtype="fp16").constant("producer_registers") == (24 if dim == 64 else 40)
        # Few at once where P's floats are needed until dS is made; else there are registers for both.
        assert "few_dv_in_flight" not in main(dim, "causal", dtype="fp16").switches
        assert ("few_dv_in_flight" in main(dim, "documents", dtype="fp16").switches) == (dim == 64)
        assert "few_dv_in_flight" not in main(dim, "documents").switches
        assert main(dim, "documents").constant("producer_registers") == (56 if deterministic else 40)
    assert main(64, "documents", dtype="fp16").constant("producer_registers") == 40
    # All of P is rounded at once there.
    scored = main(64, "documents", score=fg.softcap(30.0))
    assert "few_dv_in_flight" not in scored.switches
    assert scored.constant("producer_registers") == 24


#: By head_dim, and what is no other spec's: shortcuts that are taken, and words of why others are not.
SHORTCUTS: dict[str, tuple[int, dict[str, object], set[str], str]] = {
    "64": (
        64,
        {},
        {"packed_ds", "dq_mid_step", "early_scores"},
        "scores ahead: 557 at 4,096, full, and 464, causal, beside",
    ),
    "64, deterministic": (
        64,
        {"deterministic": True},
        {"packed_ds", "dq_mid_step", "early_scores"},
        "dQ between dV and dK, for which K_j gives way",
    ),
    "64, window": (
        64,
        {"mask": fg.window(100, 0)},
        {"packed_ds", "dq_mid_step", "early_scores"},
        "dQ between dV and dK, for which K_j gives way",
    ),
    "64, documents": (
        64,
        {"mask": MASKS["documents"]},
        {"packed_ds", "early_scores"},
        "not dQ between dV and dK: 236 registers, and there are 232",
    ),
    "64, fp16": (64, {"dtype": "fp16"}, set(), "not packed dS: a small P has lost bits in fp16"),
    "64, fp16, dQ": (64, {"dtype": "fp16"}, set(), "not dQ between dV and dK: P's floats keep"),
    "64, fp16, ahead": (64, {"dtype": "fp16"}, set(), "not the next step's scores ahead: P's floats keep"),
    "64, added": (
        64,
        {"score": fg.alibi(np.ones(1, np.float32)) >> fg.sink(np.ones(1, np.float32))},
        {"packed_ds", "dq_mid_step"},
        "not the next step's scores ahead: with a score the accumulators start at zero",
    ),
    "64, sink": (
        64,
        {"score": fg.sink(np.ones(1, np.float32))},
        {"packed_ds", "dq_mid_step", "early_scores"},
        "dQ between dV and dK, for which K_j gives way",
    ),
    "64, slope": (
        64,
        {"score": fg.softcap(30.0)},
        set(),
        "not packed dS: dS has the slope of the score as a further factor",
    ),
    "96": (96, {}, {"packed_ds", "dq_mid_step", "k_in_registers"}, "K_j in registers: for both there is room"),
    "96, fp16, slope": (
        96,
        {"dtype": "fp16", "score": fg.softcap(30.0)},
        {"k_in_registers"},
        "not packed dS: a small P",
    ),
    "128": (128, {}, {"packed_ds", "dq_mid_step"}, "dQ between dV and dK: 594 at 4,096, full"),
    "128, ordered": (128, {"deterministic": True, "mask": fg.causal()}, {"packed_ds", "dq_mid_step"}, "525, causal"),
    "128, documents": (
        128,
        {"mask": MASKS["documents"]},
        {"packed_ds"},
        "not dQ between dV and dK: 236 registers, and there are 232",
    ),
    "128, bias": (
        128,
        {"score": fg.bias(np.zeros((2, 2), np.float16)), "mask": fg.causal()},
        {"packed_ds", "prefetches_bias"},
        "not dQ between dV and dK: 252 registers, and there are 240",
    ),
    "128, fp16": (128, {"dtype": "fp16"}, set(), "not dQ between dV and dK: P's floats keep their registers"),
}


@pytest.mark.parametrize("case", SHORTCUTS)
def test_shortcuts_are_those_that_a_head_dim_is_better_with_where_they_may_be_taken(case: str) -> None:
    dim, fields, wanted, words = SHORTCUTS[case]
    kernel = plan(fg.AttentionSpec(dim, **fields), None, ARCH).kernel("main")  # type: ignore[arg-type]
    assert kernel.switches & {"packed_ds", "prefetches_bias", "k_in_registers", "dq_mid_step", "early_scores"} == wanted
    assert any(words in line for line in choice_lines(kernel))
    plain = choice_plain(kernel)
    assert set(plain["switches"]) == wanted
    assert ("K_j" in plain["registers"]) == ("k_in_registers" in wanted)
