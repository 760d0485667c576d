"""The emulator target: the same sources, run on the CPU over NumPy arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from flashgen.launch.packing import Scratch
from flashgen.launch.target import Buffer, Step
from flashgen.launch.variant import Variant
from flashgen.plan.model import Role


class Guarded(Protocol):
    """Copies of a call's memory beside pages that trap, such as ``flashgen.emulator.GuardedCall``."""

    def moved(self, address: int) -> int:
        """Where the copy of what lies at an address is."""

    def hand_back(self) -> None:
        """Copies all that was written to where it belongs."""


#: ``guard((name, address, bytes, writable) of each stretch of memory, "end" or "begin")``.
Guard = Callable[[Iterable[tuple[str, int, int, bool]], Any], Guarded]


class HostTarget:
    """Runs kernels through a loader such as ``flashgen.emulator.load``, with a guard on copies of all arrays."""

    name = "emulator"
    on_host = True

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

    def launch(
        self,
        steps: Sequence[Step],
        device: int,
        stream: int,
        pointers: Sequence[int],
        buffers: Sequence[Buffer],
    ) -> None:
        """Runs the steps to their end, one after another."""
        options = dict(self.options)
        side = options.pop("guard", "end")
        guarded = None
        if self._guard is not None:
            guarded = self._guard([(b.name, b.address, b.bytes, b.writable) for b in buffers], side)
            pointers = [guarded.moved(pointer) for pointer in pointers]
            buffers = [replace(buffer, address=guarded.moved(buffer.address)) for buffer in buffers]
        memory = self._scratch.memory
        for kernel, grid, template in steps:
            kernel.packer.write(memory, template, pointers)
            params = bytes(memory[: kernel.packer.size])
            kernel.handle.launch(grid, params, buffers, **options)
        if guarded is not None:
            guarded.hand_back()
