from __future__ import annotations

import numpy as np
import pytest

from flashgen import oracle
from flashgen.arch import get_arch
from flashgen.cli.commands.check import DEFAULT_CASES
from flashgen.plan import plan
from flashgen.spec import AttentionSpec, BackwardSchedule, Schedule, causal, full, window
from flashgen.verify import Tiles, draw, modes
from flashgen.verify.cases.drawn import LONG_LENGTHS, LONGEST, MOST_LONG_PAIRS
from flashgen.verify.cases.layouts import LAYOUTS, ORDINARY_LAYOUTS

SPEC = AttentionSpec(16, dtype="fp16", mask=causal())
TILES = Tiles(32, 48, 16, 80)


def cases(spec=SPEC, tiles=TILES, seed=0, count=600):
    return [draw(spec, tiles, seed, index) for index in range(count)]


def test_a_case_depends_on_spec_tiles_seed_and_index_alone():
    assert cases() == cases()
    assert cases(seed=1) != cases()
    assert cases(tiles=Tiles(16, 16, 16, 16)) != cases()
    assert draw(SPEC, TILES, 0, 77) == cases()[77]
    assert len(set(cases())) > 590


def test_lengths_reach_every_edge():
    drawn = cases()
    for tile, lengths in (
        (32, {case.len_q for case in drawn}),
        (16, {case.len_q for case in drawn}),
        (48, {case.len_kv for case in drawn}),
        (80, {case.len_kv for case in drawn}),
    ):
        assert {0, 1, tile - 1, tile, tile + 1, min(3 * tile + 5, LONGEST)} <= lengths
    short = [case for case in cases(tiles=Tiles(192, 128)) if not is_long(case)]
    assert max(case.len_kv for case in short) == 3 * 128 + 5
    assert any(case.len_q > case.len_kv > 0 for case in drawn)
    assert any(case.len_q < case.len_kv for case in drawn)


def test_heads_batches_layouts_and_values_are_all_there():
    drawn = cases()
    assert {case.batch for case in drawn} == {0, 1, 2, 3, 4}
    assert {case.heads_kv for case in drawn} == {0, 1, 2}
    assert {case.heads // case.heads_kv for case in drawn if case.heads_kv} == {1, 2, 3}
    for i in range(4):
        assert {case.layouts[i] for case in drawn} == set(LAYOUTS)
    assert {case.fill for case in drawn} == {"normal", "spread", "huge", "large_logits", "flat", "sparse"}
    assert {case.non_finite for case in drawn} == {"nothing", "keys", "queries"}
    assert {case.scale for case in drawn} == {None, 1.0, 0.01}


def test_most_cases_compute_something_and_none_takes_long():
    drawn = cases(tiles=Tiles(128, 128, 128, 128))
    work = [case.batch * case.heads * case.len_q * case.len_kv for case in drawn]
    assert sum(size > 0 for size in work) > 0.75 * len(drawn)
    assert max(work) <= MOST_LONG_PAIRS


def is_long(case):
    return LONG_LENGTHS[0] <= max(case.len_q, case.len_kv) and case.batch == case.heads_kv == 1


@pytest.mark.parametrize("seed", [0, 1, 2**64 - 1])
def test_a_hundred_cases_have_long_ones_of_each_kind(seed):
    """One in twelve: many keys, many queries, many of both, and more tiles of keys than a word has bits."""
    drawn = [case for case in cases(seed=seed, count=100) if max(case.len_q, case.len_kv) >= LONG_LENGTHS[0]]
    assert 8 <= len(drawn) <= 12
    assert all(is_long(case) for case in drawn)
    assert any(case.len_q > 4 * case.len_kv for case in drawn)
    assert any(case.len_kv > 4 * case.len_q for case in drawn)
    assert any(min(case.len_q, case.len_kv) >= LONG_LENGTHS[0] for case in drawn)
    assert sum(case.len_kv > 32 * max(TILES.kv, TILES.backward_kv) for case in drawn) >= 4


def test_long_cases_reach_the_longest_lengths():
    drawn = cases(count=2000)
    assert max(case.len_q for case in drawn) > 0.9 * LONG_LENGTHS[1]
    assert max(case.len_kv for case in drawn) > 32 * TILES.backward_kv
    assert any(case.len_kv in range(257, 300) for case in drawn)


@pytest.mark.parametrize("varlen", [False, True])
@pytest.mark.parametrize("seed", [0, 5])
def test_a_hundred_cases_have_strides_that_32_bits_cannot_hold(seed, varlen):
    spec = AttentionSpec(16, mask=causal(), varlen=varlen)
    drawn = [case for case in cases(spec, seed=seed, count=100) if case.layouts[0].startswith("huge")]
    assert 8 <= len(drawn) <= 9
    kinds = set(LAYOUTS) - set(ORDINARY_LAYOUTS) - ({"huge-batch-stride"} if varlen else set())
    for i in range(4):
        assert {case.layouts[i] for case in drawn} == kinds
    assert min(min(case.batch, case.heads_kv, case.len_q, case.len_kv) for case in drawn) >= 2


def test_a_loss_that_depends_on_the_log_sum_exp_is_drawn_where_there_is_a_gradient():
    assert 0.2 < sum(case.dlse for case in cases()) / 600 < 0.4
    assert not any(case.dlse for case in cases(AttentionSpec(16, direction="forward")))


def test_rows_that_may_attend_to_nothing_are_drawn():
    empty = 0
    for case in cases(count=60):
        if case.non_finite == "nothing" and case.heads_kv and case.len_q:
            x = case.inputs(SPEC)
            _, lse = oracle.forward(SPEC, x.q, x.k, x.v)
            empty += int(np.isneginf(lse).any())
    assert empty > 5


def test_without_a_mask_no_value_is_bad():
    spec = AttentionSpec(16, mask=full())
    assert {case.non_finite for case in cases(spec)} == {"nothing"}
    assert {case.non_finite for case in cases(AttentionSpec(16, mask=window(3, 3)))} == {"nothing", "keys", "queries"}


def test_tiles_are_those_of_the_plan():
    schedule = Schedule(tile_q=64, tile_kv=32, backward=BackwardSchedule(tile_q=32, tile_kv=64, warps=4))
    made = plan(AttentionSpec(64), schedule, get_arch("sm_80"))
    assert Tiles.of(made.schedule) == Tiles(64, 32, 32, 64)
    forward = plan(AttentionSpec(64, direction="forward"), Schedule(tile_q=64, tile_kv=32), get_arch("sm_80"))
    assert (Tiles.of(forward.schedule).q, Tiles.of(forward.schedule).kv) == (64, 32)


@pytest.mark.parametrize("race", [False, True])
def test_modes_are_the_sequence_and_then_other_orders(race):
    found = [modes(0, index, schedules=5, race=race) for index in range(20)]
    assert found == [modes(0, index, schedules=5, race=race) for index in range(20)]
    for ways in found:
        assert [mode.schedule for mode in ways] == ["sequential", "random", "priority", "random", "priority", "reverse"]
        assert {mode.race for mode in ways} == {race}
        assert len({mode.guard for mode in ways}) == 1
    assert {ways[0].guard for ways in found} == {"end", "begin"}
    assert len({ways[1].seed for ways in found}) == 20


@pytest.mark.parametrize("dropout", [False, True])
def test_every_seed_draws_more_than_1024_queries_for_the_kernels_of_aligned_arrays(dropout):
    spec = AttentionSpec(64, dtype="fp16", mask=causal(), dropout=dropout)
    for seed in range(60):
        cases = [draw(spec, Tiles(), seed, index) for index in range(DEFAULT_CASES)]
        telling = [case for case in cases if case.len_q > 1024 and "unaligned" not in case.layouts]
        assert telling, seed
        assert all(case.len_kv and case.batch and case.heads for case in telling)
