"""The emulator target: the same sources, run on the CPU over NumPy arrays."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from flashgen.errors import EmulationError
from flashgen.launch.call.packing import COUNTER, Scratch
from flashgen.launch.driver.counters import COUNTER_WORD_BYTES
from flashgen.launch.driver.tensor_map import EMULATED_ADDRESS, TensorMap
from flashgen.launch.target import Buffer, Step
from flashgen.launch.variant import Variant
from flashgen.plan.model.plans import Role


class Guarded(Protocol):
    """Copies of a call's memory beside pages that trap, such as ``flashgen.emulator.GuardedCall``."""

    def moved(self, address: int) -> int:
        """The address in the copy that corresponds to an address."""

    def copy_back(self) -> None:
        """Copies all memory back to the originals."""


#: Few, so that small problems have more tiles than blocks.
_MULTIPROCESSORS = 3

#: ``guard((name, address, bytes, writable) of each stretch of memory, "end" or "begin")``.
Guard = Callable[[Iterable[tuple[str, int, int, bool]], Any], Guarded]


class HostTarget:
    """Runs kernels through a loader such as ``flashgen.emulator.load``, with a guard on copies of all arrays."""

    name = "emulator"
    on_host = True
    map_address = EMULATED_ADDRESS

    def __init__(self, load: Callable[[Any], Any], guard: Guard | None = None) -> None:
        self._load = load
        self._guard = guard
        self._scratch = Scratch()
        #: Options of every emulated launch, such as ``schedule="random", seed=7``; ``guard="begin"`` has the
        #: pages that trap lie before the arrays, not behind them.
        self.options: dict[str, Any] = {}

    def load(self, variant: Variant, device: int) -> Mapping[Role, Any]:
        """Emulated kernels, one per role."""
        return {role: self._load(kernel.source) for role, kernel in variant.kernels.items()}

    def check(self) -> None:
        """A CPU is always there."""

    def is_capturing(self, stream: int, device: int) -> bool:
        """No graphs are captured on a CPU."""
        return False

    def multiprocessors(self, device: int) -> int:
        """Some that are not there."""
        return _MULTIPROCESSORS

    def takes_maps(self, device: int) -> bool:
        """The emulator's layout is our own."""
        return True

    def encode(self, maps: Sequence[TensorMap], device: int) -> tuple[bytes, ...] | None:
        """As the emulator reads them."""
        return tuple(m.for_emulator() for m in maps)

    def launch(
        self,
        steps: Sequence[Step],
        device: int,
        stream: int,
        pointers: Sequence[int],
        buffers: Sequence[Buffer],
        numbers: Sequence[int] = (),
    ) -> None:
        """Runs the steps to their end, one after another."""
        options = dict(self.options)
        side = options.pop("guard", "end")
        guarded = None
        counting = [step.kernel.plan.counters for step in steps if step.kernel.packer.takes_counter]
        nbytes = max(counting, default=0) * COUNTER_WORD_BYTES
        counter = ctypes.create_string_buffer(nbytes)
        if counting:
            pointers = (*pointers, ctypes.addressof(counter))
            buffers = (*buffers, Buffer(COUNTER, pointers[-1], nbytes, writable=True))
        if self._guard is not None:
            guarded = self._guard([(b.name, b.address, b.bytes, b.writable) for b in buffers], side)
            # Null stands for what a call lacks, also where some array without elements has that address.
            pointers = [guarded.moved(pointer) if pointer else 0 for pointer in pointers]
            buffers = [replace(buffer, address=guarded.moved(buffer.address)) for buffer in buffers]
        memory = self._scratch.mine
        # The launch before may have had the very same arrays, counter included.
        in_use = [replace(buffer, from_primary=True) for buffer in buffers]
        for kernel, grid, template, places, _, _ in steps:
            kernel.packer.write(memory, template, places, (*numbers, *pointers))
            params = bytes(memory.bytes[: kernel.packer.size])
            found = in_use if kernel.plan.overlaps_predecessor else buffers
            kernel.handle.launch(grid, params, found, cooperative=kernel.plan.is_cooperative, **options)
            if kernel.packer.takes_counter:
                _check_counter(kernel.plan.name, pointers[-1], nbytes)
        if guarded is not None:
            guarded.copy_back()


def _check_counter(kernel: str, address: int, nbytes: int) -> None:
    """The next launch relies on what this one leaves."""
    left = ctypes.string_at(address, nbytes)
    if any(left):
        words = [int.from_bytes(left[i : i + 4], "little") for i in range(0, nbytes, COUNTER_WORD_BYTES)]
        raise EmulationError(
            f"counter not put back: {kernel} left {words} in its counter, and the next launch needs zeros; "
            "the last of its blocks must put them there",
            kind="counter not put back",
            kernel=kernel,
        )
