"""The kernels that measure ceilings, on the emulator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from flashgen.emulator import Buffer, EmulatedKernel
from flashgen.lab.roofline.kernels import THREADS, CeilingKernel, packed


class EmulatorLauncher:
    """Runs the same texts on the CPU, over NumPy arrays."""

    def prepared(self, kernel: CeilingKernel, blocks: int, arrays: Sequence[Any], number: int) -> Callable[[], object]:
        """A launch on the emulator."""
        emulated = EmulatedKernel(kernel.symbol, kernel.text, threads=THREADS, smem_bytes=kernel.smem_bytes)
        buffers = [
            Buffer(name, array.ctypes.data, array.nbytes, writable)
            for name, array, writable in zip(("source", "target"), arrays, (False, True), strict=True)
        ]
        params = packed(*(array.ctypes.data for array in arrays), number)

        # The arrays stay alive with this function.
        def launch(kept: object = arrays) -> None:
            emulated.launch(blocks, params, buffers)

        return launch
