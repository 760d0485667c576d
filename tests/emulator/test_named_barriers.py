from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flashgen.errors import EmulationError

SCHEDULES = ["sequential", "reverse", "random", "priority"]
WORDS = "auto* w = reinterpret_cast<u32*>(shared); const int t = thread_idx(), warp = t / 32;\n"


def finding(run: Any, body: str, **options: Any) -> str:
    with pytest.raises(EmulationError) as caught:
        run(body, **options)
    return str(caught.value)


@pytest.mark.parametrize("race", [False, True])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_pairs_of_warps_meet_at_barriers_of_their_own(run: Any, schedule: str, race: bool) -> None:
    out = np.zeros(128, np.uint32)
    body = """for (int i = 0; i < 5; ++i) {
      w[t] = t + i;
      named_barrier_sync(1 + warp / 2, 64);
      out[t] = w[t ^ 32];
      named_barrier_sync(1 + warp / 2, 64);
    }"""
    run(WORDS + body, threads=128, smem=512, schedule=schedule, seed=3, race=race, out=out)
    np.testing.assert_array_equal(out, (np.arange(128) ^ 32) + 4)


@pytest.mark.parametrize("race", [False, True])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_producer_arrives_and_goes_on(run: Any, schedule: str, race: bool) -> None:
    out = np.zeros(32, np.uint32)
    body = """if (warp == 0) {
      w[t] = 7 * t;
      named_barrier_arrive(3, 64);
      for (int i = 0; i < 9; ++i) warp_sync();
    } else {
      named_barrier_sync(3, 64);
      out[t - 32] = w[t - 32];
    }"""
    run(WORDS + body, threads=64, smem=128, schedule=schedule, seed=5, race=race, out=out)
    np.testing.assert_array_equal(out, 7 * np.arange(32))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_vote_is_that_of_the_threads_that_meet(run: Any, schedule: str) -> None:
    out = np.zeros((4, 128), np.uint32)
    body = """for (int i = 0; i < 4; ++i) {
      out[128 * i + t] = named_barrier_any(1 + warp / 2, 64, t == 32 * i + 5);
      if (t % 2 == 0) w[t] = t;
    }"""
    run(WORDS + body, threads=128, smem=512, schedule=schedule, seed=3, out=out)
    np.testing.assert_array_equal(out, np.repeat([[1, 0], [1, 0], [0, 1], [0, 1]], 64, axis=1))


def test_a_vote_orders_memory_as_a_barrier_does(run: Any) -> None:
    out = np.zeros(64, np.uint32)
    run(
        WORDS + "w[t] = t; named_barrier_any(1, 64, false); out[t] = w[t ^ 32];",
        threads=64,
        smem=256,
        race=True,
        out=out,
    )
    np.testing.assert_array_equal(out, np.arange(64) ^ 32)


def test_an_arrival_tells_nothing_of_what_comes_after_it(run: Any) -> None:
    body = """if (warp == 0) {
      named_barrier_arrive(3, 64);
      w[t] = 7 * t;
    } else {
      named_barrier_sync(3, 64);
      out[t - 32] = w[t - 32];
    }"""
    for schedule in SCHEDULES:
        text = finding(
            run,
            WORDS + body,
            threads=64,
            smem=128,
            race=True,
            schedule=schedule,
            out=np.zeros(32, np.uint32),
        )
        assert text.startswith(("race:", "uninitialised shared memory:"))


def test_a_late_writer_waits_for_readers_that_only_arrive(run: Any) -> None:
    body = WORDS + "if (warp == 1) {{ w[t] = t; {arrive} }} else {{ named_barrier_sync(1, 64); w[t + 32] = 1; }}"
    run(
        body.format(arrive="out[t] = w[t]; named_barrier_arrive(1, 64);"),
        threads=64,
        smem=256,
        race=True,
        out=np.zeros(64, np.uint32),
    )
    late = body.format(arrive="named_barrier_arrive(1, 64); out[t] = w[t];")
    assert finding(run, late, threads=64, smem=256, race=True, out=np.zeros(64, np.uint32)).startswith("race:")


def test_a_barrier_that_not_enough_threads_reach_is_a_deadlock(run: Any) -> None:
    text = finding(run, WORDS + "if (warp < 2)\n  named_barrier_sync(4, 96);", threads=96)
    assert text.startswith("deadlock: no thread can run:")
    waiting = (
        "64 threads (warps 0 1) wait at test.cu:3, named_barrier_sync of barrier 4 (64 of 96 threads have arrived)"
    )
    assert waiting in text
    assert "32 threads have returned" in text


def test_waits_at_two_barriers_on_one_line_are_distinguished(run: Any) -> None:
    text = finding(run, WORDS + "named_barrier_sync(1 + warp, 64);", threads=64)
    assert "32 threads (warps 0) wait at test.cu:2, named_barrier_sync of barrier 1" in text
    assert "32 threads (warps 1) wait at test.cu:2, named_barrier_sync of barrier 2" in text


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("named_barrier_sync(0, 64);", "invalid operand: named_barrier_sync of barrier 0"),
        ("named_barrier_sync(16, 64);", "invalid operand: named_barrier_sync of barrier 16"),
        ("named_barrier_arrive(1, 48);", "by 48 threads, which is not a multiple of 32 from 32 to 64"),
        (
            "if (warp == 0) named_barrier_any(2, 64, true); else named_barrier_sync(2, 64);",
            "named_barrier_sync of barrier 2, but the first to arrive called named_barrier_any (test.cu:2)",
        ),
        ("named_barrier_sync(1, 96);", "by 96 threads, which is not a multiple of 32 from 32 to 64"),
        (
            "if (warp == 0) named_barrier_arrive(2, 64); else named_barrier_sync(2, 32);",
            "named_barrier_sync of barrier 2 counts 32 threads, but the first to arrive counted 64 (test.cu:2)",
        ),
        ("if (warp == 0) { named_barrier_arrive(2, 64); named_barrier_arrive(2, 64); }", "so it would count twice"),
        ("if (t < 16 || t >= 48) named_barrier_sync(2, 32);", "only 16 lanes of a warp take part in named barrier 2"),
    ],
)
def test_misuse_is_a_finding_at_its_line(run: Any, body: str, message: str) -> None:
    text = finding(run, WORDS + body, threads=64)
    assert message in text
    assert "at kernels/test.cu:2" in text


def test_a_block_inherits_no_arrivals_from_the_one_before(run: Any) -> None:
    out = np.zeros(3, np.uint32)
    run(WORDS + "if (warp == 0) named_barrier_arrive(5, 64);\nout[block_idx_x()] = 1;", threads=64, blocks=3, out=out)
    assert out.all()


def test_a_deadlock_left_behind_by_a_block_that_ended_is_found(run: Any) -> None:
    body = "if (block_idx_x() == 0 && thread_idx() != 63) warp_sync();\nblock_sync();"
    text = finding(run, body, threads=64, blocks=2, resident=2)
    assert text.startswith("deadlock: no thread can run:")
    assert "block 0:" in text
