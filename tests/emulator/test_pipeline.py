"""A warp-specialised ring: a producer warp loads boxes by TMA, consumers sum them up, and the last one stores.

It is clean under every schedule and in race mode, and each planted bug is caught by the mode that the table names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from flashgen.errors import EmulationError
from flashgen.launch.driver.tensor_map import TensorMap

TILES, STAGES, ROWS, COLUMNS = 7, 3, 8, 32
WIDTH = 70  # of the tensor: its last tile column reaches out of it

KERNEL = """constexpr int kTiles = 7, kStages = 3, kStageBytes = 1024;
const int t = thread_idx(), warp = t / 32, lane = t % 32;
const u32 s = shared_address(shared), full = s + 4096, empty = full + 64;
auto* sums = reinterpret_cast<float*>(shared + 3072);
if (t == 0) {
  for (int i = 0; i < kStages; ++i) {
    mbarrier_init(full + 8 * i, 1);
    mbarrier_init(empty + 8 * i, 2);
  }
  fence_mbarrier_init();
}
block_sync();
if (warp == 0) {
  if (lane == 0) {
    u32 stage = 0, parity = 1;
    for (int i = 0; i < kTiles; ++i) {
      mbarrier_wait(empty + 8 * stage, parity);
      mbarrier_arrive_expect_tx(full + 8 * stage, kStageBytes);
      tma_load_2d(s + kStageBytes * stage, source, full + 8 * stage, 0, 8 * i);
      if (++stage == kStages) stage = 0, parity ^= 1;
    }
  }
} else {
  u32 stage = 0, parity = 0;
  float sum = 0;
  for (int i = 0; i < kTiles; ++i) {
    mbarrier_wait(full + 8 * stage, parity);
    const auto* tile = reinterpret_cast<const float*>(shared + kStageBytes * stage);
    for (int row = 4 * (warp - 1); row < 4 * warp; ++row) sum += tile[32 * row + lane];
    warp_sync();
    if (lane == 0) mbarrier_arrive(empty + 8 * stage);
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
  sums[32 * (warp - 1) + lane] = sum;
  fence_proxy_async_shared();
  if (warp == 2) named_barrier_arrive(1, 64);
  if (warp == 1) named_barrier_sync(1, 64);
  if (t == 32) {
    tma_store_2d(result, s + 3072, 0, 2 * block_idx_x());
    bulk_commit();
    bulk_wait_read<0>();
  }
}
"""


def aligned(rows: int) -> np.ndarray[Any, Any]:
    storage = np.zeros(rows * COLUMNS + 4, np.float32)
    return storage[-storage.ctypes.data // 4 % 4 :][: rows * COLUMNS].reshape(rows, COLUMNS)


def launch(run: Any, kernel: str = KERNEL, **options: Any) -> bool:
    """Runs it; whether the result is right."""
    source, result = aligned(TILES * ROWS), aligned(4)
    source[...] = np.random.default_rng(0).integers(-9, 9, source.shape)
    maps = {
        "source": TensorMap(source.ctypes.data, "fp32", (COLUMNS, TILES * ROWS), (COLUMNS * 4,), (COLUMNS, ROWS)),
        "result": TensorMap(result.ctypes.data, "fp32", (COLUMNS, 4), (COLUMNS * 4,), (COLUMNS, 2)),
    }
    run(kernel, threads=96, blocks=2, smem=4224, maps=maps, x=source, out=result, **options)
    halves = source.reshape(TILES, 2, ROWS // 2, COLUMNS).sum((0, 2))
    return bool((result.reshape(2, 2, COLUMNS) == halves).all())


MODES: dict[str, list[dict[str, Any]]] = {
    "plain": [{"schedule": "sequential"}, {"schedule": "reverse"}],
    "random": [{"schedule": s, "seed": seed} for s in ("random", "priority") for seed in range(30)],
    "race": [{"schedule": "sequential", "race": True}],
}


def caught(run: Any, kernel: str, mode: str) -> str | None:
    """What the first launch of a mode that goes wrong says; None when all are right."""
    for options in MODES[mode]:
        try:
            if not launch(run, kernel, **options):
                return "wrong result"
        except EmulationError as error:
            return str(error)
    return None


@pytest.mark.parametrize("schedule", ["sequential", "reverse", "random", "priority"])
@pytest.mark.parametrize("race", [False, True])
def test_the_pipeline_is_clean(run: Any, schedule: str, race: bool) -> None:
    for seed in range(20 if schedule in ("random", "priority") else 1):
        assert launch(run, schedule=schedule, seed=seed, race=race)


@dataclass(frozen=True)
class Bug:
    """An edit of the kernel, the first of the modes plain and race that finds it, and words of what that says."""

    old: str
    new: str
    mode: str
    words: str


BUGS = {
    "consumers never release a stage": Bug(
        "if (lane == 0) mbarrier_arrive(empty + 8 * stage);", "", "plain", "deadlock"
    ),
    "one consumer never releases": Bug(
        "if (lane == 0) mbarrier_arrive(empty", "if (t == 32) mbarrier_arrive(empty", "plain", "has 1 of 2 arrivals"
    ),
    "every lane releases": Bug(
        "if (lane == 0) mbarrier_arrive(empty", "mbarrier_arrive(empty", "plain", "mbarrier overflow"
    ),
    "the producer starts with the wrong parity": Bug("parity = 1", "parity = 0", "plain", "deadlock"),
    "consumers start with the wrong parity": Bug(
        "stage = 0, parity = 0", "stage = 0, parity = 1", "plain", "mbarrier overflow"
    ),
    "consumers never flip their parity": Bug(
        "stage);\n    if (++stage == kStages) stage = 0, parity ^= 1;",
        "stage);\n    if (++stage == kStages) stage = 0;",
        "plain",
        "deadlock",
    ),
    "the producer never flips its parity": Bug(
        "8 * i);\n      if (++stage == kStages) stage = 0, parity ^= 1;",
        "8 * i);\n      if (++stage == kStages) stage = 0;",
        "plain",
        "mbarrier overflow",
    ),
    "too few bytes are announced": Bug("stage, kStageBytes)", "stage, kStageBytes - 16)", "plain", "deadlock"),
    "too many bytes are announced": Bug("stage, kStageBytes)", "stage, kStageBytes + 16)", "plain", "misses 16 bytes"),
    "no bytes are announced": Bug(
        "mbarrier_arrive_expect_tx(full + 8 * stage, kStageBytes)",
        "mbarrier_arrive(full + 8 * stage)",
        "plain",
        "missing wait: all threads",
    ),
    "the producer does not wait for empty stages": Bug(
        "mbarrier_wait(empty + 8 * stage, parity);", "", "plain", "mbarrier overflow"
    ),
    "consumers do not wait for full stages": Bug(
        "mbarrier_wait(full + 8 * stage, parity);", "", "plain", "mbarrier overflow"
    ),
    "a stage is released before it is read": Bug(
        "    const auto* tile",
        "    if (lane == 0) mbarrier_arrive(empty + 8 * stage);\n    const auto* tile",
        "plain",
        "mbarrier overflow",
    ),
    "a stage is released before all lanes have read it": Bug("    warp_sync();\n", "", "race", "race: a bulk load"),
    "barriers are not fenced": Bug("  fence_mbarrier_init();\n", "", "race", "missing fence: tma_load counts on"),
    "nobody waits until barriers are there": Bug("block_sync();", "", "plain", "uninitialised mbarrier"),
    "sums are not fenced": Bug("  fence_proxy_async_shared();\n", "", "race", "missing fence: a bulk copy"),
    "only the storing thread fences, before it meets the others": Bug(
        "  fence_proxy_async_shared();\n", "  if (t == 32) fence_proxy_async_shared();\n", "race", "missing fence"
    ),
    "the store does not wait for the other warp": Bug(
        "if (warp == 1) named_barrier_sync", "if (false) named_barrier_sync", "plain", "wrong result"
    ),
    "the other warp arrives before it has written": Bug(
        "  sums[32 * (warp - 1)",
        "  if (warp == 2) named_barrier_arrive(1, 64);\n  sums[32 * (warp - 1)",
        "plain",
        "divergent barrier",
    ),
    "the barrier counts one warp only": Bug(
        "named_barrier_sync(1, 64)", "named_barrier_sync(1, 32)", "plain", "wrong result"
    ),
    "the store is not waited for": Bug("bulk_wait_read<0>();", "", "plain", "missing wait: this thread returned"),
    "the store is never committed": Bug("bulk_commit();", "", "plain", "missing wait: this thread returned"),
    "stages overlap": Bug(
        "tma_load_2d(s + kStageBytes * stage", "tma_load_2d(s + 896 * stage", "plain", "wrong result"
    ),
    "one stage too many": Bug("kStages = 3", "kStages = 4", "race", "race:"),
    "the empty barriers count one arrival too many": Bug(
        "mbarrier_init(empty + 8 * i, 2)", "mbarrier_init(empty + 8 * i, 3)", "plain", "has 2 of 3"
    ),
    "the full barrier counts one arrival too many": Bug(
        "mbarrier_init(full + 8 * i, 1)", "mbarrier_init(full + 8 * i, 2)", "plain", "has 1 of 2"
    ),
    "a tile of the wrong rows": Bug("0, 8 * i)", "0, 8 * i + 1)", "plain", "wrong result"),
    "the last load is not consumed": Bug(
        "for (int i = 0; i < kTiles; ++i) {\n    mbarrier_wait(full",
        "for (int i = 0; i + 1 < kTiles; ++i) {\n    mbarrier_wait(full",
        "plain",
        "missing wait: all threads",
    ),
}


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_caught(run: Any, name: str) -> None:
    bug = BUGS[name]
    assert KERNEL.count(bug.old) == 1, "the bug no longer fits the kernel"
    kernel = KERNEL.replace(bug.old, bug.new)
    assert bug.mode == "plain" or caught(run, kernel, "plain") is None
    text = caught(run, kernel, bug.mode)
    assert text is not None
    assert bug.words in text


def test_race_mode_catches_what_no_result_shows(run: Any) -> None:
    """Bugs of the table that need race mode go unseen without it, under every schedule."""
    silent = [name for name, bug in BUGS.items() if bug.mode == "race" and "missing fence" in bug.words]
    assert len(silent) == 3
    for name in silent:
        kernel = KERNEL.replace(BUGS[name].old, BUGS[name].new)
        assert caught(run, kernel, "plain") is None
        assert caught(run, kernel, "random") is None
