"""The emulator target: the same sources, run on the CPU over NumPy arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flashgen.launch.packing import Scratch
from flashgen.launch.target import Buffer, Step
from flashgen.launch.variant import Variant
from flashgen.plan.model import Role


class HostTarget:
    """Runs kernels through a loader such as ``flashgen.emulator.load``."""

    name = "emulator"
    on_host = True

    def __init__(self, load: Callable[[Any], Any]) -> None:
        self._load = load
        self._scratch = Scratch()
        #: Options of every emulated launch, such as ``schedule="random", seed=7``.
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
        memory = self._scratch.memory
        for kernel, grid, template in steps:
            kernel.packer.write(memory, template, pointers)
            params = bytes(memory[: kernel.packer.size])
            kernel.handle.launch(grid, params, buffers, **self.options)
