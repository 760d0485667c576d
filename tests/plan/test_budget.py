"""Choosing tiles by what a block has: the first way that there is room for, and what was passed over says why."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

import flashgen as fg
from flashgen.arch import get_arch
from flashgen.errors import PlanError
from flashgen.plan import plan
from flashgen.plan.hopper.backward_tiles import HEAD_DIMS, NARROW_DIMS, WIDE_DIMS, keys_kernel, one_kernel, query_kernel
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
        counts = {"Q": "q_stages", "dO": "do_stages", "K": "k_stages", "V": "v_stages", "P": "p_stages"}
        counts |= {"sums of dQ": "sum_stages", "them rounded": "rounded_stages", "dS": "ds_stages"}
        assert all(kernel.constant(counts[name]) == count for name, count in choice.tiles.slots)


def test_a_choice_says_where_operands_lie_what_they_take_and_what_was_passed_over() -> None:
    kernel = plan(fg.AttentionSpec(128), None, ARCH).kernel("main")
    text = "\n".join(choice_lines(kernel))
    for words in (
        "128 keys of a block, 64 queries a step, 3 of Q, 2 of dO",
        "P and dS are left operands of dV and dK from registers",
        "registers: 224 of 240: dK 64, dV 64, S and P, or P and dQ 48, dP 32, addresses 16",
        f"shared memory: {kernel.smem.bytes} of {ARCH.max_smem_per_block} bytes: k 32768, v 32768, q 49152, ",
        f"because: {kernel.reasons[0]}",
        "multiplied between dV and dK, while dS is computed",
        "not 128 queries a step: 280 registers, and there are 240",
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
def test_where_producers_look_for_tiles_they_have_registers_for_it(deterministic: bool) -> None:
    def main(dim: int, mask: str, **fields: object) -> KernelPlan:
        spec = fg.AttentionSpec(dim, mask=MASKS[mask], deterministic=deterministic, **fields)  # type: ignore[arg-type]
        return plan(spec, None, ARCH).kernel("main")

    for dim, dtype in product((64, 96, 128), ("bf16", "fp16")):
        assert main(dim, "causal", dtype=dtype).constant("producer_registers") == (40 if dim == 96 else 24)
        assert main(dim, "documents", dtype=dtype).constant("producer_registers") == (56 if deterministic else 40)
        # A score takes the registers that are left.
        scored = main(dim, "documents", dtype=dtype, score=fg.softcap(30.0))
        assert scored.constant("producer_registers") == 40


def test_dq_is_multiplied_last_where_registers_are_short() -> None:
    capped, slopes = fg.softcap(30.0), fg.alibi(np.ones(1, np.float32))
    for dim, mask, score, last in (
        (64, "causal", None, False),
        (64, "documents", None, True),
        (64, "causal", capped, True),
        (64, "causal", slopes, False),
        (128, "causal", None, False),
        (128, "global", None, True),
        (128, "causal", capped, False),
    ):
        spec = fg.AttentionSpec(dim, mask=MASKS[mask], score=score)
        kernel = plan(spec, None, ARCH).kernel("main")
        assert kernel.constant("dq_last") == last
        assert any("after dK" in line for line in choice_lines(kernel)) == last
        # The next scores start early where there are 128 queries and L is subtracted beforehand.
        assert kernel.constant("presets_ahead") == (dim == 64 and score is None)
