"""The CUDA driver through cuda.bindings: the few calls a launch needs, with typed errors.

Nothing here creates a context. Each device's primary context is used, the one every framework shares.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from flashgen.arch import Arch, arch_for_capability
from flashgen.errors import DriverError, LaunchError, NoGpuError

#: CUDA graphs have known of grids that overlap since 12.3; an older driver fails where one is captured.
_OVERLAPS_GRIDS = 12030
_NO_GPU = "install the NVIDIA driver, or name an arch (arch='sm_80') to build without a GPU"


class CudaDriver:
    """An initialized driver with at least one device."""

    def __init__(self) -> None:
        try:
            from cuda.bindings import driver
        except ImportError as error:
            raise NoGpuError(f"cuda.bindings cannot be imported ({error}); install cuda-bindings") from error
        self.api: Any = driver
        self.success: Any = driver.CUresult.CUDA_SUCCESS
        self.launch_kernel: Any = driver.cuLaunchKernel
        self.launch_kernel_ex: Any = driver.cuLaunchKernelEx
        self._get_current: Any = driver.cuCtxGetCurrent
        self.process = os.getpid()
        self._contexts: dict[int, int] = {}
        self._lock = threading.Lock()
        self._libraries: dict[bytes, Any] = {}
        self._loading = threading.Lock()
        try:
            (status,) = driver.cuInit(0)
        except RuntimeError:
            # The binding's own traceback says no more, and is two errors long.
            raise NoGpuError(f"no NVIDIA driver was found; {_NO_GPU}") from None
        if status != self.success:
            raise NoGpuError(f"the NVIDIA driver reports {self._describe(status)}; {_NO_GPU}")
        if self.device_count() == 0:
            raise NoGpuError(f"the NVIDIA driver sees no GPU; {_NO_GPU} (CUDA_VISIBLE_DEVICES may hide it)")
        #: Whether a grid may be launched to start before the one before it ends.
        self.overlaps_grids = int(self.call("cuDriverGetVersion")) >= _OVERLAPS_GRIDS

    def call(self, name: str, *arguments: Any) -> Any:
        """Calls a driver function by name; DriverError, in the driver's words, if it fails."""
        status, *results = getattr(self.api, name)(*arguments)
        if status != self.success:
            raise self.fail(name, status)
        return results[0] if results else None

    def _describe(self, status: Any) -> str:
        name, text = (self.api.cuGetErrorName(status)[1], self.api.cuGetErrorString(status)[1])
        words = [part.decode(errors="replace") for part in (name, text) if isinstance(part, bytes)]
        return ": ".join(words) or str(status)

    def fail(self, what: str, status: Any) -> DriverError:
        """The error for a failed launch, to be raised by the caller."""
        return DriverError(f"{what} failed: {self._describe(status)}", getattr(status, "name", str(status)))

    @contextmanager
    def on(self, device: int) -> Iterator[None]:
        """Runs a block with the device's primary context current."""
        self.push_context(self.primary_context(device))
        try:
            yield
        finally:
            self.pop_context()

    def device_count(self) -> int:
        """How many GPUs this process may use."""
        return int(self.call("cuDeviceGetCount"))

    def capability(self, device: int) -> int:
        """10 * major + minor of a device."""
        attribute = self.api.CUdevice_attribute
        handle = self._device(device)
        major = self.call("cuDeviceGetAttribute", attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, handle)
        minor = self.call("cuDeviceGetAttribute", attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, handle)
        return 10 * int(major) + int(minor)

    def device_name(self, device: int) -> str:
        """A device's name, such as NVIDIA H200."""
        name = bytes(self.call("cuDeviceGetName", 256, self._device(device)))
        return name.split(b"\0")[0].decode(errors="replace")

    def multiprocessors(self, device: int) -> int:
        """How many multiprocessors a device has."""
        attribute = self.api.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
        return int(self.call("cuDeviceGetAttribute", attribute, self._device(device)))

    def _device(self, device: int) -> Any:
        if not 0 <= device < self.device_count():
            raise LaunchError(f"cuda:{device} does not exist; this process sees {self.device_count()} GPU(s)")
        return self.call("cuDeviceGet", device)

    def device_of(self, pointer: int) -> int:
        """The ordinal of the device that an address belongs to."""
        attribute = self.api.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
        return int(self.call("cuPointerGetAttribute", attribute, pointer))

    def primary_context(self, device: int) -> int:
        """The device's primary context, retained once and kept for the life of the process."""
        with self._lock:
            if device not in self._contexts:
                self._contexts[device] = int(self.call("cuDevicePrimaryCtxRetain", self._device(device)))
            return self._contexts[device]

    def current_context(self) -> int:
        """The calling thread's context, 0 for none."""
        return int(self._get_current()[1])

    def current_device(self) -> int | None:
        """The ordinal of the calling thread's device, None when it has no context."""
        return int(self.call("cuCtxGetDevice")) if self.current_context() else None

    def push_context(self, context: int) -> None:
        """Makes a context current until ``pop_context``."""
        self.call("cuCtxPushCurrent", context)

    def pop_context(self) -> None:
        """Back to the context before ``push_context``."""
        self.call("cuCtxPopCurrent")

    def load(self, image: bytes) -> Any:
        """A library handle for a cubin; it serves every device that can run it, and every kernel that has the same.

        It stays for the life of the process: a launch may be under way, and a CUDA graph may hold it.
        """
        with self._loading:
            if image not in self._libraries:
                self._libraries[image] = self.call("cuLibraryLoadData", image, [], [], 0, [], [], 0)
            return self._libraries[image]

    def function(self, library: Any, name: str, smem_bytes: int) -> Any:
        """A kernel of a library, loaded into the current context and allowed its dynamic shared memory."""
        kernel = self.call("cuLibraryGetKernel", library, name.encode())
        function = self.call("cuKernelGetFunction", kernel)
        attribute = self.api.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        self.call("cuFuncSetAttribute", function, attribute, smem_bytes)
        return function

    def is_capturing(self, stream: int) -> bool:
        """Whether a CUDA graph is being captured where this stream could see it."""
        status, *results = self.api.cuStreamIsCapturing(stream)
        if status == self.api.CUresult.CUDA_ERROR_STREAM_CAPTURE_IMPLICIT:
            return True
        if status != self.success:
            raise self.fail("cuStreamIsCapturing", status)
        return bool(results[0] != self.api.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE)

    def wait(self, stream: int, producer: int) -> None:
        """Makes later work on ``stream`` wait for what ``producer`` holds now."""
        flags = self.api.CUevent_flags.CU_EVENT_DISABLE_TIMING
        event = self.call("cuEventCreate", flags)
        try:
            self.call("cuEventRecord", event, producer)
            self.call("cuStreamWaitEvent", stream, event, 0)
        finally:
            self.call("cuEventDestroy", event)

    def allocate(self, nbytes: int, stream: int) -> int:
        """Device memory in stream order."""
        return int(self.call("cuMemAllocAsync", nbytes, stream))

    def free(self, pointer: int, stream: int) -> None:
        """Returns memory of ``allocate`` in stream order."""
        self.call("cuMemFreeAsync", pointer, stream)

    def allocate_zeroed(self, nbytes: int) -> int:
        """Zeroed memory of the current context's device, for good; no graph that is being captured takes notice."""
        # By default, allocating would break what any thread captures, and so would the default stream.
        mode = self.call(
            "cuThreadExchangeStreamCaptureMode", self.api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        )
        try:
            pointer = int(self.call("cuMemAlloc", nbytes))
            stream = self.call("cuStreamCreate", self.api.CUstream_flags.CU_STREAM_NON_BLOCKING)
            try:
                self.call("cuMemsetD8Async", pointer, 0, nbytes, stream)
                self.call("cuStreamSynchronize", stream)
            finally:
                self.call("cuStreamDestroy", stream)
        finally:
            self.call("cuThreadExchangeStreamCaptureMode", mode)
        return pointer


#: Asked for once: it takes a system call, and every launch looks at it.
_this_process = os.getpid()


def _forked() -> None:
    global _this_process
    _this_process = os.getpid()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)

_driver: CudaDriver | None = None
_lock = threading.Lock()


def get_driver() -> CudaDriver:
    """The process's driver, initialized on first use; NoGpuError when there is none."""
    global _driver
    with _lock:
        if _driver is None:
            _driver = CudaDriver()
    check_process(_driver.process)
    return _driver


def check_process(process: int) -> None:
    """CUDA does not survive a fork: refuses to go on in a child of the process that started it."""
    if _this_process != process:
        raise LaunchError(
            "this process was forked from one that had already started CUDA, which does not survive a fork; "
            "start workers with the 'spawn' method (multiprocessing.set_start_method('spawn'))"
        )


def current_device() -> int:
    """The device of unplaced work: torch's current one if torch runs CUDA, else the driver's, else 0."""
    import sys

    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return int(torch.cuda.current_device())
    device = get_driver().current_device()
    return 0 if device is None else device


def current_arch() -> Arch:
    """The architecture of the current device; NoGpuError when there is none."""
    return arch_for_capability(get_driver().capability(current_device()))
