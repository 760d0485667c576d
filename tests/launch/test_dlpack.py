"""DLPack capsules, read and made by hand."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest

from flashgen.errors import ArgumentError
from flashgen.launch.arrays import dlpack
from flashgen.launch.arrays.array import HOST, ArrayInfo


class Exporter:
    """Host memory offered through our own capsules."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array = array
        strides = tuple(s // array.itemsize for s in array.strides)
        dtype = {"float16": "fp16", "float32": "fp32"}[array.dtype.name]
        self.info = ArrayInfo("array", array.ctypes.data, array.shape, strides, dtype, HOST)

    def __dlpack_device__(self) -> tuple[int, int]:
        return dlpack.CPU, 0

    def __dlpack__(self, **_: Any) -> Any:
        return dlpack.export(self.info, self.__dlpack_device__(), self)


def example() -> np.ndarray[Any, Any]:
    return np.arange(24, dtype=np.float32).reshape(2, 3, 4)[:, ::-1]


def test_numpys_capsule_is_read() -> None:
    array = np.arange(24, dtype=np.float16).reshape(2, 3, 4)[1:, ::2]
    info = dlpack.read("q", array.__dlpack__())
    assert (info.shape, info.strides, info.dtype, info.device) == ((1, 2, 4), (12, 8, 1), "fp16", HOST)
    assert info.pointer == array.ctypes.data


def test_reading_leaves_the_capsule_to_its_producer() -> None:
    array = np.zeros(3, np.float32)
    capsule = array.__dlpack__()
    for _ in range(2):
        dlpack.read("q", capsule)
    del capsule
    assert np.array_equal(array, np.zeros(3))


@pytest.mark.parametrize("writable", [False, True])
def test_a_versioned_capsule_says_whether_others_may_write(writable: bool) -> None:
    array = np.arange(24, dtype=np.float32).reshape(2, 3, 4)[:, 1:]
    array.flags.writeable = writable
    info = dlpack.read("k", dlpack.capsule(array, None))
    assert (info.shape, info.strides, info.dtype, info.writable) == ((2, 2, 4), (12, 4, 1), "fp32", writable)
    assert info.pointer == array.ctypes.data


def test_a_library_without_versions_is_asked_without_one() -> None:
    class Old(Exporter):
        def __dlpack__(self, stream: Any = None) -> Any:
            return super().__dlpack__()

    old = Old(example())
    for _ in range(2):
        info = dlpack.read("q", dlpack.capsule(old, None))
        assert (info.shape, info.writable) == ((2, 3, 4), True)


def test_a_version_of_another_layout_is_refused() -> None:
    capsule = np.zeros(3, np.float32).__dlpack__(max_version=(1, 0))
    versioned = dlpack._Versioned.from_address(dlpack._get_pointer(capsule, b"dltensor_versioned"))
    versioned.major = 2
    try:
        with pytest.raises(ArgumentError, match="q speaks DLPack 2"):
            dlpack.read("q", capsule)
    finally:
        versioned.major = 1


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint64"])
def test_integers_that_say_where_sequences_lie_are_read(dtype: str) -> None:
    assert dlpack.read("x", np.zeros(2, dtype).__dlpack__()).dtype == dtype


@pytest.mark.parametrize("dtype", ["float64", "int16", "complex64"])
def test_types_that_kernels_do_not_know_are_described(dtype: str) -> None:
    assert dlpack.read("q", np.zeros(2, dtype).__dlpack__()).dtype.startswith("DLPack type")


@pytest.mark.parametrize("thing", [None, 3, object()])
def test_what_is_no_capsule_is_refused(thing: object) -> None:
    with pytest.raises(ArgumentError, match="q gave a DLPack capsule"):
        dlpack.read("q", thing)


def test_our_capsules_are_adopted_without_a_copy() -> None:
    array = example()
    adopted = np.from_dlpack(Exporter(array))
    assert np.array_equal(adopted, array)
    assert adopted.ctypes.data == array.ctypes.data


def test_memory_lives_as_long_as_the_adopter_and_no_longer() -> None:
    exporter = Exporter(example())
    alive = weakref.ref(exporter)
    adopted = np.from_dlpack(exporter)
    del exporter
    gc.collect()
    assert alive() is not None
    assert adopted[0, 0, 0] == 8
    del adopted
    gc.collect()
    assert alive() is None
    assert dlpack._exports == {}


def test_a_capsule_that_nobody_takes_frees_its_memory() -> None:
    exporter = Exporter(example())
    alive = weakref.ref(exporter)
    capsule = exporter.__dlpack__()
    del exporter
    gc.collect()
    assert alive() is not None
    del capsule
    gc.collect()
    assert alive() is None
