"""Bulk copies of bytes: loads at an mbarrier, stores and reductions in groups."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flashgen.errors import EmulationError

SCHEDULES = ["sequential", "reverse", "random", "priority"]
#: A barrier of one arrival at offset 0, and 16 floats per slot from offset 64 on.
SETUP = """const int t = thread_idx();
const u32 bar = shared_address(shared), data = bar + 64;
auto* f = reinterpret_cast<float*>(shared + 64);
if (t == 0) { mbarrier_init(bar, 1); fence_mbarrier_init(); }
block_sync();
"""


def finding(run: Any, body: str, **options: Any) -> str:
    with pytest.raises(EmulationError) as caught:
        run(SETUP + body, **{"smem": 1024, **options})
    return str(caught.value)


def floats(count: int, value: float = 0) -> np.ndarray[Any, Any]:
    """At an address that is a multiple of 16."""
    storage = np.zeros(count + 4, np.float32)
    array = storage[-storage.ctypes.data // 4 % 4 :][:count]
    array[...] = value
    return array


def counted(count: int) -> np.ndarray[Any, Any]:
    array = floats(count)
    array[...] = np.arange(count)
    return array


@pytest.mark.parametrize("race", [False, True])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_bytes_come_and_go(run: Any, schedule: str, race: bool) -> None:
    x, out = counted(32), floats(32)
    body = """if (t == 0) {
      mbarrier_arrive_expect_tx(bar, 128);
      bulk_load(data, x, 64, bar);
      bulk_load(data + 64, x + 16, 64, bar);
    }
    mbarrier_wait(bar, 0);
    f[t] += 1.0f;
    fence_proxy_async_shared();
    warp_sync();
    if (t == 31) {
      bulk_store(out, data, 128);
      bulk_commit();
      bulk_wait_read<0>();
    }"""
    run(SETUP + body, smem=1024, schedule=schedule, seed=6, race=race, x=x, out=out)
    np.testing.assert_array_equal(out, np.arange(32) + 1)


@pytest.mark.parametrize("race", [False, True])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_reductions_of_all_blocks_and_threads_add_up(run: Any, schedule: str, race: bool) -> None:
    out = floats(20, 0.5)
    body = """for (int i = 0; i < 4; ++i) f[4 * t + i] = 4 * t + i;
    fence_proxy_async();
    bulk_reduce_add(out + 4 * (t % 5), data + 16 * t, 16);
    bulk_commit();
    reduce_add(out + 19, 1.0f);
    bulk_wait<0>();"""
    run(SETUP + body, blocks=3, smem=1024, schedule=schedule, seed=8, race=race, out=out)
    expected = np.full(20, 0.5)
    for t in range(32):
        expected[4 * (t % 5) :][:4] += 3 * np.arange(4 * t, 4 * t + 4)
    expected[19] += 96
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("wait", ["bulk_wait_read<0>", "bulk_wait<0>"])
def test_a_sum_is_read_only_when_additions_to_it_have_been_waited_for(run: Any, wait: str) -> None:
    """Reductions may meet each other, but no ordinary access, however well ordered it is after their issue."""
    out, seen = floats(8), floats(4)
    body = f"""if (t < 4) f[t] = 1;
    fence_proxy_async();
    block_sync();
    if (t < 2) {{
      bulk_reduce_add(out, data, 16);
      bulk_commit();
      {wait}();
    }}
    block_sync();
    if (t == 2) seen[0] = out[3];
    block_sync();
    if (t < 2) bulk_wait<0>();"""
    if wait == "bulk_wait<0>":
        run(SETUP + body, smem=1024, race=True, out=out, seen=seen)
        assert seen[0] == 2
    else:
        with pytest.raises(EmulationError, match=r"missing wait: a load of 4 bytes .* a bulk reduce_add still has in"):
            run(SETUP + body, smem=1024, race=True, out=out, seen=seen)


def test_groups_are_written_in_turn_and_only_when_waited_for(run: Any) -> None:
    x, out = floats(16, 7), floats(16)
    seen = floats(16)
    body = """if (t != 0) return;
    for (int i = 0; i < 16; ++i) f[i] = i + 1;
    fence_proxy_async();
    for (int i = 0; i < 4; ++i) {
      bulk_store(out + 4 * i, data + 16 * i, 16);
      bulk_commit();
    }
    const auto look = [&](int row) { for (int i = 0; i < 4; ++i) seen[4 * row + i] = out[4 * i]; };
    look(0);
    bulk_wait_read<0>();
    look(1);
    bulk_wait<3>();
    look(2);
    bulk_wait<1>();
    look(3);
    bulk_wait<0>();"""
    run(SETUP + body, smem=1024, x=x, out=out, seen=seen)
    np.testing.assert_array_equal(seen.reshape(4, 4), [[0, 0, 0, 0], [0, 0, 0, 0], [1, 0, 0, 0], [1, 5, 9, 0]])
    np.testing.assert_array_equal(out, np.arange(1, 17))


def test_empty_groups_count_as_groups(run: Any) -> None:
    out = floats(4)
    seen = floats(4)
    body = """if (t != 0) return;
    for (int i = 0; i < 4; ++i) f[i] = 1;
    fence_proxy_async();
    bulk_store(out, data, 16);
    bulk_commit();
    bulk_commit();
    bulk_wait<1>();
    seen[0] = out[0];"""
    run(SETUP + body, smem=1024, out=out, seen=seen)
    assert seen[0] == 1


def test_each_thread_waits_for_its_own_groups(run: Any) -> None:
    out, seen = floats(8), floats(4)
    body = """if (t < 4) f[t] = 1;
    fence_proxy_async();
    block_sync();
    if (t < 2) {
      bulk_store(out + 4 * t, data, 16);
      bulk_commit();
    }
    block_sync();
    if (t == 0) {
      bulk_wait<0>();
      seen[0] = out[0];
      seen[1] = out[4];
    }
    block_sync();
    if (t == 1) bulk_wait<0>();"""
    run(SETUP + body, smem=1024, out=out, seen=seen)
    np.testing.assert_array_equal(seen[:2], [1, 0])
    np.testing.assert_array_equal(out, 1)


def test_under_random_schedules_a_store_may_read_early_and_write_late_or_early(run: Any) -> None:
    body = """if (t == 0) {
      f[0] = f[1] = f[2] = f[3] = 1.0f;
      fence_proxy_async();
      bulk_store(out, data, 16);
      bulk_commit();
    }
    for (int i = 0; i < 2; ++i) warp_sync();
    if (t == 0) f[0] = 2.0f;
    for (int i = 0; i < 2; ++i) warp_sync();
    if (t == 0) {
      seen[0] = out[0];
      bulk_wait<0>();
    }"""
    found = set()
    for seed in range(60):
        out, seen = floats(4), floats(4)
        run(SETUP + body, smem=1024, schedule="random", seed=seed, out=out, seen=seen)
        found.add((seen[0], out[0]))
    assert found == {(0, 1), (0, 2), (1, 1), (2, 2)}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("bulk_load(data, x, 24, bar)", "invalid operand: bulk_load of 24 bytes, which is not a multiple of 16"),
        (
            "bulk_load(data + 8, x, 16, bar)",
            "misaligned: bulk_load needs a shared-memory address that is a multiple of 16",
        ),
        ("bulk_load(data, x + 1, 16, bar)", "misaligned: bulk_load needs an address that is a multiple of 16"),
        ("bulk_load(data + 944, x, 32, bar)", "shared memory out of bounds: bulk_load touches 32 bytes at offset 1008"),
        ("bulk_load(data, x + 12, 32, bar)", "global memory out of bounds: bulk_load touches 32 bytes"),
        ("bulk_load(data, x, 16, bar | 1 << 24)", "invalid operand: bulk_load into one block, counted by the mbarrier"),
        ("bulk_store(out, data, 8)", "invalid operand: bulk_store of 8 bytes"),
        ("bulk_store(out + 2, data, 16)", "misaligned: bulk_store needs an address that is a multiple of 16"),
        ("bulk_store(out + 12, data, 32)", "global memory out of bounds: bulk_store touches 32 bytes"),
        ("bulk_store(out, data + 4, 16)", "misaligned: bulk_store needs a shared-memory address"),
        ("bulk_store(const_cast<float*>(x), data, 16)", "write to read-only memory: bulk_store writes to"),
        ("bulk_reduce_add(out + 16, data, 16)", "global memory out of bounds: bulk_reduce_add touches 16 bytes"),
        (
            "bulk_reduce_add(out, data | 1 << 24, 16)",
            "invalid operand: bulk_reduce_add from the shared memory of another",
        ),
    ],
)
def test_misuse_is_a_finding_at_its_line(run: Any, frozen: Any, call: str, message: str) -> None:
    text = finding(run, f"if (t == 0)\n{call};", x=frozen(floats(16)), out=floats(16))
    assert message in text
    assert "at kernels/test.cu:7" in text
    assert "block 0, warp 0, lane 0" in text


def test_a_finding_of_one_launch_leaves_nothing_to_the_next(run: Any) -> None:
    x = counted(16)
    stuck = "if (t == 0) { mbarrier_arrive_expect_tx(bar, 64); bulk_load(data, x, 32, bar); }\nmbarrier_wait(bar, 0);"
    for _ in range(2):
        assert finding(run, stuck, x=x).startswith("deadlock:")
        assert finding(run, "if (t == 0) bulk_load(data, x, 32, bar);", x=x).startswith("missing wait:")
        run(SETUP, smem=1024, x=x)
