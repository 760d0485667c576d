from __future__ import annotations

import ctypes
import gc
import mmap
import struct
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from flashgen.emulator import Buffer, GuardedCall, guard, guarded_copy
from flashgen.emulator.kernel import EmulatedKernel
from flashgen.errors import EmulationError, LaunchError

PAGE = mmap.PAGESIZE


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("at", ["end", "begin"])
@pytest.mark.parametrize("shape", [(1,), (3, 5, 7), (PAGE,), (2, 0, 3), ()])
def test_a_guarded_copy_is_equal_and_touches_a_page_boundary(dtype: Any, at: Any, shape: Any) -> None:
    array = np.random.default_rng(0).standard_normal(shape).astype(dtype)
    copy = guarded_copy(array, at=at, alignment=array.itemsize)
    np.testing.assert_array_equal(copy, array)
    assert (copy.dtype, copy.strides) == (array.dtype, array.strides)
    edge = copy.ctypes.data + (array.nbytes if at == "end" else 0)
    assert edge % PAGE == 0


@pytest.mark.parametrize(
    "view",
    [lambda a: a[:, ::2], lambda a: a[::-1], lambda a: a.transpose(2, 0, 1), lambda a: a[::-1, 1:3, ::-2]],
    ids=["step", "reversed", "transposed", "mixed"],
)
@pytest.mark.parametrize("at", ["end", "begin"])
def test_strides_are_kept(view: Any, at: Any) -> None:
    array = view(np.arange(4 * 5 * 6, dtype=np.float32).reshape(4, 5, 6))
    copy = guarded_copy(array, at=at)
    np.testing.assert_array_equal(copy, array)
    assert copy.strides == array.strides


@pytest.mark.parametrize("count", [1, 5, PAGE - 1, PAGE, 3 * PAGE + 2])
@pytest.mark.parametrize("alignment", [1, 2, 16, 256])
def test_the_address_is_aligned_and_the_gap_is_smaller_than_the_alignment(count: int, alignment: int) -> None:
    copy = guarded_copy(np.zeros(count, np.uint8), alignment=alignment)
    assert copy.ctypes.data % alignment == 0
    assert -(copy.ctypes.data + count) % PAGE < alignment


def test_the_memory_lives_as_long_as_any_view() -> None:
    view = guarded_copy(np.arange(100_000))[5:]
    gc.collect()
    np.testing.assert_array_equal(view, np.arange(5, 100_000))


@pytest.mark.parametrize(
    ("at", "body", "message"),
    [
        ("end", "\nout[0] = x[32];", "a load from address .*, 0 bytes past the end of 'x'"),
        ("begin", "\nout[0] = x[-1];", "a load from address .*, 4 bytes before 'x'"),
        ("end", "\nout[33] = 1.0f;", "a store to address .*, 4 bytes past the end of 'out'"),
    ],
)
def test_a_stray_access_beside_a_guarded_array_is_a_finding(run: Any, at: Any, body: str, message: str) -> None:
    x = guarded_copy(np.zeros(32, np.float32), at=at)
    out = guarded_copy(np.zeros(32, np.float32), at=at)
    with pytest.raises(EmulationError, match=message) as caught:
        run(body, x=x, out=out)
    assert "at kernels/test.cu:2" in str(caught.value)


def can_be_mapped(address: int) -> bool:
    """Whether memory that this process asks for next can come to lie there."""
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    got = libc.mmap(address, PAGE, ctypes.c_int(0), ctypes.c_int(flags), ctypes.c_int(-1), ctypes.c_long(0))
    assert libc.munmap(got, PAGE) == 0
    return bool(got == address)


@pytest.mark.parametrize("distance", [2 * PAGE, 2**20, 2**31, 2**33])
@pytest.mark.parametrize("sign", [-1, 1])
def test_nothing_else_lies_where_a_stray_store_leaps_over_the_nearest_page(distance: int, sign: int) -> None:
    array = guarded_copy(np.zeros(8, np.float32))
    assert not can_be_mapped(array.ctypes.data // PAGE * PAGE + sign * distance)


def test_a_store_that_leaps_over_the_nearest_page_is_a_finding(run: Any) -> None:
    out = guarded_copy(np.zeros(32, np.float32))
    with pytest.raises(EmulationError, match=f"a store to address .*, {2**33} bytes past the end of 'out'"):
        run(f"out[32 + {2**31}ll] = 1.0f;", out=out)
    with pytest.raises(EmulationError, match=f"a store to address .*, {2**33} bytes before 'out'"):
        run(f"out[-{2**31}ll] = 1.0f;", out=out)


def test_where_address_space_is_short_one_page_traps(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "_REACH", 2**60)
    out = guarded_copy(np.zeros(32, np.float32))
    with pytest.raises(EmulationError, match="0 bytes past the end of 'out'"):
        run("out[32] = 1.0f;", out=out)


@pytest.mark.parametrize("options", [{"at": "middle"}, {"alignment": 0}, {"alignment": 24}])
def test_a_senseless_place_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(LaunchError, match=next(iter(options))):
        guarded_copy(np.zeros(4), **options)


def stretch(name: str, array: np.ndarray[Any, Any], *, writable: bool = False) -> tuple[str, int, int, bool]:
    return name, array.ctypes.data, array.nbytes, writable


KERNEL = """
#include "flashgen/primitives.cuh"
using namespace flashgen;
struct Params {{ const unsigned char* x; unsigned char* out; }};
FLASHGEN_KERNEL(32, 1) kernel_under_test(FLASHGEN_GRID_CONSTANT Params params) {{
  const unsigned char* x = params.x;
  unsigned char* out = params.out;
#line 1 "kernels/test.cu"
{body}
}}
"""


def call(body: str, size: int, at: Any = "end", *, race: bool = False) -> np.ndarray[Any, Any]:
    """What a kernel writes for ``size`` input bytes, on guarded copies."""
    x, out = np.arange(size, dtype=np.uint8), np.full(size, 7, np.uint8)
    guarded = GuardedCall([stretch("x", x), stretch("out", out, writable=True)], at)
    params = struct.pack("2Q", guarded.moved(x.ctypes.data), guarded.moved(out.ctypes.data))
    buffers = [
        Buffer("x", guarded.moved(x.ctypes.data), size),
        Buffer("out", guarded.moved(out.ctypes.data), size, True),
    ]
    kernel = EmulatedKernel("kernel_under_test", KERNEL.format(body=body), race=race)
    kernel.launch(1, params, buffers, threads=32, race=race)
    guarded.copy_back()
    return out


@pytest.mark.parametrize("at", ["end", "begin"])
@pytest.mark.parametrize("size", [1, 37, PAGE - 1, PAGE, PAGE + 1])
def test_a_guarded_call_reads_and_writes_the_callers_memory(size: int, at: Any) -> None:
    body = f"for (int i = thread_idx(); i < {size}; i += 32) out[i] = x[i];"
    np.testing.assert_array_equal(call(body, size, at), np.arange(size, dtype=np.uint8))


@pytest.mark.parametrize("size", [1, 37, PAGE])
@pytest.mark.parametrize(
    ("at", "body", "message"),
    [
        ("end", "\nif (thread_idx() == 9) out[0] = x[{size}];", "a load from .* 0 bytes past the end of 'x'"),
        ("begin", "\nif (thread_idx() == 9) out[0] = x[-1];", "a load from .* 1 bytes before 'x'"),
        ("end", "\nif (thread_idx() == 9) out[{size}] = 1;", "a store to .* 0 bytes past the end of 'out'"),
        ("begin", "\nif (thread_idx() == 9) out[-1] = 1;", "a store to .* 1 bytes before 'out'"),
    ],
)
def test_one_stray_byte_is_a_finding_that_says_who_and_where(size: int, at: Any, body: str, message: str) -> None:
    with pytest.raises(EmulationError, match=message) as caught:
        call(body.format(size=size), size, at)
    error = caught.value
    assert error.kind == "global memory out of bounds"
    assert (error.file, error.line) == ("kernels/test.cu", 2)
    assert (error.block, error.warp, error.lane) == ((0, 0, 0), 0, 9)


def test_a_store_to_what_is_only_read_is_a_finding() -> None:
    for race in (False, True):
        with pytest.raises(EmulationError, match=r"a store writes to address 0x\w+, offset 3 of 'x'") as caught:
            call("\nconst_cast<unsigned char*>(x)[3] = 1;", 37, race=race)
        assert caught.value.kind == "write to read-only memory"
        assert (caught.value.file, caught.value.line) == ("kernels/test.cu", 2)


@pytest.mark.parametrize(("at", "place", "where"), [("end", "-1", "before"), ("begin", "37", "behind")])
def test_a_store_on_the_side_without_a_page_is_found_afterwards(at: Any, place: str, where: str) -> None:
    with pytest.raises(EmulationError, match=f"wrote {where} 'out' \\(37 bytes\\)") as caught:
        call(f"\nif (thread_idx() == 0) out[{place}] = 1;", 37, at)
    assert caught.value.kind == "global memory out of bounds"
    with pytest.raises(EmulationError) as caught:
        call(f"\nif (thread_idx() == 0) out[{place}] = 1;", 37, at, race=True)
    assert caught.value.line == 2


def test_views_that_share_memory_share_their_copy() -> None:
    base = np.arange(60, dtype=np.uint8)
    q, k, empty, other = base[:40], base[20:], base[30:30], np.zeros(4, np.uint8)
    guarded = GuardedCall([stretch("q", q), stretch("empty", empty), stretch("k", k), stretch("other", other)])
    start = guarded.moved(q.ctypes.data)
    assert guarded.moved(k.ctypes.data) == start + 20
    assert guarded.moved(empty.ctypes.data) == start + (empty.ctypes.data - base.ctypes.data)
    assert (start + 60) % PAGE == 0
    assert guarded.moved(other.ctypes.data) != other.ctypes.data


def test_an_empty_array_lies_on_a_page_that_traps() -> None:
    empty = np.zeros(0, np.uint8)
    guarded = GuardedCall([stretch("x", empty)])
    assert guarded.moved(empty.ctypes.data) % PAGE == 0
    assert guarded.moved(empty.ctypes.data) != empty.ctypes.data


def test_a_view_of_distant_rows_stays_where_it_is() -> None:
    far = np.lib.stride_tricks.as_strided(np.zeros(1, np.uint8), (2,), (2**40,))
    guarded = GuardedCall([("far", far.ctypes.data, 2**40 + 1, False)])
    assert guarded.moved(far.ctypes.data) == far.ctypes.data


def test_an_address_of_nothing_stays() -> None:
    assert GuardedCall([]).moved(12345) == 12345


def test_a_senseless_side_is_refused() -> None:
    with pytest.raises(LaunchError, match="at='middle'"):
        GuardedCall([], "middle")  # type: ignore[arg-type]
