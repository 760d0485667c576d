"""Devices on a GPU: arrays, events and memory."""

from __future__ import annotations

from functools import partial

import ml_dtypes
import numpy as np
import pytest

import flashgen as fg
from flashgen.arch import arch_for_capability
from flashgen.lab.bench.case import Case
from flashgen.lab.bench.ours import algorithms
from flashgen.lab.bench.peers import peers
from flashgen.lab.bench.run import Effort, time_attention
from flashgen.lab.timing.device import Device, GpuDevice
from flashgen.launch.driver.devices import find_gpus

CASE = Case("backward", "bf16", 64, True, 300, 2, 3)


def devices() -> list[Device]:
    gpu = find_gpus()[0]
    found: list[Device] = [GpuDevice(gpu)]
    try:
        from flashgen.lab.timing.torch_device import TorchDevice, sees_gpus
    except ImportError:
        return found
    return [*found, TorchDevice(gpu)] if sees_gpus() else found


@pytest.mark.gpu
def test_arrays_come_back_as_they_went() -> None:
    for device in devices():
        for dtype in (np.float32, np.float16, ml_dtypes.bfloat16):
            array = np.random.default_rng(0).standard_normal((2, 3, 5)).astype(dtype)
            back = device.get(device.put(array))
            assert back.dtype == array.dtype
            np.testing.assert_array_equal(back.view(np.uint8), array.view(np.uint8))


@pytest.mark.gpu
def test_calls_take_time_and_memory() -> None:
    for device in devices():
        x = CASE.inputs()
        call = partial(fg.build(CASE.spec), *map(device.put, (x.q, x.k, x.v)))
        call()
        times = device.times(call, 5)
        assert len(times) == 5
        assert all(0 < ms < 100 for ms in times)
        # O in bf16 and L in float32; allocators round up.
        needed = 2 * x.q.size + 4 * 2 * 3 * 300
        assert needed <= device.peak_bytes(call) <= needed + 2**22


@pytest.mark.gpu
def test_all_algorithms_and_torch_are_right_and_timed() -> None:
    arch = arch_for_capability(find_gpus()[0].capability)
    for device in devices():
        others = peers(("torch-math", "torch-flash")) if type(device) is not GpuDevice else ()
        forward = Case("forward", "bf16", 64, True, 300, 2, 3)
        timings = time_attention((forward, CASE), (*algorithms(arch=arch), *others), device, effort=Effort(2, 1.0))
        assert not timings.wrong, str(timings)
        names = {row.algorithm for row in timings.rows if row.case == forward}
        assert {"naive", "grid1d", "grid2d", "fa2", *(other.name for other in others)} <= names, str(timings)
