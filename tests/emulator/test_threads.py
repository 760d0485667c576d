"""Threads, shuffles, votes and barriers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

SCHEDULES = ["sequential", "reverse", "random", "priority"]


def test_every_thread_of_every_block_runs_once(run: Any) -> None:
    out = np.zeros((5, 96), np.int32)
    run(
        "out[block_idx_x() * 96 + thread_idx()] += 1000 * block_idx_x() + thread_idx() + 1;",
        threads=96,
        blocks=5,
        out=out,
    )
    np.testing.assert_array_equal(out, 1000 * np.arange(5)[:, None] + np.arange(96) + 1)


def test_a_grid_without_blocks_does_nothing(run: Any) -> None:
    out = np.zeros(1, np.int32)
    run("out[0] = 1;", blocks=0, out=out)
    assert out[0] == 0


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_shuffles_exchange_within_each_warp(run: Any, schedule: str) -> None:
    x = np.arange(64, dtype=np.float32)
    out = np.zeros((3, 64), np.float32)
    run(
        """const int t = thread_idx();
        out[t] = shuffle_xor(x[t], 5);
        out[64 + t] = shuffle(x[t], (t + 3) % 32);
        out[128 + t] = shuffle(t, 7);""",
        threads=64,
        schedule=schedule,
        x=x,
        out=out,
    )
    lane, base = np.arange(64) % 32, np.arange(64) // 32 * 32
    np.testing.assert_array_equal(out[0], base + (lane ^ 5))
    np.testing.assert_array_equal(out[1], base + (lane + 3) % 32)
    np.testing.assert_array_equal(out[2], base + 7)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_block_sync_orders_shared_memory(run: Any, schedule: str) -> None:
    out = np.zeros(256, np.int32)
    run(
        """auto* values = reinterpret_cast<i32*>(shared);
        const int t = thread_idx();
        for (int round = 0; round < 20; ++round) {
          values[t] = t * 100 + round;
          block_sync();
          out[t] += values[(t + 37 * round) % 256];
          block_sync();
        }""",
        threads=256,
        smem=1024,
        schedule=schedule,
        seed=3,
        out=out,
    )
    t = np.arange(256)
    np.testing.assert_array_equal(out, sum((t + 37 * r) % 256 * 100 + r for r in range(20)))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_votes_hear_a_single_thread_and_forget_it(run: Any, schedule: str) -> None:
    out = np.zeros((4, 64), np.int32)
    run(
        """const int t = thread_idx();
        out[t] = warp_any(t == 40);
        out[64 + t] = warp_any(false);
        out[128 + t] = block_any(t == 40);
        out[192 + t] = block_any(false);""",
        threads=64,
        schedule=schedule,
        out=out,
    )
    np.testing.assert_array_equal(out[0], np.arange(64) >= 32)
    np.testing.assert_array_equal(out[1], 0)
    np.testing.assert_array_equal(out[2], 1)
    np.testing.assert_array_equal(out[3], 0)


def test_threads_that_returned_count_as_arrived(run: Any) -> None:
    out = np.zeros(96, np.int32)
    run("if (thread_idx() >= 64) return;\nblock_sync();\nout[thread_idx()] = 1;", threads=96, out=out)
    np.testing.assert_array_equal(out, np.arange(96) < 64)


def test_shared_memory_starts_as_nan(run: Any) -> None:
    out = np.zeros(32, np.float32)
    run("out[thread_idx()] = reinterpret_cast<float*>(shared)[thread_idx()];", smem=128, out=out)
    assert np.isnan(out).all()


def test_shared_memory_of_the_next_block_starts_as_nan_too(run: Any) -> None:
    out = np.zeros(2, np.float32)
    run(
        """auto* f = reinterpret_cast<float*>(shared);
        if (thread_idx() != 0) return;
        out[block_idx_x()] = f[0];
        f[0] = 1.0f;""",
        smem=128,
        blocks=2,
        out=out,
    )
    assert np.isnan(out).all()


def test_shared_memory_is_aligned_to_a_kibibyte(run: Any) -> None:
    out = np.zeros(2, np.uint32)
    run(
        "out[0] = shared_address(shared); out[1] = static_cast<u32>(reinterpret_cast<u64>(shared) % 1024);",
        smem=5000,
        out=out,
    )
    assert out[0] % 1024 == 0
    assert out[1] == 0


@pytest.mark.parametrize("schedule", ["random", "priority"])
def test_one_seed_gives_one_order_and_seeds_differ(run: Any, schedule: str) -> None:
    def order(seed: int) -> list[int]:
        out = np.zeros(129, np.int32)
        body = "warp_sync(); out[1 + out[0]++] = thread_idx(); warp_sync(); reduce_add(&sum[0], 1.0f);"
        run(body, threads=128, schedule=schedule, seed=seed, out=out, sum=np.zeros(1, np.float32))
        return out[1:].tolist()

    orders = [order(seed) for seed in range(5)]
    assert all(sorted(o) == list(range(128)) for o in orders)
    assert orders == [order(seed) for seed in range(5)]
    assert len({tuple(o) for o in orders}) == 5


def test_a_grid_has_three_axes(run: Any) -> None:
    out = np.zeros((4, 3, 2), np.int32)
    body = "if (thread_idx() == 0) out[(block_idx_z() * 3 + block_idx_y()) * 2 + block_idx_x()] += 1;"
    run(body, blocks=(2, 3, 4), out=out)
    assert (out == 1).all()


@pytest.mark.parametrize("blocks", [(0, 3, 4), (2, 0, 4), (2, 3, 0)])
def test_a_grid_with_an_empty_axis_does_nothing(run: Any, blocks: tuple[int, int, int]) -> None:
    out = np.zeros(1, np.int32)
    run("out[0] = 1;", blocks=blocks, out=out)
    assert out[0] == 0
