"""Outputs for libraries that flashgen cannot allocate in."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from flashgen.errors import ArgumentError, LaunchError
from flashgen.launch.arrays import dlpack
from flashgen.launch.arrays.device_array import DeviceArray


def test_memory_is_allocated_and_freed_on_its_stream_and_device(driver: Any) -> None:
    made = DeviceArray(driver, (2, 3), "fp32", 1, 0x66)
    pointer = made.info.pointer
    assert driver.device_of(pointer) == 1
    del made
    gc.collect()
    assert driver.freed == [(pointer, 0x66)]


def test_empty_arrays_take_no_memory(driver: Any) -> None:
    assert DeviceArray(driver, (0, 3), "fp32", 0, 1).info.pointer == 0
    assert driver.freed == []


def test_a_stream_that_is_gone_gives_way_to_the_default(driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    freed = []

    def free(pointer: int, stream: int) -> None:
        if stream == 0x66:
            raise LaunchError("the stream was destroyed")
        freed.append(stream)

    monkeypatch.setattr(driver, "free", free)
    made = DeviceArray(driver, (4,), "fp16", 0, 0x66)
    del made
    gc.collect()
    assert freed == [1]


def test_the_cuda_array_interface_names_memory_type_and_stream(driver: Any) -> None:
    made = DeviceArray(driver, (2, 3), "fp16", 0, 0x66)
    assert made.__cuda_array_interface__ == {
        "shape": (2, 3),
        "typestr": "<f2",
        "data": (made.info.pointer, False),
        "strides": None,
        "stream": 0x66,
        "version": 3,
    }


def test_bf16_is_offered_through_dlpack_alone(driver: Any) -> None:
    made = DeviceArray(driver, (2, 3), "bf16", 1, 1)
    assert not hasattr(made, "__cuda_array_interface__")
    info = dlpack.read("x", made.__dlpack__())
    assert (info.shape, info.strides, info.dtype, info.device) == ((2, 3), (3, 1), "bf16", 1)


@pytest.mark.parametrize(("consumer", "waits"), [(None, [(1, 0x66)]), (0x77, [(0x77, 0x66)]), (0x66, []), (-1, [])])
def test_consumers_wait_for_the_stream_that_writes(driver: Any, consumer: int | None, waits: Any) -> None:
    DeviceArray(driver, (4,), "fp16", 0, 0x66).__dlpack__(stream=consumer)
    assert driver.waits == waits


def test_stream_zero_is_ambiguous(driver: Any) -> None:
    with pytest.raises(ArgumentError, match="ambiguous"):
        DeviceArray(driver, (4,), "fp16", 0, 0x66).__dlpack__(stream=0)


def test_outputs_can_be_inputs(bench: Any, array: Any) -> None:
    b = bench(64)
    x = array(1, 8, 2, 64)
    o, _ = b.executor.forward(x, x, x)
    b.executor.forward(o, x, x)
    assert b.driver.launches[1].values["q"] == o.info.pointer


def test_foreign_outputs_are_refused_during_capture(bench: Any, array: Any) -> None:
    b = bench(64)
    x = array(1, 8, 2, 64)
    b.executor.variants.load(0)
    b.driver.capturing = True
    with pytest.raises(LaunchError, match="use torch or CuPy"):
        b.executor.forward(x, x, x)
    assert b.driver.launches == []
