"""Blocks that work together through global memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flashgen.errors import EmulationError

SCHEDULES = ["sequential", "reverse", "random", "priority"]
GRID_SYNC = '#include "flashgen/lineage/grid_barrier.cuh"'


def finding(run: Any, body: str, **options: Any) -> str:
    with pytest.raises(EmulationError) as caught:
        run(f'#line 1 "kernels/test.cu"\n{body}', **options)
    return str(caught.value)


def zero() -> Any:
    return np.zeros(1, np.uint32)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_atomic_additions_give_what_was_there(run: Any, schedule: str) -> None:
    seen = np.zeros(96, np.uint32)
    integer, real = np.full(1, -5, np.int32), np.zeros(1, np.float32)
    body = """seen[atomic_add(count, 1u)] = 1;
    atomic_add(integer, thread_idx() % 2 ? -3 : 2);
    atomic_add(real, 0.5f);"""
    run(body, blocks=3, schedule=schedule, seen=seen, count=zero(), integer=integer, real=real)
    assert (seen == 1).all()
    assert integer[0] == -5 - 48
    assert real[0] == 48


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_bits_that_blocks_set_stay_set_whatever_others_add(run: Any, schedule: str) -> None:
    count = zero()
    body = "if (thread_idx() % 3 == 0) atomic_or(count, 1u << 31 | 1u << 20); else atomic_add(count, 1u);"
    run(body, blocks=3, schedule=schedule, race=True, count=count)
    assert count[0] == 1 << 31 | 1 << 20 | 3 * 21


@pytest.mark.parametrize("race", [False, True])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_grid_sync_shows_everybody_what_all_wrote(run: Any, schedule: str, race: bool) -> None:
    values, out = np.zeros(4 * 64, np.uint32), np.zeros(4 * 64, np.uint32)
    body = """const int i = block_idx_x() * 64 + thread_idx();
    for (u32 round = 1; round < 4; ++round) {
      values[i] = round * 1000 + i;
      grid_sync(count, 4);
      out[i] += values[(i + 64 * round + 7) % 256];
      grid_sync(count, 4);
    }"""
    options: dict[str, Any] = {"threads": 64, "blocks": 4, "cooperative": True, "prelude": GRID_SYNC}
    run(body, schedule=schedule, seed=4, race=race, count=zero(), values=values, out=out, **options)
    i = np.arange(256)
    np.testing.assert_array_equal(out, sum(1000 * r + (i + 64 * r + 7) % 256 for r in (1, 2, 3)))


def test_a_missing_grid_sync_is_a_race(run: Any) -> None:
    values, out = np.zeros(128, np.uint32), np.zeros(128, np.uint32)
    body = """const int i = block_idx_x() * 32 + thread_idx();
    values[i] = i;
    grid_sync(count, 4);
    out[i] = values[i ^ 32];
    values[i] = 1;"""
    options: dict[str, Any] = {"blocks": 4, "cooperative": True, "prelude": GRID_SYNC, "race": True}
    text = finding(run, body, count=zero(), values=values, out=out, **options)
    assert text.startswith("race: ")
    assert "they are by different blocks, which nothing orders" in text
    assert "kernels/test.cu:4" in text
    assert "kernels/test.cu:5" in text
    run(
        body.replace("values[i] = 1", "grid_sync(count, 4); values[i] = 1"),
        count=zero(),
        values=values,
        out=out,
        **options,
    )


def test_a_grid_that_was_not_launched_cooperatively_says_so(run: Any) -> None:
    text = finding(run, "grid_sync(count, 4);", blocks=4, prelude=GRID_SYNC, count=zero())
    assert text.startswith("launch not cooperative: blocks wait for each other here, but the grid of 4 blocks")
    assert "called from kernels/test.cu:1" in text


def test_waiting_for_a_block_that_has_not_started_is_a_deadlock(run: Any) -> None:
    body = "atomic_add(count, 1u);\nwhile (load_acquire(count) < 128) {}"
    text = finding(run, body, blocks=4, resident=2, count=zero())
    assert text.startswith("deadlock: no thread can run:")
    assert "load_acquire of address 0x" in text
    assert "offset 0 of 'count' (4 bytes), which keeps its value" in text
    assert "2 blocks have not started; only with cooperative=True are all blocks resident" in text
    run(body, blocks=4, cooperative=True, count=zero())


def test_a_deadlock_is_seen_also_when_other_blocks_have_returned(run: Any) -> None:
    body = "if (block_idx_x() == 1) return;\nwhile (load_acquire(count) == 0) {}"
    text = finding(run, body, blocks=2, resident=2, count=zero())
    assert text.startswith("deadlock: no thread can run:")
    assert "block 0:" in text


def test_looking_again_and_again_without_success_may_also_end_well(run: Any) -> None:
    out = zero()
    run(
        "u32 n = 0; while (load_acquire(count) == 0 && n < 500) ++n;\nif (thread_idx() == 0) out[0] = n;",
        count=zero(),
        out=out,
    )
    assert out[0] == 500


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("race", [False, True])
def test_blocks_take_turns_by_a_semaphore(run: Any, schedule: str, race: bool) -> None:
    out, turn = np.zeros(4, np.uint32), zero()
    body = """if (thread_idx() != 0) return;
    const u32 mine = 3 - block_idx_x();
    while (load_acquire(turn) != mine) {}
    out[mine] = mine == 0 ? 1 : 3 * out[mine - 1];
    store_release(turn, mine + 1);"""
    run(body, blocks=4, cooperative=True, schedule=schedule, race=race, turn=turn, out=out)
    np.testing.assert_array_equal(out, [1, 3, 9, 27])


def test_the_last_block_to_arrive_may_read_what_the_others_wrote(run: Any) -> None:
    # Blocks come one after another here, and those before are gone.
    parts, out = np.zeros(8, np.uint32), zero()
    body = """if (thread_idx() != 0) return;
    parts[block_idx_x()] = 1 << block_idx_x();
    if (ADD(count, 1u) != 7) return;
    while (load_acquire(count) != 8) {}
    for (int i = 0; i < 8; ++i) out[0] += parts[i];"""
    run(body.replace("ADD", "atomic_add_release"), blocks=8, race=True, count=zero(), parts=parts, out=out)
    assert out[0] == 255
    text = finding(run, body.replace("ADD", "atomic_add"), blocks=8, race=True, count=zero(), parts=parts, out=zero())
    assert text.startswith("race: a load of 4 bytes")


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_counter_that_wraps_shows_its_last_increment_what_the_others_wrote(run: Any, schedule: str) -> None:
    parts, out, count = np.zeros(8, np.uint32), zero(), zero()
    body = """if (thread_idx() != 0) return;
    parts[block_idx_x()] = 1 << block_idx_x();
    if (ADD != 7) return;
    for (int i = 0; i < 8; ++i) out[0] += parts[i];"""
    inc = "atomic_inc_acq_rel(count, 7u)"
    run(body.replace("ADD", inc), blocks=8, schedule=schedule, race=True, count=count, parts=parts, out=out)
    assert out[0] == 255
    assert count[0] == 0
    add = "atomic_add_release(count, 1u)"
    text = finding(run, body.replace("ADD", add), blocks=8, race=True, count=zero(), parts=parts, out=zero())
    assert text.startswith("race: a load of 4 bytes")


def test_a_release_within_a_block_orders_its_threads(run: Any) -> None:
    body = """auto* w = reinterpret_cast<u32*>(shared);
    if (thread_idx() == 0) { w[0] = 5; store_release(flag, 1); }
    if (thread_idx() == 40) { while (load_acquire(flag) == 0) {} out[0] = w[0]; }"""
    out = zero()
    run(body, threads=64, smem=16, race=True, flag=zero(), out=out)
    assert out[0] == 5


def test_a_plain_store_beside_an_atomic_is_a_race(run: Any) -> None:
    body = "if (thread_idx() != 0) return;\nif (block_idx_x() == 0) count[0] = 1; else atomic_add(count, 1u);"
    text = finding(run, body, blocks=2, race=True, count=zero())
    assert text.startswith("race: a atomic_add of 4 bytes")
    assert "at least one is not atomic" in text


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("atomic_add(count + 1, 1u)", "global memory out of bounds: atomic_add touches 4 bytes"),
        ("store_release(count - 1, 1u)", "global memory out of bounds: store_release touches 4 bytes"),
        (
            "load_acquire(reinterpret_cast<u32*>(reinterpret_cast<u64>(pair) + 2))",
            "misaligned: load_acquire needs an address",
        ),
        ("atomic_add(const_cast<u32*>(fixed), 1u)", "write to read-only memory: atomic_add writes"),
    ],
)
def test_a_bad_address_is_a_finding_at_its_line(run: Any, frozen: Any, call: str, message: str) -> None:
    text = finding(run, f"\n{call};", count=zero(), pair=np.zeros(2, np.uint32), fixed=frozen(zero()))
    assert text.startswith(message)
    assert "kernels/test.cu:2" in text
