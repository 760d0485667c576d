"""mbarriers: phases, parities, counts of arrivals and bytes, and every way of using them wrongly."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flashgen.errors import EmulationError

SCHEDULES = ["sequential", "reverse", "random", "priority"]
NAMES = """auto* w = reinterpret_cast<u32*>(shared + 64);
const int t = thread_idx(), warp = t / 32;
const u32 bar = shared_address(shared);
"""
#: One barrier of so many arrivals, known to all threads.
BARRIER = NAMES + "if (t == 0) {{ mbarrier_init(bar, {count}); fence_mbarrier_init(); }}\nblock_sync();\n"


def finding(run: Any, body: str, **options: Any) -> str:
    with pytest.raises(EmulationError) as caught:
        run(body, **{"smem": 512, **options})
    return str(caught.value)


@pytest.mark.parametrize("race", [False, True])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_wait_sees_what_was_written_before_the_arrivals(run: Any, schedule: str, race: bool) -> None:
    out = np.zeros((4, 32), np.uint32)
    body = """for (int i = 0; i < 4; ++i) {
      if (warp == 1) {
        w[t - 32] = t * i;
        mbarrier_arrive(bar);
        mbarrier_wait(bar + 8, i & 1);
      } else {
        mbarrier_wait(bar, i & 1);
        out[32 * i + t] = w[t];
        mbarrier_arrive(bar + 8);
      }
    }"""
    setup = NAMES + "if (t == 0) { mbarrier_init(bar, 32); mbarrier_init(bar + 8, 32); }\nblock_sync();\n"
    run(setup + body, threads=64, smem=512, schedule=schedule, seed=2, race=race, out=out)
    np.testing.assert_array_equal(out, np.arange(32, 64) * np.arange(4)[:, None])


def test_a_fresh_barrier_lets_the_other_parity_pass(run: Any) -> None:
    out = np.zeros(1, np.uint32)
    run(BARRIER.format(count=1) + "mbarrier_wait(bar, 1); out[0] = 5;", smem=512, out=out)
    assert out[0] == 5


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_try_wait_says_whether_the_phase_has_ended(run: Any, schedule: str) -> None:
    out = np.zeros(4, np.uint32)
    body = """if (t == 0) {
      out[0] = mbarrier_try_wait(bar, 0);
      mbarrier_arrive(bar);
      out[1] = mbarrier_try_wait(bar, 0);
      while (!mbarrier_try_wait(bar, 0)) {}
      out[2] = mbarrier_try_wait(bar, 1);
      out[3] = 1;
    }"""
    run(BARRIER.format(count=1) + body, smem=512, schedule=schedule, seed=1, out=out)
    np.testing.assert_array_equal(out, [0, 1, 0, 1])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_who_asks_in_vain_goes_on_with_something_else(run: Any, schedule: str) -> None:
    # Warp 1 arrives only after warp 0, which asks first, has arrived itself; another thread asks forever meanwhile.
    out = np.zeros(1, np.uint32)
    body = """if (t == 0) {
      bool ready = mbarrier_try_wait(bar, 0);
      mbarrier_arrive(bar + 8);
      if (!ready) mbarrier_wait(bar, 0);
      out[0] = 1;
    } else if (t == 32) {
      mbarrier_wait(bar + 8, 0);
      mbarrier_arrive(bar);
    } else if (t == 64) {
      while (!mbarrier_try_wait(bar, 0)) {}
    }"""
    setup = NAMES + "if (t == 0) { mbarrier_init(bar, 1); mbarrier_init(bar + 8, 1); }\nblock_sync();\n"
    run(setup + body, threads=96, smem=512, schedule=schedule, seed=7, out=out)
    assert out[0] == 1


def test_a_phase_needs_its_bytes_as_well_as_its_arrivals(run: Any) -> None:
    out = np.zeros(2, np.uint32)
    body = """if (t == 0) {
      mbarrier_arrive_expect_tx(bar, 64);
      bulk_load(bar + 64, x, 32, bar);
      out[0] = mbarrier_try_wait(bar, 0);
      bulk_load(bar + 96, x, 32, bar);
      mbarrier_wait(bar, 0);
      out[1] = 1;
    }"""
    run(BARRIER.format(count=1) + body, smem=512, x=np.zeros(8, np.uint32), out=out)
    np.testing.assert_array_equal(out, [0, 1])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_bytes_may_come_before_they_are_announced(run: Any, schedule: str) -> None:
    out = np.zeros(8, np.uint32)
    x = np.arange(8, dtype=np.uint32)
    body = """if (t == 0) {
      bulk_load(bar + 64, x, 32, bar);
      mbarrier_try_wait(bar, 0);
      mbarrier_expect_tx(bar, 16);
      mbarrier_try_wait(bar, 0);
      mbarrier_arrive_expect_tx(bar, 16);
    }
    mbarrier_wait(bar, 0);
    if (t < 8) out[t] = w[t];"""
    run(BARRIER.format(count=1) + body, smem=512, schedule=schedule, seed=4, x=x, out=out)
    np.testing.assert_array_equal(out, x)


def test_a_barrier_may_be_made_again_where_it_was_invalidated(run: Any) -> None:
    out = np.zeros(1, np.uint32)
    body = """if (t == 0) {
      mbarrier_arrive(bar);
      mbarrier_invalidate(bar);
      mbarrier_init(bar, 2);
      fence_mbarrier_init();
      mbarrier_arrive(bar);
      out[0] = mbarrier_try_wait(bar, 0) ? 7 : 1;
      mbarrier_arrive(bar);
      mbarrier_wait(bar, 0);
    }"""
    for race in (False, True):
        run(BARRIER.format(count=1) + body, smem=512, race=race, out=out)
        assert out[0] == 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            "mbarrier_wait(bar + 8, 0);",
            "uninitialised mbarrier: mbarrier_wait at offset 8 of shared memory, where no thread",
        ),
        ("mbarrier_try_wait(bar + 8, 0);", "uninitialised mbarrier: mbarrier_try_wait at offset 8"),
        ("mbarrier_arrive(bar + 8);", "uninitialised mbarrier: mbarrier_arrive at offset 8"),
        ("mbarrier_arrive_expect_tx(bar + 8, 16);", "uninitialised mbarrier: mbarrier_arrive_expect_tx at offset 8"),
        ("mbarrier_invalidate(bar + 8);", "uninitialised mbarrier: mbarrier_invalidate at offset 8"),
        ("bulk_load(bar + 64, x, 16, bar + 8);", "uninitialised mbarrier: bulk_load at offset 8"),
        (
            "mbarrier_invalidate(bar); mbarrier_arrive(bar);",
            "mbarrier_arrive at offset 0 of shared memory, where the barrier of test.cu:4 was invalidated",
        ),
        (
            "w[-16] = 0; mbarrier_arrive(bar);",
            "mbarrier_arrive at offset 0 of shared memory, where the barrier of test.cu:4 was written over",
        ),
        ("mbarrier_init(bar, 1);", "mbarrier initialised twice: mbarrier_init at offset 0 of shared memory, where the"),
        ("mbarrier_init(bar + 8, 0);", "invalid operand: mbarrier_init for 0 arrivals"),
        ("mbarrier_init(bar + 8, 1 << 20);", "invalid operand: mbarrier_init for 1048576 arrivals"),
        (
            "mbarrier_init(bar + 4, 1);",
            "misaligned: mbarrier_init needs a shared-memory address that is a multiple of 8",
        ),
        ("mbarrier_init(bar + 512, 1);", "shared memory out of bounds: mbarrier_init touches 8 bytes at offset 512"),
        ("mbarrier_wait(bar, 2);", "invalid operand: mbarrier_wait for parity 2"),
        (
            "mbarrier_arrive_expect_tx(bar, 16); mbarrier_arrive(bar);",
            "mbarrier overflow: an arrival at the mbarrier at offset 0, where all 1 arrivals of this phase",
        ),
        ("mbarrier_expect_tx(bar, 1 << 20);", "mbarrier overflow: 1048576 bytes would be expected"),
        ("mbarrier_expect_tx(bar, 16); mbarrier_invalidate(bar);", "mbarrier in use: mbarrier_invalidate at offset 0"),
    ],
)
def test_misuse_is_a_finding_at_its_line(run: Any, call: str, message: str) -> None:
    body = BARRIER.format(count=1) + "if (t == 0) {\n" + call + "\n}"
    text = finding(run, body, x=np.zeros(16, np.uint32))
    assert message in text
    assert "at kernels/test.cu:7" in text
    assert "block 0, warp 0, lane 0" in text


def test_bytes_that_nobody_announces_overflow_in_the_end(run: Any) -> None:
    body = BARRIER.format(count=1) + (
        "if (t == 0) for (int i = 0; i < 1000; ++i) {\nbulk_load(bar + 1024, x, 32768, bar);\n"
        "mbarrier_try_wait(bar, 0); }"
    )
    text = finding(run, body, smem=40000, x=np.zeros(8192, np.uint32))
    assert "mbarrier overflow: bulk_load for the mbarrier at offset 0" in text
    assert "bytes have arrived that no thread expected" in text


def test_a_deadlock_says_which_barrier_and_what_is_missing(run: Any) -> None:
    body = """if (warp == 0) {
      mbarrier_wait(bar, 0);
    } else if (t == 32) {
      mbarrier_arrive_expect_tx(bar, 4096);
      bulk_load(bar + 64, x, 64, bar);
    }"""
    text = finding(run, BARRIER.format(count=3) + body, threads=64, x=np.zeros(16, np.uint32))
    assert text.startswith("deadlock: no thread can run:")
    assert (
        "32 threads (warps 0) wait at test.cu:7, mbarrier_wait for parity 0 of the barrier at offset 0 of shared"
        " memory, whose phase 0 (parity 0) has 1 of 3 arrivals and misses 4032 bytes" in text
    )
    assert "32 threads have returned" in text


def test_excess_bytes_are_reported_too(run: Any) -> None:
    body = """if (t == 0) {
      mbarrier_arrive_expect_tx(bar, 32);
      bulk_load(bar + 64, x, 64, bar);
      mbarrier_wait(bar, 0);
    }"""
    text = finding(run, BARRIER.format(count=1) + body, x=np.zeros(16, np.uint32))
    assert "has 1 of 1 arrivals and 32 bytes more than expected" in text


def test_parities_that_alias_are_a_deadlock(run: Any) -> None:
    """Two phases end before the slow warp looks: it takes the barrier for one that never moved."""
    body = """if (warp == 0) {
      if (t == 0) { mbarrier_arrive(bar); mbarrier_arrive(bar); }
      named_barrier_arrive(1, 64);
    } else {
      named_barrier_sync(1, 64);
      mbarrier_wait(bar, 0);
    }"""
    text = finding(run, BARRIER.format(count=1) + body, threads=64)
    assert "for parity 0 of the barrier at offset 0 of shared memory, whose phase 2 (parity 0) has 0 of 1" in text


def test_asking_forever_is_a_deadlock(run: Any) -> None:
    text = finding(run, BARRIER.format(count=1) + "while (!mbarrier_try_wait(bar, 0)) {}", threads=64)
    assert text.startswith("deadlock:")
    assert "64 threads (warps 0 1) wait at test.cu:6, mbarrier_try_wait for parity 0" in text


@pytest.mark.parametrize("schedule", ["random", "priority"])
def test_asking_forever_is_a_deadlock_under_schedules_where_questions_fail_by_chance(run: Any, schedule: str) -> None:
    text = finding(
        run, BARRIER.format(count=1) + "while (!mbarrier_try_wait(bar, 0)) {}", threads=64, schedule=schedule, seed=9
    )
    assert text.startswith("deadlock:")


# ---- Race mode


@pytest.mark.parametrize("schedule", ["sequential", "reverse", "random"])
def test_an_initialisation_that_no_barrier_tells_of_is_a_race(run: Any, schedule: str) -> None:
    body = NAMES + "if (t == 0) {\nmbarrier_init(bar, 1);\n}\nif (t == 33) mbarrier_arrive(bar);"
    text = finding(run, body, threads=64, race=True, schedule=schedule, seed=1)
    assert text.startswith(("race: mbarrier_arrive of the mbarrier at offset 0", "uninitialised mbarrier:"))


def test_an_initialisation_without_a_fence_is_not_seen_by_copies(run: Any) -> None:
    body = NAMES + "if (t == 0) mbarrier_init(bar, 1);\nblock_sync();\nif (t == 0) { mbarrier_expect_tx(bar, 16);\n"
    load = "bulk_load(bar + 64, x, 16, bar);\nmbarrier_arrive(bar); mbarrier_wait(bar, 0); }"
    x = np.zeros(4, np.uint32)
    text = finding(run, body + load, race=True, x=x)
    assert text.startswith("missing fence: bulk_load counts on the mbarrier at offset 0 of shared memory")
    assert "at kernels/test.cu:7" in text
    for fence in ("fence_mbarrier_init()", "fence_proxy_async()", "fence_proxy_async_shared()"):
        fenced = body.replace("mbarrier_init(bar, 1);", f"{{ mbarrier_init(bar, 1); {fence}; }}")
        run(fenced + load, smem=512, race=True, x=x)


def test_a_fence_before_the_initialisation_does_not_count(run: Any) -> None:
    body = NAMES + "if (t == 0) { fence_mbarrier_init(); mbarrier_init(bar, 1);\nbulk_load(bar + 64, x, 16, bar); }"
    assert finding(run, body, race=True, x=np.zeros(4, np.uint32)).startswith("missing fence:")


def test_a_wait_learns_nothing_from_threads_that_have_not_arrived(run: Any) -> None:
    body = """if (warp == 1) {
      w[t] = 1;
      if (t == 32) mbarrier_arrive(bar);
    } else {
      mbarrier_wait(bar, 0);
      if (t == 0) out[0] = w[40];
    }"""
    text = finding(run, BARRIER.format(count=1) + body, threads=64, race=True, out=np.zeros(1, np.uint32))
    # Thread 40 wrote, thread 32 arrived, and nothing orders the two lanes.
    assert text.startswith(("race: a load of 4 bytes", "uninitialised shared memory"))
    run(
        BARRIER.format(count=1) + body.replace("if (t == 32)", "warp_sync(); if (t == 32)"),
        threads=64,
        smem=512,
        race=True,
        out=np.zeros(1, np.uint32),
    )


def test_accesses_after_the_arrival_are_not_published(run: Any) -> None:
    body = """if (t == 32) {
      w[0] = 1;
      mbarrier_arrive(bar);
      w[1] = 1;
    } else if (t == 0) {
      mbarrier_wait(bar, 0);
      out[0] = w[{which}];
    }"""
    run(
        BARRIER.format(count=1) + body.replace("{which}", "0"),
        threads=64,
        smem=512,
        race=True,
        out=np.zeros(1, np.uint32),
    )
    late = BARRIER.format(count=1) + body.replace("{which}", "1")
    for schedule in SCHEDULES:
        text = finding(run, late, threads=64, race=True, schedule=schedule, out=np.zeros(1, np.uint32))
        assert text.startswith(("race:", "uninitialised shared memory:"))


def test_more_barriers_than_race_mode_tells_apart_are_refused(run: Any) -> None:
    body = NAMES + "if (t == 0) for (int i = 0; i < 65; ++i) mbarrier_init(bar + 8 * i, 1);"
    run(body, smem=1024)
    assert "more than the 64 mbarriers" in finding(run, body, smem=1024, race=True)


def test_barriers_of_an_earlier_block_are_gone(run: Any) -> None:
    body = (
        NAMES
        + "if (block_idx_x() == 0 && t == 0) mbarrier_init(bar, 1);\nif (block_idx_x() == 1) mbarrier_arrive(bar);"
    )
    assert "uninitialised mbarrier: mbarrier_arrive at offset 0" in finding(run, body, blocks=2)
