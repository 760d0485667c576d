from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import MagicMock

import ml_dtypes
import numpy as np
import pytest

from flashgen.arch import get_arch
from flashgen.cli.gpu.arrays import archs_to_build
from flashgen.dtypes import DTYPES
from flashgen.errors import DriverError, NoGpuError
from flashgen.expr import element_type, is_tensor
from flashgen.launch.arrays.array import contiguous_strides
from flashgen.launch.arrays.foreign_arrays import _from_interface
from flashgen.launch.copies.arrays import to_device, to_host
from flashgen.launch.copies.captured_copy import CapturedCopy
from flashgen.launch.driver.cuda import get_driver
from flashgen.launch.driver.devices import Gpu, find_gpus
from flashgen.spec import AttentionSpec
from flashgen.verify.cases.huge_strides import HUGE_STRIDE_AXES, HugeStrideLayout
from flashgen.verify.cases.layouts import ORDINARY_LAYOUTS, OrdinaryLayout, laid_out


def test_without_a_driver_there_are_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> None:
        raise NoGpuError("no NVIDIA driver was found")

    monkeypatch.setattr("flashgen.launch.driver.cuda.get_driver", none)
    assert find_gpus() == ()


def test_what_is_asked_for_comes_before_what_is_found() -> None:
    gpus = (Gpu(0, "A GPU", 86, 2**34), Gpu(1, "Another", 90, 2**34))
    asked = (get_arch("sm_120"),)
    spec, eight_bits = AttentionSpec(64), AttentionSpec(64, dtype="e4m3", direction="forward")
    assert archs_to_build(asked, gpus, spec) == asked
    assert archs_to_build((), gpus, spec) == (get_arch("sm_86"),)
    assert archs_to_build((), (), spec) == (get_arch("sm_80"), get_arch("sm_90a"))
    assert archs_to_build((), (), eight_bits) == (get_arch("sm_89"), get_arch("sm_90a"))


class HostDriver:
    """A driver whose device memory is this process's."""

    def __init__(self) -> None:
        self._memory: list[Any] = []

    @contextmanager
    def on(self, device: int) -> Iterator[None]:
        yield

    def allocate(self, nbytes: int, stream: int) -> int:
        self._memory.append(ctypes.create_string_buffer(nbytes))
        return ctypes.addressof(self._memory[-1])

    def free(self, pointer: int, stream: int) -> None:
        pass

    def call(self, name: str, to: int, source: int, nbytes: int) -> None:
        assert name == "cuMemcpyHtoD"
        assert nbytes <= len(self._memory[-1])
        ctypes.memmove(to, source, nbytes)


@pytest.mark.parametrize("layout", ORDINARY_LAYOUTS)
def test_an_array_goes_to_the_gpu_as_it_is_laid_out(layout: OrdinaryLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = HostDriver()
    monkeypatch.setattr("flashgen.launch.driver.cuda.get_driver", lambda: driver)
    array = laid_out(np.random.default_rng(0).standard_normal((2, 5, 3, 8)), layout, np.float32)
    info = to_device(array, 0).info
    assert (info.shape, tuple(4 * stride for stride in info.strides)) == (array.shape, array.strides)
    elements = [
        ctypes.c_float.from_address(info.pointer + 4 * int(np.dot(index, info.strides))).value
        for index in np.ndindex(array.shape)
    ]
    np.testing.assert_array_equal(np.reshape(elements, array.shape).astype(np.float32), array)
    assert to_device(array[:, :0], 0).shape == (2, 0, 3, 8)


@pytest.mark.parametrize("dtype", ["bool", "int8", "int64", "float32", "float64", "bfloat16"])
def test_a_captured_tensor_is_copied_whatever_its_elements(monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    driver = HostDriver()
    monkeypatch.setattr("flashgen.launch.copies.captured_copy.get_driver", lambda: driver)
    monkeypatch.setattr("flashgen.launch.arrays.foreign_arrays.current_device", lambda: 0)
    monkeypatch.setattr("flashgen.launch.arrays.foreign_arrays.get_driver", lambda: driver)
    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    for array in (np.arange(15).reshape(3, 5).astype(kind)[:, ::2], np.asarray(1, kind)):
        copy = CapturedCopy(array, 0)
        assert (copy.shape, element_type(copy), is_tensor(copy)) == (array.shape, dtype, True)
        address, _ = copy.__cuda_array_interface__["data"]
        assert ctypes.string_at(address, array.nbytes) == array.tobytes()
        info = _from_interface("x", copy.__cuda_array_interface__ | {"data": (0, True)}, None)
        assert (info.shape, info.strides) == (array.shape, contiguous_strides(array.shape))


@pytest.mark.gpu
@pytest.mark.parametrize("name", sorted(DTYPES))
def test_an_array_comes_back_from_the_gpu_as_it_went(name: str) -> None:
    gpu = find_gpus()[0]
    for shape in ((2, 3, 5), (0, 4)):
        array = np.random.default_rng(0).standard_normal(shape).astype(DTYPES[name].numpy())
        back = to_host(to_device(array, gpu.ordinal))
        assert back.dtype == array.dtype
        np.testing.assert_array_equal(back.view(np.uint8), array.view(np.uint8))


@pytest.mark.gpu
@pytest.mark.parametrize("layout", HUGE_STRIDE_AXES)
def test_an_array_with_gaps_of_gigabytes_goes_to_the_gpu_without_them(layout: HugeStrideLayout) -> None:
    gpu = find_gpus()[0]
    driver = get_driver()
    array = laid_out(np.random.default_rng(0).standard_normal((2, 5, 3, 8)), layout, np.float32)
    copy = to_device(array, gpu.ordinal)
    assert (copy.info.shape, tuple(4 * stride for stride in copy.info.strides)) == (array.shape, array.strides)
    row = np.empty(8, np.float32)
    with driver.on(gpu.ordinal):
        for b, q, h in np.ndindex(2, 5, 3):
            address = copy.info.pointer + 4 * int(np.dot((b, q, h), copy.info.strides[:3]))
            driver.call("cuMemcpyDtoH", row.ctypes.data, address, row.nbytes)
            np.testing.assert_array_equal(row, array[b, q, h])


def refusing(monkeypatch: pytest.MonkeyPatch, call: str, status: str) -> None:
    class Refusing(HostDriver):
        api = MagicMock()

        def call(self, name: str, *arguments: Any) -> Any:
            if name == call:
                raise DriverError(f"{name} failed: {status}", status)
            return super().call(name, *arguments) if name == "cuMemcpyHtoD" else 4096

    driver = Refusing()
    monkeypatch.setattr("flashgen.launch.driver.cuda.get_driver", lambda: driver)


def with_a_huge_stride() -> Any:
    return laid_out(np.random.default_rng(0).standard_normal((2, 5, 3, 8)), "huge-head-stride", np.float32)


@pytest.mark.parametrize(
    ("call", "status"),
    [
        ("cuMemGetAllocationGranularity", "CUDA_ERROR_NOT_SUPPORTED"),
        ("cuMemAddressReserve", "CUDA_ERROR_OUT_OF_MEMORY"),
    ],
)
def test_where_no_memory_can_be_mapped_an_array_with_a_huge_stride_is_copied_close_together(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, call: str, status: str
) -> None:
    refusing(monkeypatch, call, status)
    array = with_a_huge_stride()
    with caplog.at_level("WARNING", "flashgen"):
        info = to_device(array, 0).info
    assert info.strides == contiguous_strides(array.shape)
    assert f"memory of cuda:0 cannot be mapped ({call} failed: {status})" in caplog.text


def test_an_error_of_another_launch_is_no_lack_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    refusing(monkeypatch, "cuMemAddressReserve", "CUDA_ERROR_ILLEGAL_ADDRESS")
    with pytest.raises(DriverError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
        to_device(with_a_huge_stride(), 0)
