"""Bytes of global memory that a launch moves, counted by array."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flashgen.emulator import LaunchTraffic


@pytest.fixture(name="count")
def count_fixture(run: Any) -> Any:
    """Runs a kernel, and gives what it moved."""

    def count(body: str, **options: Any) -> LaunchTraffic:
        traffic: list[LaunchTraffic] = []
        run(body, traffic=traffic, **options)
        (launch,) = traffic
        return launch

    return count


def test_loads_and_stores_of_cpp_count_by_their_width(count: Any) -> None:
    x, out = np.zeros(64, np.float32), np.zeros(64, np.uint8)
    moved = count("out[thread_idx()] = static_cast<u8>(x[thread_idx() + 32]);", x=x, out=out)
    assert moved.read == {"x": 32 * 4}
    assert moved.written == {"out": 32}


def test_a_vector_load_counts_all_its_bytes(count: Any) -> None:
    x, out = np.zeros(128, np.float32), np.zeros(128, np.float32)
    body = """struct alignas(16) Four { float values[4]; };
    reinterpret_cast<Four*>(out)[thread_idx()] = reinterpret_cast<const Four*>(x)[thread_idx()];"""
    moved = count(body, x=x, out=out)
    assert moved.read == {"x": 512}
    assert moved.written == {"out": 512}


def test_shared_and_local_memory_count_nothing(count: Any) -> None:
    out = np.zeros(32, np.float32)
    body = """auto* f = reinterpret_cast<float*>(shared);
    float local[32];
    for (int i = 0; i < 32; ++i) local[i] = f[thread_idx()] = i;
    out[thread_idx()] = local[thread_idx()] + f[thread_idx()];"""
    moved = count(body, smem=128, out=out)
    assert (moved.read, moved.written) == ({}, {"out": 128})


@pytest.mark.parametrize("size", [4, 8, 16])
def test_cp_async_counts_the_valid_bytes_and_not_the_zeros(count: Any, size: int) -> None:
    x = np.zeros(32 * size, np.uint8)
    body = f"""const int t = thread_idx();
    cp_async_{size}(shared_address(shared) + t * {size}, x + t * {size}, t < 5 ? {size} : t < 10 ? 3 : 0);
    cp_async_commit();
    cp_async_wait<0>();"""
    assert count(body, smem=512, x=x).read == {"x": 5 * size + 5 * 3}


def test_a_reduction_counts_once_as_a_write(count: Any) -> None:
    out = np.zeros(1, np.float32)
    moved = count("reduce_add(out, 1.0f);", out=out)
    assert out[0] == 32
    assert (moved.read, moved.written) == ({}, {"out": 32 * 4})


def test_an_acquiring_load_counts_once(count: Any) -> None:
    flag = np.zeros(1, np.uint32)
    assert count("if (thread_idx() == 0) load_acquire(flag);", flag=flag).read == {"flag": 4}


def test_nothing_is_counted_unless_asked_for(run: Any) -> None:
    out = np.zeros(32, np.float32)
    run("out[thread_idx()] = 1.0f;", out=out)
    assert (out == 1).all()


def test_counting_does_not_look_for_races(count: Any) -> None:
    out = np.zeros(1, np.int32)
    assert count("out[0] = thread_idx();", blocks=2, out=out).written == {"out": 2 * 32 * 4}
