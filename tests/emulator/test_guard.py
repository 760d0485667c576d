from __future__ import annotations

import gc
import mmap
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from flashgen.emulator import guarded_copy
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


@pytest.mark.parametrize("options", [{"at": "middle"}, {"alignment": 0}, {"alignment": 24}])
def test_a_senseless_place_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(LaunchError, match=next(iter(options))):
        guarded_copy(np.zeros(4), **options)
