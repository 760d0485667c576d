"""Where calls are timed: a GPU through the driver, or the host with a clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from flashgen.errors import DriverError

if TYPE_CHECKING:
    from flashgen.launch.driver.devices import Gpu

Run = Callable[[], object]
#: The legacy default stream, on which torch and unplaced launches run.
_DEFAULT_STREAM = 0
#: The same by the name that arrays of our own know.
_LEGACY_STREAM = 1
#: One flush is enough for the cache. Several keep the GPU busy while the host prepares the next launch: frameworks
#: take up to about 100 us for that, which would else count as time of short kernels.
_FLUSHES = 4


class Device(Protocol):
    """A place that holds arrays and times calls."""

    name: str

    def put(self, array: Any) -> Any:
        """A copy of a NumPy array, for calls to read."""

    def get(self, array: Any) -> Any:
        """A NumPy copy of an array of ``put``, or of a call's result."""

    def times(self, run: Run, calls: int) -> list[float]:
        """Milliseconds of each of some calls, with a cold L2 cache."""

    def peak_bytes(self, run: Run) -> int:
        """The most memory that one call allocates at a time."""

    def release(self) -> None:
        """Gives back memory that is kept for later allocations."""


class HostDevice:
    """The CPU, for NumPy and the emulator; tests bring a clock of their own."""

    def __init__(self, name: str = "CPU", clock: Callable[[], float] = time.perf_counter) -> None:
        self.name = name
        self.clock = clock

    def put(self, array: Any) -> Any:
        """The array itself."""
        return array

    def get(self, array: Any) -> Any:
        """The array itself."""
        return array

    def times(self, run: Run, calls: int) -> list[float]:
        """Milliseconds by the clock. Caches stay warm."""
        found = []
        for _ in range(calls):
            start = self.clock()
            run()
            found.append(1e3 * (self.clock() - start))
        return found

    def peak_bytes(self, run: Run) -> int:
        """Always 0: nothing counts the memory of the host."""
        return 0

    def release(self) -> None:
        """Nothing is kept."""


class GpuDevice:
    """A GPU, with arrays of our own: no framework is needed."""

    def __init__(self, gpu: Gpu) -> None:
        from flashgen.launch.arrays.device_array import DeviceArray
        from flashgen.launch.driver.cuda import get_driver

        self.name = gpu.name
        self.ordinal = gpu.ordinal
        self._driver = driver = get_driver()
        attribute = driver.api.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE
        handle = driver.call("cuDeviceGet", gpu.ordinal)
        # Twice the cache: writing it leaves nothing of an earlier call.
        self._flushed_bytes = 2 * int(driver.call("cuDeviceGetAttribute", attribute, handle))
        self._flushed = DeviceArray(driver, (self._flushed_bytes // 2,), "fp16", gpu.ordinal, _LEGACY_STREAM)

    @property
    def stream(self) -> int:
        """The stream that calls run on."""
        return _DEFAULT_STREAM

    def put(self, array: Any) -> Any:
        """A copy on the GPU."""
        from flashgen.launch.copies.arrays import to_device

        return to_device(array, self.ordinal)

    def get(self, array: Any) -> Any:
        """A copy on the host."""
        from flashgen.launch.copies.arrays import to_host

        return to_host(array)

    def times(self, run: Run, calls: int) -> list[float]:
        """Milliseconds between two CUDA events around each call."""
        driver, stream = self._driver, self.stream
        with driver.on(self.ordinal), self._events(2 * calls) as events:
            for start, end in zip(events[::2], events[1::2], strict=True):
                for _ in range(_FLUSHES):
                    driver.call("cuMemsetD8Async", self._flushed.info.pointer, 0, self._flushed_bytes, stream)
                driver.call("cuEventRecord", start, stream)
                run()
                driver.call("cuEventRecord", end, stream)
            driver.call("cuStreamSynchronize", stream)
            pairs = zip(events[::2], events[1::2], strict=True)
            return [float(driver.call("cuEventElapsedTime", start, end)) for start, end in pairs]

    def peak_bytes(self, run: Run) -> int:
        """The peak of the driver's memory pool."""
        driver = self._driver
        attributes = driver.api.CUmemPool_attribute
        pool = driver.call("cuDeviceGetDefaultMemPool", driver.call("cuDeviceGet", self.ordinal))
        with driver.on(self.ordinal):
            driver.call("cuStreamSynchronize", self.stream)
            before = int(driver.call("cuMemPoolGetAttribute", pool, attributes.CU_MEMPOOL_ATTR_USED_MEM_CURRENT))
            high, zero = attributes.CU_MEMPOOL_ATTR_USED_MEM_HIGH, driver.api.cuuint64_t(0)
            driver.call("cuMemPoolSetAttribute", pool, high, zero)
            run()
            driver.call("cuStreamSynchronize", self.stream)
            return max(0, int(driver.call("cuMemPoolGetAttribute", pool, high)) - before)

    def release(self) -> None:
        """The driver's pool keeps nothing beyond a synchronization."""

    @contextmanager
    def _events(self, count: int) -> Iterator[list[Any]]:
        flags = self._driver.api.CUevent_flags.CU_EVENT_DEFAULT
        events: list[Any] = []
        try:
            for _ in range(count):
                events.append(self._driver.call("cuEventCreate", flags))
            yield events
        finally:
            for event in events:
                self._driver.call("cuEventDestroy", event)


def is_out_of_memory(error: Exception) -> bool:
    """Whether a call failed for lack of memory; torch and CuPy have errors of their own for it."""
    if isinstance(error, DriverError):
        return error.status == "CUDA_ERROR_OUT_OF_MEMORY"
    return isinstance(error, MemoryError) or "OutOfMemory" in type(error).__name__
