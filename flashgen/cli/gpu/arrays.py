"""The GPUs of this machine, and moving NumPy arrays to them and back, without any framework."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flashgen.arch import DEFAULT_ARCHS, Arch, arch_for_capability, get_arch
from flashgen.errors import FlashgenError, NoGpuError

if TYPE_CHECKING:
    from flashgen.cli.gpu.huge_stride_copy import HugeStrideCopy
    from flashgen.launch.arrays.device_array import DeviceArray

#: What is built for where there is no GPU.


@dataclass(frozen=True, slots=True)
class Gpu:
    """One device that this process may use."""

    ordinal: int
    name: str
    capability: int
    memory_bytes: int

    def describe(self) -> str:
        """One line for people."""
        major, minor = divmod(self.capability, 10)
        return f"cuda:{self.ordinal} {self.name}, {major}.{minor}, {self.memory_bytes / 2**30:.0f} GiB"


def find_gpus() -> tuple[Gpu, ...]:
    """Every GPU; none without a driver. Creates no context."""
    from flashgen.launch.driver.cuda import get_driver

    try:
        driver = get_driver()
    except NoGpuError:
        return ()
    gpus = []
    for ordinal in range(driver.device_count()):
        handle = driver.call("cuDeviceGet", ordinal)
        name = bytes(driver.call("cuDeviceGetName", 256, handle)).split(b"\0")[0].decode(errors="replace")
        memory = int(driver.call("cuDeviceTotalMem", handle))
        gpus.append(Gpu(ordinal, name, driver.capability(ordinal), memory))
    return tuple(gpus)


def archs_to_build(asked: tuple[Arch, ...], gpus: tuple[Gpu, ...]) -> tuple[Arch, ...]:
    """What was asked for, else the first GPU's, else the defaults."""
    if asked:
        return asked
    if gpus:
        return (arch_for_capability(gpus[0].capability),)
    return tuple(get_arch(name) for name in DEFAULT_ARCHS)


def to_device(array: Any, ordinal: int) -> DeviceArray | HugeStrideCopy:
    """A copy of a NumPy array on a GPU, with the same strides, and with all that lies between its elements.

    Gaps of gigabytes are left out.
    """
    from dataclasses import replace

    import numpy as np

    from flashgen.cli.gpu.huge_stride_copy import LARGEST_COPIED, huge_stride_copy
    from flashgen.dtypes import DTYPES
    from flashgen.launch.arrays.device_array import DeviceArray
    from flashgen.launch.driver.cuda import get_driver

    driver = get_driver()
    dtype = next((d.name for d in DTYPES.values() if d.numpy() == array.dtype), None)
    if dtype is None:
        raise FlashgenError(f"dtype {array.dtype} has no row in the dtype table; convert the array first")
    if array.size == 0:
        return DeviceArray(driver, array.shape, dtype, ordinal, 1)
    reach = [(size - 1) * stride for size, stride in zip(array.shape, array.strides, strict=True)]
    before = -sum(r for r in reach if r < 0)
    span = before + sum(r for r in reach if r > 0) + array.itemsize
    if span > LARGEST_COPIED:
        return huge_stride_copy(driver, array, dtype, ordinal) or to_device(np.ascontiguousarray(array), ordinal)
    # The legacy default stream (1): plain copies and unplaced launches are ordered by it.
    copy = DeviceArray(driver, (span // array.itemsize,), dtype, ordinal, 1)
    with driver.on(ordinal):
        driver.call("cuMemcpyHtoD", copy.info.pointer, array.ctypes.data - before, span)
    strides = tuple(stride // array.itemsize for stride in array.strides)
    copy.info = replace(copy.info, pointer=copy.info.pointer + before, shape=array.shape, strides=strides)
    return copy


def to_host(array: DeviceArray) -> Any:
    """A NumPy copy of an array on a GPU, once all work before it is done."""
    import numpy as np

    from flashgen.dtypes import DTYPES
    from flashgen.launch.driver.cuda import get_driver

    host = np.empty(array.shape, DTYPES[array.dtype].numpy())
    if host.nbytes:
        driver = get_driver()
        with driver.on(array.info.device):
            driver.call("cuMemcpyDtoH", host.ctypes.data, array.info.pointer, host.nbytes)
    return host
