"""Grids that follow each other: what a grid may touch before it has waited for those before it."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

from flashgen.emulator import GuardedCall, guarded_copy
from flashgen.errors import EmulationError, LaunchError
from flashgen.launch.driver.tensor_map import TensorMap

READ = "out[thread_idx()] = x[thread_idx()];"


def test_what_an_earlier_grid_writes_is_there_after_the_wait(run: Any) -> None:
    x, out = np.arange(32, dtype=np.float32), np.zeros(32, np.float32)
    for race in (False, True):
        run(f"griddep_wait();\n{READ}\ngriddep_launch_dependents();", from_primary=("x",), x=x, out=out, race=race)
        np.testing.assert_array_equal(out, x)


def test_without_the_wait_it_is_nan_and_the_caller_gets_it_back(run: Any) -> None:
    x, out = np.arange(32, dtype=np.float32), np.zeros(32, np.float32)
    run(READ, from_primary=("x",), x=x, out=out)
    assert np.isnan(out).all()
    np.testing.assert_array_equal(x, np.arange(32))


def test_a_finding_gives_it_back_too(run: Any) -> None:
    x = np.arange(32, dtype=np.float32)
    with pytest.raises(EmulationError):
        run("reduce_add(x + 99, 1.0f);", from_primary=("x",), x=x)
    np.testing.assert_array_equal(x, np.arange(32))


#: Ways to touch x, 32 floats: by loads and stores, and by TMA.
READS = {
    "load": "if (t == 0) out[0] = x[0];",
    "cp.async (its source)": "if (t == 0) { cp_async_16(data, x, 16); cp_async_commit(); cp_async_wait<0>(); }",
    "load_acquire": "load_acquire(reinterpret_cast<const u32*>(x));",
    "bulk copy (its source)": "if (t == 0) { EXPECT bulk_load(data, x, 128, bar); } mbarrier_wait(bar, 0);",
    "bulk copy (its source), boxed": "if (t == 0) { EXPECT tma_load_2d(data, map, bar, 0, 0); } mbarrier_wait(bar, 0);",
}
WRITES = {
    "store": "if (t == 0) x[0] = 1.0f;",
    "reduce_add": "reduce_add(x, 1.0f);",
    "atomic_add": "atomic_add(x, 1.0f);",
    "atomic_or": "atomic_or(reinterpret_cast<u32*>(x), 1u);",
    "store_release": "store_release(reinterpret_cast<u32*>(x), 1u);",
    "bulk store": "if (t == 0) { bulk_store(x, data, 128); END }",
    "bulk reduce_add": "if (t == 0) { bulk_reduce_add(x, data, 128); END }",
    "bulk store, boxed": "if (t == 0) { tma_store_2d(map, data, 0, 0); END }",
    "bulk reduce_add, boxed": "if (t == 0) { tma_reduce_add_2d(map, data, 0, 0); END }",
}
#: A barrier of one arrival, and 128 bytes of zeros that TMA sees.
SETUP = """const int t = thread_idx(); const u32 bar = shared_address(shared), data = bar + 128;
for (int i = t; i < 128; i += 32) shared[128 + i] = 0;
if (t == 0) { mbarrier_init(bar, 1); fence_mbarrier_init(); }
fence_proxy_async();
block_sync();
"""


def touching(run: Any, touch: str, x: Any, *, waits: bool) -> None:
    """A kernel that touches x in its line 7, in race mode, with or without having waited."""
    touch = touch.replace("EXPECT", "mbarrier_arrive_expect_tx(bar, 128);")
    touch = touch.replace("END", "bulk_commit(); bulk_wait<0>();")
    body = f'#line 1 "kernels/test.cu"\n{SETUP}{"griddep_wait();" * waits}\n{touch}\ngriddep_wait();'
    maps = {"map": TensorMap(x.ctypes.data, "fp32", (8, 4), (32,), (8, 4))}
    run(body, smem=256, race=True, maps=maps, from_primary=("x",), x=x, out=np.zeros(32, np.float32))


def ones() -> Any:
    """32 of them at an address that is a multiple of 16."""
    return guarded_copy(np.ones(32, np.float32))


@pytest.mark.parametrize("how", [*READS, *WRITES])
def test_touching_it_before_the_wait_is_a_finding_in_race_mode(run: Any, how: str) -> None:
    touch = {**READS, **WRITES}[how]
    with pytest.raises(EmulationError) as caught:
        touching(run, touch, ones(), waits=False)
    text = str(caught.value)
    assert text.startswith(f"missing griddep_wait: a {how.partition(',')[0]} at ")
    assert "offset 0 of 'x' (128 bytes), which an earlier grid may not have finished with" in text
    assert "kernels/test.cu:7" in text
    touching(run, touch, ones(), waits=True)


@pytest.mark.parametrize("how", READS)
def test_so_is_reading_what_this_grid_may_only_read(run: Any, frozen: Any, how: str) -> None:
    with pytest.raises(EmulationError, match="missing griddep_wait") as caught:
        touching(run, READS[how], frozen(ones()), waits=False)
    assert "kernels/test.cu:7" in str(caught.value)
    touching(run, READS[how], frozen(ones()), waits=True)


def test_a_map_of_it_may_be_fetched_before_the_wait(run: Any) -> None:
    touching(run, "prefetch_tensormap(map);", ones(), waits=False)


def test_a_barrier_passes_the_wait_on(run: Any) -> None:
    x, out = np.ones(64, np.float32), np.zeros(64, np.float32)
    body = f"if (thread_idx() == 40) griddep_wait();\nBARRIER\n{READ}"
    options: dict[str, Any] = {"threads": 64, "from_primary": ("x",), "race": True, "x": x, "out": out}
    run(body.replace("BARRIER", "block_sync();"), **options)
    assert (out == 1).all()
    with pytest.raises(EmulationError, match="missing griddep_wait"):
        run(body.replace("BARRIER", ""), **options)


def test_other_buffers_need_no_wait(run: Any) -> None:
    x, out = np.ones(32, np.float32), np.zeros(32, np.float32)
    run(f"{READ}\ngriddep_wait();", from_primary=("y",), race=True, x=x, y=np.ones(4, np.float32), out=out)
    assert (out == 1).all()


def test_buffers_that_overlap_are_given_back_as_they_were(run: Any) -> None:
    x = np.arange(32, dtype=np.float32)
    run("griddep_wait();", from_primary=("x", "y"), x=x[:24], y=x[8:])
    np.testing.assert_array_equal(x, np.arange(32))


def protected() -> tuple[GuardedCall, Any]:
    """Ones where stores trap, and what keeps them there."""
    x = ones()
    call = GuardedCall([("x", x.ctypes.data, x.nbytes, False)])
    return call, np.frombuffer((ctypes.c_float * 32).from_address(call.moved(x.ctypes.data)), np.float32)


@pytest.mark.parametrize("race", [False, True])
def test_what_can_only_be_read_keeps_what_it_holds(run: Any, frozen: Any, race: bool) -> None:
    (call, x), out = protected(), np.zeros(32, np.float32)
    run(f"griddep_wait();\n{READ}", from_primary=("x",), x=frozen(x), out=out, race=race)
    assert (out == 1).all()
    del call


def test_memory_that_cannot_hold_poison_is_refused(run: Any) -> None:
    call, x = protected()
    with pytest.raises((EmulationError, LaunchError), match="writable buffer from_primary is in read-only memory"):
        run("griddep_wait();", from_primary=("x",), x=x)
    del call
