"""Which calls the kernels that use TMA take, by their own predicates."""

from __future__ import annotations

from dataclasses import replace

import flashgen as fg
from flashgen.plan import Problem, plan
from flashgen.plan.calls import MOST_TILES, SMALLEST_DIVISOR, takes_call
from flashgen.plan.fallbacks import access_for_call, access_without_maps, for_alignment

ATTENTION = plan(fg.AttentionSpec(64, score=fg.softcap(30.0)), None, "sm_90a")
FORWARD, MAIN = ATTENTION.kernel("forward"), ATTENTION.kernel("main")
SIZES = Problem(batch=2, heads_q=4, heads_kv=2, len_q=70, len_kv=90)


def test_calls_of_usual_sizes_and_scales_are_taken() -> None:
    assert FORWARD.boxes
    assert MAIN.boxes
    assert takes_call(FORWARD, SIZES, 0.125)
    assert takes_call(MAIN, SIZES, 0.125)


def test_kernels_that_divide_by_the_scale_take_none_that_overflows() -> None:
    for kernel in (replace(FORWARD, divides_by_scale=True), replace(MAIN, divides_by_scale=True)):
        assert takes_call(kernel, SIZES, -SMALLEST_DIVISOR)
        assert not takes_call(kernel, SIZES, SMALLEST_DIVISOR / 2)
    assert takes_call(replace(FORWARD, divides_by_scale=False), SIZES, 0.0)


def test_without_keys_only_the_forward_kernel_takes_a_call() -> None:
    assert takes_call(FORWARD, replace(SIZES, len_kv=0), 0.125)
    assert not takes_call(MAIN, replace(SIZES, len_kv=0), 0.125)


def test_tiles_are_counted_in_32_bits() -> None:
    most = Problem(1, 1, 1, MOST_TILES * FORWARD.grid_tile, 8)
    assert takes_call(FORWARD, most, 0.125)
    assert not takes_call(FORWARD, replace(most, len_q=most.len_q + 1), 0.125)
    # Without queries nothing is launched.
    assert takes_call(FORWARD, replace(most, len_q=0, len_kv=0), 0.125)


def test_other_calls_run_by_kernels_that_do_not_use_tma() -> None:
    access = access_without_maps(ATTENTION)
    assert not any(kernel.boxes for kernel in for_alignment(ATTENTION, access).kernels)
    refused = access_for_call(ATTENTION, "backward", SIZES, 0.125, lambda kernel: kernel.role != "main")
    assert (refused, access) == (8, 8)
    assert access_for_call(ATTENTION, "forward", SIZES, 0.125, lambda kernel: kernel.role != "main") == 16
    assert access_for_call(ATTENTION, "backward", replace(SIZES, len_kv=0), 0.125, lambda kernel: True) == 8


def test_plans_that_do_not_use_tma_take_every_call() -> None:
    portable = plan(fg.AttentionSpec(64), None, "sm_80")
    assert access_without_maps(portable) == 16
    assert access_for_call(portable, "forward", SIZES, 0.0, lambda kernel: False) == 16
