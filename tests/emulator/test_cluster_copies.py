"""mbarriers and boxes across the blocks of a cluster."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flashgen.errors import EmulationError
from flashgen.launch.driver.tensor_map import TensorMap

SCHEDULES = ["sequential", "reverse", "random", "priority"]
TILES, ROWS, COLUMNS = 6, 8, 32

#: Each block loads half of every tile for both; a stage is free when the consumers of both have released it.
KERNEL = """constexpr int kTiles = 6, kStages = 2, kStageBytes = 1024;
const int t = thread_idx(), warp = t / 32, lane = t % 32;
const u32 s = shared_address(shared), full = s + 2048, empty = full + 64, rank = cluster_rank();
if (t == 0) {
  for (int i = 0; i < kStages; ++i) {
    mbarrier_init(full + 8 * i, 1);
    mbarrier_init(empty + 8 * i, 2);
  }
  fence_mbarrier_init();
}
cluster_arrive(); cluster_wait();
u32 stage = 0, parity = 0;
if (warp == 0) {
  for (int i = 0; lane == 0 && i < kTiles; ++i) {
    mbarrier_wait_cluster(empty + 8 * stage, parity ^ 1);
    mbarrier_arrive_expect_tx(full + 8 * stage, kStageBytes);
    tma_load_2d_multicast(s + kStageBytes * stage + 512 * rank, source, full + 8 * stage, 3, 0, 8 * i + 4 * rank);
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
} else {
  float sum = 0;
  for (int i = 0; i < kTiles; ++i) {
    mbarrier_wait(full + 8 * stage, parity);
    const auto* tile = reinterpret_cast<const float*>(shared + kStageBytes * stage);
    for (int row = 0; row < 8; ++row) sum += tile[32 * row + lane] * (row + 10 * rank);
    warp_sync();
    if (lane < 2) mbarrier_arrive_cluster(map_to_rank(empty + 8 * stage, lane));
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
  out[32 * block_idx_x() + lane] = sum;
}
cluster_arrive(); cluster_wait();
"""


def launch(run: Any, kernel: str = KERNEL, **options: Any) -> bool:
    """Runs it with two clusters; whether the result is right."""
    storage = np.zeros(TILES * ROWS * COLUMNS + 4, np.float32)
    source = storage[-storage.ctypes.data // 4 % 4 :][: TILES * ROWS * COLUMNS].reshape(TILES, ROWS, COLUMNS)
    source[...] = np.random.default_rng(0).integers(-9, 9, source.shape)
    m = TensorMap(source.ctypes.data, "fp32", (COLUMNS, TILES * ROWS), (COLUMNS * 4,), (COLUMNS, ROWS // 2))
    out = np.zeros((4, COLUMNS), np.float32)
    run(
        kernel, threads=64, blocks=4, cluster=2, resident=2, smem=2304, maps={"source": m}, x=source, out=out, **options
    )
    weights = np.arange(ROWS)[None, :] + 10 * (np.arange(4) % 2)[:, None]
    return bool((out == np.einsum("trc,br->bc", source, weights)).all())


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("race", [False, True])
def test_blocks_share_their_loads(run: Any, schedule: str, race: bool) -> None:
    for seed in range(10 if schedule in ("random", "priority") else 1):
        assert launch(run, schedule=schedule, seed=seed, race=race)


def test_a_fence_and_a_relaxed_arrival_tell_of_barriers(run: Any) -> None:
    relaxed = "  fence_mbarrier_init();\n}\ncluster_arrive_relaxed();\ncluster_wait();\n"
    kernel = KERNEL.replace("  fence_mbarrier_init();\n}\ncluster_arrive(); cluster_wait();\n", relaxed)
    assert kernel != KERNEL
    assert launch(run, kernel, race=True)
    with pytest.raises(EmulationError, match="race: "):
        launch(run, kernel.replace("  fence_mbarrier_init();\n", ""), race=True)


@pytest.mark.parametrize(
    ("old", "new", "mode", "words"),
    [
        (
            "if (lane < 2) mbarrier_arrive_cluster(map_to_rank(empty + 8 * stage, lane))",
            "if (lane < 1) mbarrier_arrive(empty + 8 * stage)",
            "plain",
            "has 1 of 2 arrivals",
        ),
        ("full + 8 * stage, 3, 0,", "full + 8 * stage, 1, 0,", "plain", "deadlock"),
        ("stage, kStageBytes);", "stage, kStageBytes / 2);", "plain", ""),
        ("+ 512 * rank, source", ", source", "plain", ""),
        ("mbarrier_wait_cluster(empty + 8 * stage, parity ^ 1);", "", "plain", ""),
        ("    warp_sync();\n", "", "race", "race: a bulk load"),
        ("mbarrier_init(empty + 8 * i, 2)", "mbarrier_init(empty + 8 * i, 1)", "plain", ""),
        ("}\ncluster_arrive(); cluster_wait();\nu32", "}\nblock_sync();\nu32", "race", "which may not have started"),
        ("}\ncluster_arrive(); cluster_wait();\n", "}\n", "race", ""),
    ],
)
def test_a_planted_bug_is_caught(run: Any, old: str, new: str, mode: str, words: str) -> None:
    kernel = KERNEL[: KERNEL.rindex(old)] + new + KERNEL[KERNEL.rindex(old) + len(old) :]
    try:
        found = "" if launch(run, kernel, race=mode == "race") else "wrong result"
    except EmulationError as error:
        found = str(error)
    assert found
    assert words in found


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("mbarrier_arrive(map_to_rank(bar, 1))", "invalid operand: mbarrier_arrive at address"),
        ("mbarrier_wait(map_to_rank(bar, 1), 0)", "invalid operand: mbarrier_wait at address"),
        ("mbarrier_init(map_to_rank(bar, 1), 1)", "shared memory out of bounds: mbarrier_init"),
        (
            "mbarrier_arrive_cluster(map_to_rank(bar + 8, 1))",
            "uninitialised mbarrier: mbarrier_arrive_cluster at offset 8",
        ),
        (
            "bulk_load(map_to_rank(bar + 64, 1), x, 16, bar)",
            "bulk_load into one block, counted by the mbarrier of another",
        ),
        ("bulk_store(out, map_to_rank(bar + 64, 1), 16)", "bulk_store from the shared memory of another block"),
    ],
)
def test_misuse_is_a_finding_at_its_line(run: Any, call: str, message: str) -> None:
    body = """const u32 bar = shared_address(shared);
    if (thread_idx() == 0) { mbarrier_init(bar, 1); fence_mbarrier_init(); }
    cluster_arrive(); cluster_wait();
    if (thread_idx() == 0 && cluster_rank() == 0)
    """
    with pytest.raises(EmulationError) as caught:
        run(
            body + call + ";\ncluster_arrive(); cluster_wait();",
            blocks=2,
            cluster=2,
            resident=2,
            smem=512,
            x=np.zeros(8, np.float32),
            out=np.zeros(8, np.float32),
        )
    assert message in str(caught.value)
    assert "at kernels/test.cu:5" in str(caught.value)


def test_a_run_of_bytes_may_go_to_another_block(run: Any) -> None:
    storage = np.zeros(12, np.float32)
    x = storage[-storage.ctypes.data // 4 % 4 :][:8]
    x[...] = np.arange(8)
    body = """const u32 bar = shared_address(shared);
    if (thread_idx() == 0) { mbarrier_init(bar, 1); fence_mbarrier_init(); }
    cluster_arrive(); cluster_wait();
    if (thread_idx() == 0 && cluster_rank() == 0)
      bulk_load(map_to_rank(bar + 64, 1), x, 32, map_to_rank(bar, 1));
    if (cluster_rank() == 1) {
      if (thread_idx() == 0) mbarrier_arrive_expect_tx(bar, 32);
      mbarrier_wait(bar, 0);
      if (thread_idx() < 8) out[thread_idx()] = reinterpret_cast<float*>(shared + 64)[thread_idx()];
    }
    cluster_arrive(); cluster_wait();"""
    for schedule in SCHEDULES:
        for race in (False, True):
            out = np.zeros(8, np.float32)
            run(body, blocks=2, cluster=2, resident=2, smem=512, schedule=schedule, race=race, x=x, out=out)
            np.testing.assert_array_equal(out, x)
