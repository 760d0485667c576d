"""Where kernels run: the seam between a prepared call and a GPU or the emulator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from flashgen.launch.call.packing import Packer, Places, Template
from flashgen.launch.driver.launch_attributes import LaunchShape
from flashgen.launch.driver.tensor_map import TensorMap
from flashgen.launch.variant import Variant
from flashgen.plan.model.plans import KernelPlan, Role


@dataclass(frozen=True, slots=True)
class Buffer:
    """A stretch of host memory that a kernel may touch; the emulator faults everything outside."""

    name: str
    address: int
    bytes: int
    writable: bool
    #: Whether a grid that may still be running may write or read it (programmatic dependent launch).
    from_primary: bool = False

    def at(self, address: int) -> Buffer:
        """The same as far from ``address`` as it is from 0."""
        return Buffer(self.name, self.address + address, self.bytes, self.writable, self.from_primary)


class Ready(NamedTuple):
    """A loaded kernel with what every launch of it needs."""

    handle: Any
    plan: KernelPlan
    smem_bytes: int
    packer: Packer
    #: How many blocks run at once, where blocks take one tile after another or wait for each other.
    most_blocks: int | None = None


class Step(NamedTuple):
    """One launch of a call: everything settled but the addresses and the stream."""

    kernel: Ready
    grid: tuple[int, int, int]
    template: Template
    #: Which of the numbers and addresses of the call go where.
    places: Places
    #: Handle, grid, block and shared memory, as the driver's launch takes them.
    arguments: tuple[Any, ...]
    #: What the driver gets instead where the plan asks for more than a plain launch.
    shape: LaunchShape | None = None

    def moved(self, order: Sequence[int]) -> Step:
        """The same in a call that hands the i-th of its addresses over as number ``order[i]``."""
        return self._replace(places=self.places.reordered(order))


class Target(Protocol):
    """A place that loads kernels and launches them."""

    name: str
    #: Whether arrays must lie in host memory.
    on_host: bool
    #: Byte offset of the tensor's address in an encoded tensor map; a launch writes it there.
    map_address: int

    def load(self, variant: Variant, device: int) -> Mapping[Role, Any]:
        """Handles for a variant's kernels on a device."""

    def check(self) -> None:
        """Refuses calls from a process that can launch nothing, before anything is allocated."""

    def is_capturing(self, stream: int, device: int) -> bool:
        """Whether a CUDA graph is being captured, so that nothing may be compiled or loaded now."""

    def multiprocessors(self, device: int) -> int:
        """How many blocks of a kernel run at once, for each that fits on one multiprocessor."""

    def takes_maps(self, device: int) -> bool:
        """Whether kernels of the device can be given tensor maps."""

    def encode(self, maps: Sequence[TensorMap], device: int) -> tuple[bytes, ...] | None:
        """Tensor maps as the device reads them; None if it cannot be given them."""

    def launch(
        self,
        steps: Sequence[Step],
        device: int,
        stream: int,
        pointers: Sequence[int],
        buffers: Sequence[Buffer],
        numbers: Sequence[int] = (),
    ) -> None:
        """Launches the steps one after another; ``buffers`` is empty unless ``on_host``.

        ``numbers`` are handed over before ``pointers``, and point nowhere.
        """
