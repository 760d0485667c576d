"""Clusters: ranks, their barrier, and each other's shared memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flashgen.errors import EmulationError, LaunchError

SCHEDULES = ["sequential", "reverse", "random", "priority"]
WORDS = (
    "auto* w = reinterpret_cast<u32*>(shared); const int t = thread_idx(); const u32 rank = cluster_rank();\n"
    "const u32 base = shared_address(shared); (void)w; (void)t; (void)rank; (void)base;\n"
    '#line 1 "kernels/test.cu"\n'
)
#: Everybody has started, and then everybody is done.
SYNC = "cluster_arrive(); cluster_wait();\n"


def finding(run: Any, body: str, **options: Any) -> str:
    with pytest.raises(EmulationError) as caught:
        run(WORDS + body, **{"smem": 512, "blocks": 4, "cluster": 2, **options})
    return str(caught.value)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_blocks_know_their_rank_and_the_size(run: Any, schedule: str) -> None:
    out = np.zeros((12, 2), np.uint32)
    body = """if (thread_idx() != 0) return;
    out[2 * block_idx_x()] = cluster_rank();
    out[2 * block_idx_x() + 1] = cluster_size();"""
    run(body, blocks=12, cluster=4, schedule=schedule, seed=5, out=out)
    np.testing.assert_array_equal(out, np.stack([np.arange(12) % 4, np.full(12, 4)], 1))


def test_a_block_by_itself_is_a_cluster_of_one(run: Any) -> None:
    out = np.zeros(2, np.uint32)
    run(SYNC + "out[0] = cluster_rank(); out[1] = cluster_size();", out=out)
    np.testing.assert_array_equal(out, [0, 1])


def test_clusters_lie_along_x_of_a_grid_of_three_axes(run: Any) -> None:
    out = np.zeros((3, 2, 4), np.uint32)
    body = "if (thread_idx() == 0) out[(block_idx_z() * 2 + block_idx_y()) * 4 + block_idx_x()] = cluster_rank() + 1;"
    run(body, blocks=(4, 2, 3), cluster=2, out=out)
    np.testing.assert_array_equal(out, np.broadcast_to([1, 2, 1, 2], out.shape))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"blocks": 3, "cluster": 2}, "3 blocks along x are not a multiple of the blocks of a cluster"),
        ({"blocks": 2, "cluster": 0}, "cluster=0 blocks; a cluster has 1 to 16"),
        ({"blocks": 32, "cluster": 32}, "cluster=32 blocks; a cluster has 1 to 16"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(run: Any, options: Any, message: str) -> None:
    with pytest.raises((EmulationError, LaunchError), match=message):
        run("cluster_arrive();", **options)


@pytest.mark.parametrize("race", [False, True])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_blocks_read_and_write_each_others_shared_memory(run: Any, schedule: str, race: bool) -> None:
    out = np.zeros((4, 64), np.uint32)
    body = (
        "w[t] = 100 * block_idx_x() + t;\n"
        + SYNC
        + """const u32 next = (rank + 1) % 4, previous = (rank + 3) % 4;
        const u32 seen = cluster_load(map_to_rank(base, next) + 4 * t);
        cluster_store(map_to_rank(base + 256, previous) + 4 * t, seen);
        """
        + SYNC
        + "out[64 * block_idx_x() + t] = w[64 + t];"
    )
    run(WORDS + body, threads=64, blocks=4, cluster=4, smem=512, schedule=schedule, race=race, out=out)
    # The next one of whoever wrote here is two further than this block.
    expected = 100 * ((np.arange(4)[:, None] + 2) % 4) + np.arange(64)
    np.testing.assert_array_equal(out, expected)


def test_four_words_at_once(run: Any) -> None:
    out = np.zeros((2, 4), np.uint32)
    body = (
        SYNC
        + """if (t == 0) {
          const u32 values[4] = {1 + 10 * rank, 2, 3, 4};
          cluster_store_x4(map_to_rank(base + 16, 1 - rank), values);
        }
        """
        + SYNC
        + "if (t == 0) { u32 v[4]; cluster_load_x4(v, map_to_rank(base + 16, rank));\n"
        + "for (int i = 0; i < 4; ++i) out[4 * rank + i] = v[i]; }"
    )
    run(WORDS + body, blocks=2, cluster=2, smem=64, race=True, out=out)
    np.testing.assert_array_equal(out, [[11, 2, 3, 4], [1, 2, 3, 4]])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_barrier_holds_everybody_back_each_time(run: Any, schedule: str) -> None:
    out = np.zeros(6, np.uint32)
    body = """for (int round = 0; round < 5; ++round) {
      if (t == 0) atomic_add(count, 1u);
      cluster_arrive();
      cluster_wait();
      if (t == 0 && load_acquire(count) < 3 * (round + 1)) atomic_add(out + block_idx_x(), 1u);
      cluster_arrive();
      cluster_wait();
    }"""
    run(WORDS + body, blocks=3, cluster=3, schedule=schedule, seed=2, count=np.zeros(1, np.uint32), out=out)
    assert not out.any()


def test_threads_that_returned_count_as_arrived(run: Any) -> None:
    out = np.zeros(2, np.uint32)
    body = "if (t < 16 + 8 * rank) { if (t % 2) cluster_arrive(); return; }\n" + SYNC + "out[rank] = 1;"
    run(WORDS + body, blocks=2, cluster=2, out=out)
    assert (out == 1).all()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("cluster_wait();", "invalid barrier use: this thread waits at its cluster's barrier without having arrived"),
        (
            "cluster_arrive(); cluster_arrive();",
            "invalid barrier use: this thread arrives at its cluster's barrier again",
        ),
        ("map_to_rank(base, 2);", "invalid operand: map_to_rank of rank 2 in a cluster of 2 blocks"),
        ("cluster_load(base | 5u << 24);", "invalid operand: cluster_load at address 0x5000400, which map_to_rank did"),
        (SYNC + "cluster_load(map_to_rank(base + 2, 1));", "misaligned: cluster_load needs a shared-memory address"),
        (SYNC + "cluster_store(map_to_rank(base + 512, 1), 1);", "shared memory out of bounds: cluster_store touches"),
    ],
)
def test_a_bad_use_is_a_finding(run: Any, body: str, message: str) -> None:
    assert finding(run, body).startswith(message)


def test_a_block_that_never_arrives_is_a_deadlock(run: Any) -> None:
    text = finding(
        run,
        "if (rank == 0) {\ncluster_arrive();\ncluster_wait(); } else { while (load_acquire(flag) == 0) {} }",
        flag=np.zeros(1, np.uint32),
    )
    assert text.startswith("deadlock: no thread can run:")
    assert "wait at test.cu:3, cluster_wait (32 of its cluster's 64 threads have arrived)" in text
    assert "load_acquire of address 0x" in text


#: The block of rank 1 reads what rank 0 wrote, and nothing keeps rank 0.
NO_FINAL_BARRIER = (
    "w[t] = t;\n" + SYNC + "if (rank == READER) out[t] = cluster_load(map_to_rank(base, 1 - rank) + 4 * t);"
)


def test_memory_of_a_block_that_returned_is_gone(run: Any) -> None:
    # Under some orders rank 0 comes to its end before rank 1 reads.
    body = NO_FINAL_BARRIER.replace("READER", "1")
    out = np.zeros(32, np.uint32)
    texts = []
    for seed in range(20):
        try:
            run(WORDS + body, blocks=2, cluster=2, smem=512, schedule="random", seed=seed, out=out)
        except EmulationError as error:
            texts.append(str(error))
    assert texts
    assert all(t.startswith("exited block: cluster_load touches shared memory of rank 0 in its cluster") for t in texts)


@pytest.mark.parametrize("reader", [0, 1])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_missing_last_barrier_is_a_finding_in_race_mode_under_every_schedule(
    run: Any, schedule: str, reader: int
) -> None:
    out = np.zeros(32, np.uint32)
    body = NO_FINAL_BARRIER.replace("READER", str(reader))
    text = finding(run, body, race=True, schedule=schedule, blocks=2, out=out)
    assert text.startswith("exited block: ")
    run(WORDS + body + SYNC, blocks=2, cluster=2, smem=512, race=True, schedule=schedule, out=out)


def test_a_missing_first_barrier_is_a_finding_in_race_mode(run: Any) -> None:
    text = finding(run, "cluster_store(map_to_rank(base, 1 - rank), 1);\n" + SYNC, race=True)
    assert text.startswith("race: cluster_store touches shared memory of rank")
    assert "which may not have started" in text


def test_a_relaxed_arrival_orders_nothing(run: Any) -> None:
    out = np.zeros(64, np.uint32)
    body = (
        SYNC
        + "w[t] = t;\nARRIVE cluster_wait();\nout[32 * rank + t] = cluster_load(map_to_rank(base, 1 - rank) + 4 * t);\n"
        + SYNC
    )
    options: dict[str, Any] = {"blocks": 2, "smem": 512, "cluster": 2, "race": True, "out": out}
    run(WORDS + body.replace("ARRIVE", "cluster_arrive();"), **options)
    text = finding(run, body.replace("ARRIVE", "cluster_arrive_relaxed();"), race=True, blocks=2, out=out)
    assert text.startswith("race: a load of 4 bytes at offset")
    assert "of the shared memory of rank" in text
    assert "no barrier of the cluster orders the two blocks" in text


def test_a_store_into_another_block_races_with_its_own_load(run: Any) -> None:
    out = np.zeros(64, np.uint32)
    body = (
        "w[t] = 0;\n"
        + SYNC
        + "cluster_store(map_to_rank(base, 1 - rank) + 4 * t, 7);\nout[32 * rank + t] = w[t];\n"
        + SYNC
    )
    text = finding(run, body, race=True, blocks=2, out=out)
    assert text.startswith("race: ")
    assert "kernels/test.cu:3" in text
    assert "kernels/test.cu:4" in text
    fixed = body.replace("out[32", SYNC + "out[32")
    run(WORDS + fixed, blocks=2, cluster=2, smem=512, race=True, out=out)
    assert (out == 7).all()
