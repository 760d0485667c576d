"""The GPU target: cubins in the primary context of the arguments' device."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from flashgen.errors import LaunchError
from flashgen.launch.call.boxes import address_can_be_written, holds_address
from flashgen.launch.call.packing import COUNTER, Scratch
from flashgen.launch.driver.counters import Counters, counters_of
from flashgen.launch.driver.cuda import CudaDriver, check_process, get_driver
from flashgen.launch.driver.launch_attributes import Configs
from flashgen.launch.driver.tensor_map import GPU_ADDRESS, TensorMap
from flashgen.launch.target import Buffer, Step
from flashgen.launch.variant import Loadable, Variant
from flashgen.plan.model.plans import Role


class GpuTarget:
    """Loads cubins through the driver library API and launches them on the caller's stream."""

    name = "gpu"
    on_host = False
    map_address = GPU_ADDRESS

    def __init__(self, driver: CudaDriver | None = None) -> None:
        self._driver = driver
        self._scratch = Scratch()
        self._configs = Configs()
        self._contexts: dict[int, int] = {}
        self._libraries: dict[int, Any] = {}
        #: By device and words of a counter.
        self._counters: dict[tuple[int, int], Counters] = {}
        self._takes_maps: dict[int, bool] = {}
        self._lock = threading.Lock()

    @property
    def driver(self) -> CudaDriver:
        """The driver, found on first use (a kernel can be built and saved without one)."""
        if self._driver is None:
            self._driver = get_driver()
        return self._driver

    def load(self, variant: Variant, device: int) -> Mapping[Role, Any]:
        """Loads every kernel of the variant eagerly, so that no later launch has to."""
        driver = self.driver
        check_process(driver.process)
        arch, capability = variant.plan.arch, driver.capability(device)
        if not arch.runs_on(capability):
            raise LaunchError(
                f"this kernel was built for {arch.name}, and cuda:{device} has compute capability "
                f"{capability // 10}.{capability % 10}; build it for that device"
            )
        with self._lock:
            self._contexts[device] = driver.primary_context(device)
            with driver.on(device):
                for kernel in variant.kernels.values():
                    words = kernel.plan.counters
                    if COUNTER in kernel.plan.params.names:
                        self._counters[device, words] = counters_of(driver, device, words)
                return {role: self._function(variant, role) for role in variant.kernels}

    def _function(self, variant: Variant, role: Role) -> Any:
        kernel = variant.kernels[role]
        if kernel.binary is None:
            raise LaunchError(f"kernel {kernel.plan.name} has no cubin; build it with target='gpu'")
        if id(kernel) not in self._libraries:
            self._libraries[id(kernel)] = (self._library(kernel), kernel)
        library, _ = self._libraries[id(kernel)]
        return self.driver.function(library, kernel.plan.name, kernel.plan.smem.bytes)

    def _library(self, kernel: Loadable) -> Any:
        try:
            return self.driver.load(kernel.binary.image)
        except LaunchError:
            if kernel.renew is None:
                raise
            return self.driver.load(kernel.renew().image)

    def check(self) -> None:
        """Refuses calls from a forked child."""
        if self._driver is not None:
            check_process(self._driver.process)

    def is_capturing(self, stream: int, device: int) -> bool:
        """Whether the stream is being captured into a CUDA graph."""
        # The thread may have no context yet, and then not even the default stream has a meaning.
        with self.driver.on(device):
            return self.driver.is_capturing(stream)

    def multiprocessors(self, device: int) -> int:
        """As many as the device has."""
        return self.driver.multiprocessors(device)

    def takes_maps(self, device: int) -> bool:
        """Whether the driver's tensor maps hold the address where a launch writes it."""
        if device not in self._takes_maps:
            driver = self.driver
            with driver.on(device):
                found = address_can_be_written(lambda sample: sample.for_gpu(driver), GPU_ADDRESS)
            self._takes_maps[device] = found
        return self._takes_maps[device]

    def encode(self, maps: Sequence[TensorMap], device: int) -> tuple[bytes, ...] | None:
        """As the driver encodes them; None if it refuses one of them."""
        driver = self.driver
        if not self.takes_maps(device):
            return None
        with driver.on(device):
            try:
                encoded = tuple(m.for_gpu(driver) for m in maps)
            except LaunchError:
                return None
        return encoded if all(holds_address(data, GPU_ADDRESS) for data in encoded) else None

    def launch(
        self,
        steps: Sequence[Step],
        device: int,
        stream: int,
        pointers: Sequence[int],
        buffers: Sequence[Buffer] = (),
        numbers: Sequence[int] = (),
    ) -> None:
        """Launches on the stream, with the device's primary context current for as long as that takes."""
        driver, context = self.driver, self._contexts[device]
        if numbers:
            pointers = (*numbers, *pointers)
        foreign = driver.current_context() != context
        if foreign:
            driver.push_context(context)
        try:
            mine = self._scratch.mine
            for kernel, _, template, places, arguments, shape in steps:
                packer = kernel.packer
                if packer.takes_counter:
                    pointers = (*pointers, self._counters[device, kernel.plan.counters].address(stream))
                packer.write(mine, template, places, pointers)
                if shape is None or not (shape.cooperative or driver.overlaps_grids):
                    (status,) = driver.launch_kernel(*arguments, stream, mine.kernel_params, 0)
                else:
                    config = self._configs.of(driver, shape)
                    config.hStream = stream
                    (status,) = driver.launch_kernel_ex(config, arguments[0], mine.kernel_params, 0)
                if status is not driver.success and status != driver.success:
                    raise driver.fail(f"launching {kernel.plan.name}", status)
        finally:
            if foreign:
                driver.pop_context()
