"""A case on a GPU."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from conformance.case import Array, Case
from conformance.packing import arrays_of, pack
from conformance.source import symbol
from conformance.units import ARCH, Unit
from flashgen.launch.driver.cuda import get_driver
from flashgen.launch.driver.launch_attributes import Configs, LaunchShape

#: Bytes around each array that no kernel may touch.
_MARGIN = 256
_UNTOUCHED = 0xB5
_PARAMS_ALIGNMENT = 64


class Gpu:
    """The first device, with its primary context current."""

    def __init__(self) -> None:
        self._driver = get_driver()
        self._driver.push_context(self._driver.primary_context(0))
        self._libraries: dict[bytes, Any] = {}
        self._configs = Configs()

    @property
    def capability(self) -> int:
        """10 * major + minor."""
        return self._driver.capability(0)

    def describe(self) -> dict[str, Any]:
        """Which GPU and driver answer."""
        name = self._driver.call("cuDeviceGetName", 256, self._driver.call("cuDeviceGet", 0))
        return {
            "name": name.split(b"\0")[0].decode(),
            "arch": ARCH,
            "driver": int(self._driver.call("cuDriverGetVersion")),
        }

    def run(self, case: Case, unit: Unit, image: bytes) -> dict[str, Array]:
        """The outputs after the launch; LaunchError when the driver reports one."""
        driver = self._driver
        if image not in self._libraries:
            self._libraries[image] = driver.load(image)
        function = driver.function(self._libraries[image], symbol(case.kernel), case.smem_bytes)
        memory = {name: _Memory(driver, value) for name, value in arrays_of(case).items()}
        addresses = {name: block.address for name, block in memory.items()}
        data = pack(case, unit.variants.index(case.variant), addresses, lambda m: m.encoded(addresses, driver))
        params, pointers = _kernel_params(data)
        cluster = (case.cluster, 1, 1) if case.cluster else None
        shape = LaunchShape(case.grid, case.threads, case.smem_bytes, cluster=cluster, cooperative=case.cooperative)
        for launch in range(case.launches):
            following = shape._replace(overlaps_predecessor=launch > 0)
            config = self._configs.of(driver, following)
            driver.call("cuLaunchKernelEx", config, function, ctypes.addressof(pointers), 0)
        driver.call("cuCtxSynchronize")
        del params
        try:
            return {name: memory[name].read(name) for name in case.outputs}
        finally:
            for block in memory.values():
                block.free()


class _Memory:
    """A copy of an array on the device, between margins."""

    def __init__(self, driver: Any, array: Array) -> None:
        self._driver, self._like = driver, array
        margin = np.full(_MARGIN, _UNTOUCHED, np.uint8)
        data = np.concatenate([margin, np.ascontiguousarray(array).reshape(-1).view(np.uint8), margin])
        self._base = int(driver.call("cuMemAlloc", data.nbytes))
        self._bytes = data.nbytes
        driver.call("cuMemcpyHtoD", self._base, data.ctypes.data, data.nbytes)
        self.address = self._base + _MARGIN

    def read(self, name: str) -> Array:
        """The array as it is now."""
        data = np.empty(self._bytes, np.uint8)
        self._driver.call("cuMemcpyDtoH", data.ctypes.data, self._base, data.nbytes)
        if (data[:_MARGIN] != _UNTOUCHED).any() or (data[-_MARGIN:] != _UNTOUCHED).any():
            raise RuntimeError(f"the kernel wrote beside {name}")
        inner: Array = data[_MARGIN:-_MARGIN].copy().view(self._like.dtype).reshape(self._like.shape)
        return inner

    def free(self) -> None:
        """Give the memory back."""
        self._driver.call("cuMemFree", self._base)


def _kernel_params(data: bytes) -> tuple[Any, Any]:
    """The struct at an aligned address, and an array of the one pointer to it."""
    storage = ctypes.create_string_buffer(len(data) + _PARAMS_ALIGNMENT)
    start = -ctypes.addressof(storage) % _PARAMS_ALIGNMENT
    ctypes.memmove(ctypes.addressof(storage) + start, data, len(data))
    return storage, (ctypes.c_void_p * 1)(ctypes.addressof(storage) + start)
