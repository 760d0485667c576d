"""Threads that wait in loops of their own: they let others run where they can, and end in a finding where not."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest

from flashgen.emulator.build import kernel_library
from flashgen.errors import EmulationError

SCHEDULES = ("sequential", "reverse", "random", "priority")


@pytest.fixture(autouse=True)
def limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHGEN_SPIN_LIMIT", "0.1")


def zeros(count: int = 1) -> np.ndarray[Any, Any]:
    return np.zeros(count, np.uint32)


def spinning(run: Any, body: str, **options: Any) -> EmulationError:
    with pytest.raises(EmulationError) as caught:
        run(body, **options)
    return caught.value


LOOPS = {
    "volatile load": "while (*static_cast<volatile u32*>(flag) == 0) {}",
    "plain load": "while (*flag == 0) {}",
    "volatile load of shared memory": "while (*reinterpret_cast<volatile u32*>(shared) != 0) {}",
    "no load": "for (volatile int i = 0;; i = 1) {}",
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop_without_primitives_is_a_livelock_at_its_line(run: Any, loop: str, schedule: str) -> None:
    body = f"shared[thread_idx()] = 1; block_sync();\nif (block_idx_x() == 1 && thread_idx() == 37) {LOOPS[loop]}"
    error = spinning(run, body, threads=64, blocks=2, smem=64, flag=zeros(), schedule=schedule)
    assert error.kind == "livelock"
    assert (error.file, error.line) == ("kernels/test.cu", 2)
    assert (error.block, error.warp, error.lane) == ((1, 0, 0), 1, 5)
    assert "livelock: for 0.1 s of processor time no thread has returned" in str(error)


@pytest.mark.parametrize("loop", ["volatile load", "no load"])
def test_race_mode_finds_a_livelock_too(run: Any, loop: str) -> None:
    error = spinning(run, f"\nif (thread_idx() == 3) {LOOPS[loop]}", flag=zeros(), race=True)
    assert (error.kind, error.file, error.line, error.lane) == ("livelock", "kernels/test.cu", 2, 3)


CALLS = {
    "warp_any": "while (!warp_any(*static_cast<volatile u32*>(flag) != 0)) {}",
    "block_any": "while (!block_any(*static_cast<volatile u32*>(flag) != 0)) {}",
    "fence": "while (*static_cast<volatile u32*>(flag) == 0) fence_proxy_async();",
    "shuffle": "while (shuffle(static_cast<i32>(*static_cast<volatile u32*>(flag)), 0) == 0) {}",
}


@pytest.mark.parametrize("race", [False, True])
@pytest.mark.parametrize("loop", CALLS)
def test_a_loop_of_primitives_that_change_nothing_is_a_livelock(run: Any, loop: str, race: bool) -> None:
    error = spinning(run, f"\n{CALLS[loop]}", threads=64, flag=zeros(), race=race)
    assert (error.kind, error.file, error.line) == ("livelock", "kernels/test.cu", 2)


CALLER = """#include "flashgen/primitives.cuh"
struct Params { float* out; };
FLASHGEN_KERNEL(32, 1) caller(FLASHGEN_GRID_CONSTANT Params p) {
  flashgen::fence_proxy_async();
  *p.out = flashgen::exp2_approx(*p.out);
}
"""
DYNAMIC, END, STUBS = 2, 0, 23


def dynamic_tags(image: bytes) -> list[int]:
    """The kinds of entries that an ELF file of 64 bits has for the loader."""
    (table,) = struct.unpack_from("<Q", image, 0x20)
    size, count = struct.unpack_from("<2H", image, 0x36)
    parts = [struct.unpack_from("<IIQQQQ", image, table + i * size) for i in range(count)]
    (found,) = (part for part in parts if part[0] == DYNAMIC)
    tags = [tag for tag, _ in struct.iter_unpack("<qQ", image[found[2] : found[2] + found[5]])]
    return tags[: tags.index(END)]


@pytest.mark.parametrize("race", [False, True])
def test_calls_of_primitives_use_no_stubs_because_stubs_have_no_line(race: bool) -> None:
    assert STUBS not in dynamic_tags(kernel_library("caller", CALLER, race=race).binary.image)


@pytest.mark.parametrize("look", ["load_acquire(flag)", "atomic_add(flag, 0u)"])
def test_polling_by_a_primitive_for_ever_is_a_deadlock(run: Any, look: str) -> None:
    error = spinning(run, f"\nwhile ({look} == 0) {{}}", threads=64, flag=zeros())
    assert (error.kind, error.line) == ("deadlock", 2)
    assert "offset 0 of 'flag' (4 bytes), which keeps its value" in str(error)


WAITERS = {
    "another lane": ("thread_idx() == 0", "thread_idx() == 31", {}),
    "an earlier lane": ("thread_idx() == 31", "thread_idx() == 0", {}),
    "another warp": ("thread_idx() < 32", "thread_idx() == 63", {"threads": 64}),
    "an earlier warp": ("thread_idx() >= 32", "thread_idx() == 0", {"threads": 64}),
    "another block": ("block_idx_x() == 0", "block_idx_x() == 1", {"blocks": 2, "resident": 2}),
    "an earlier block": ("block_idx_x() == 1", "block_idx_x() == 0", {"blocks": 2, "resident": 2}),
}
LOOKS = {
    "atomic_add": "atomic_add(flag, 0u)",
    "load_acquire": "load_acquire(flag)",
    "volatile load and fence": "(fence_proxy_async(), *static_cast<volatile u32*>(flag))",
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("who", WAITERS)
def test_a_loop_of_primitives_lets_those_run_whom_it_waits_for(run: Any, who: str, look: str, schedule: str) -> None:
    waits, stores, options = WAITERS[who]
    flag, out = zeros(), zeros()
    body = f"""if ({waits}) {{ while ({LOOKS[look]} == 0) {{}} *out = 7; }}
    if ({stores}) store_release(flag, 1u);"""
    run(body, flag=flag, out=out, schedule=schedule, **options)
    assert (flag[0], out[0]) == (1, 7)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_loop_around_a_vote_lets_other_warps_and_blocks_run(run: Any, schedule: str) -> None:
    flag, out = zeros(), zeros()
    body = """if (block_idx_x() == 0 && thread_idx() < 32) {
      while (!warp_any(*static_cast<volatile u32*>(flag) == 2)) {}
      *out = 7;
    }
    if (thread_idx() == 40) atomic_add(flag, 1u);"""
    run(body, threads=64, blocks=2, resident=2, flag=flag, out=out, schedule=schedule)
    assert out[0] == 7


BUSY = "for (volatile int i = 0; i < 4000000; i = i + 1) {}"


def test_a_long_kernel_of_which_something_comes_is_none(run: Any) -> None:
    steps = zeros()
    run(f"if (thread_idx() == 0) for (int s = 0; s < 100; ++s) {{ {BUSY} atomic_add(steps, 1u); }}", steps=steps)
    assert steps[0] == 100


def test_the_limit_can_be_raised_and_lifted(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    body = f"\nif (thread_idx() == 0) for (int s = 0; s < 100; ++s) {BUSY}"
    assert spinning(run, body).kind == "livelock"
    for seconds in ("100", "0"):
        monkeypatch.setenv("FLASHGEN_SPIN_LIMIT", seconds)
        run(body)


def test_what_waits_for_the_spinning_thread_is_listed(run: Any) -> None:
    body = f"\nif (thread_idx() == 40) {LOOPS['no load']}\nblock_sync();"
    text = str(spinning(run, body, threads=64))
    assert "40 threads (warps 0 1) wait at block_sync at test.cu:3 (40 of 64 threads have arrived)" in text


def test_the_runtime_works_after_a_livelock(run: Any) -> None:
    for _ in range(2):
        spinning(run, LOOPS["no load"])
        out = zeros(64)
        run("block_sync(); out[thread_idx()] = 1;", threads=64, out=out)
        assert out.all()
