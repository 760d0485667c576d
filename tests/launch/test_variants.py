"""Less aligned arguments get their own kernels; nothing is compiled or loaded while a graph is captured."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from flashgen.errors import LaunchError
from flashgen.launch.arrays.frameworks import framework_of
from flashgen.launch.call.preparer import Request
from flashgen.spec import KVCache


@pytest.mark.parametrize(
    ("offset", "strides", "access"),
    [
        (0, None, 16),
        (8, None, 8),
        (4, None, 4),
        (2, None, 2),
        (0, (8 * 260, 260, 64, 1), 8),
        (0, (8 * 258, 258, 64, 1), 4),
        (0, (8 * 257, 257, 64, 1), 2),
        (0, (8 * 256 + 2, 256, 64, 1), 4),
    ],
)
def test_the_kernel_matches_the_alignment(bench: Any, array: Any, offset: int, strides: Any, access: int) -> None:
    b = bench(64)
    q, kv = array(2, 8, 4, 64, strides=strides, offset=offset), array(2, 8, 4, 64)
    for _ in range(2):
        b.executor.forward(q, kv, kv)
    assert [x.name.partition(":")[0] for x in b.driver.launches] == [f"access{access}"] * 2
    assert b.variants == ([] if access == 16 else [access])


def test_the_same_shapes_at_another_alignment_are_another_call(bench: Any, array: Any) -> None:
    b = bench(64)
    kv = array(2, 8, 4, 64)
    for offset in (0, 4, 0):
        b.executor.forward(array(2, 8, 4, 64, offset=offset), kv, kv)
    assert [x.name.partition(":")[0] for x in b.driver.launches] == ["access16", "access4", "access16"]


def test_whose_address_it_is_counts(bench: Any, array: Any) -> None:
    """The alignment of lengths is of no account, and that of another array does not stand for it."""
    b, caches = bench(64, cache="contiguous", direction="forward"), [array(2, 40, 4, 64) for _ in range(2)]
    for of_q, of_seqlens in ((0, 8), (8, 0), (8, 8)):
        cache = KVCache(array(2, dtype="<i4", offset=of_seqlens), num_splits=1)
        b.executor.forward(array(2, 8, 4, 64, offset=of_q), *caches, cache=cache)
    assert [x.name.partition(":")[0] for x in b.driver.launches] == ["access16", "access8", "access8"]


def test_a_head_dim_that_allows_no_wide_access_needs_no_other_variant(bench: Any, array: Any) -> None:
    b = bench(33)
    x = array(1, 8, 2, 33)
    b.executor.forward(x, x, x)
    assert b.variants == []
    assert b.driver.launches[0].name.startswith("access2:")


def test_a_cold_kernel_is_refused_during_capture_and_the_remedy_works(bench: Any, array: Any) -> None:
    b = bench(64)
    x = array(1, 8, 2, 64)
    b.driver.capturing = True
    with pytest.raises(LaunchError, match=r"warmup\(0, access_bytes=16\)"):
        b.executor.forward(x, x, x)
    assert (b.driver.loads, b.driver.launches) == ([], [])
    b.driver.capturing = False
    b.executor.variants.load(0, 16)
    b.driver.capturing = True
    # Outputs for such arrays cannot be allocated during capture, so only the preparation is asked for.
    signature, _ = framework_of(x).signature((x, x, x), None)
    b.executor._preparer.call(Request("forward", framework_of(x), (x, x, x), signature, None, None))


def test_an_unaligned_view_is_refused_during_capture(bench: Any, array: Any) -> None:
    b = bench(64)
    x = array(1, 8, 2, 64)
    b.executor.forward(x, x, x)
    b.driver.capturing = True
    with pytest.raises(LaunchError, match=r"4-byte aligned.*warmup\(0, access_bytes=4\)"):
        b.executor.forward(array(1, 8, 2, 64, offset=4), x, x)
    assert b.variants == []


def test_kernels_load_once_per_device_however_many_threads_come(bench: Any, array: Any) -> None:
    b = bench(64, direction="forward")

    def call(i: int) -> None:
        x = array(1, 8 + i % 5, 2, 64, device=i % 2)
        b.executor.forward(x, x, x)

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(call, range(64)))
    assert sorted(b.driver.loads) == [0, 1]
    assert len(b.driver.launches) == 64


def test_threads_never_mix_their_parameters(bench: Any, array: Any) -> None:
    b = bench(64, direction="forward")

    def call(i: int) -> None:
        q, kv = array(1, 8 + i % 7, 2, 64), array(1, 100 + i % 7, 2, 64)
        for _ in range(20):
            b.executor.forward(q, kv, kv)
        expected.add((q.pointer, kv.pointer, 8 + i % 7, 100 + i % 7))

    expected: set[Any] = set()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(call, range(32)))
    seen = {(x.values["q"], x.values["k"], x.values["len_q"], x.values["len_kv"]) for x in b.driver.launches}
    assert seen == expected
