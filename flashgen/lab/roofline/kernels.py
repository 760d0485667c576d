"""The kernels that measure ceilings, and how a GPU runs them."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from flashgen.arch import Arch
from flashgen.dtypes import BF16, FP16
from flashgen.render.plain import render_plain

THREADS = 256
#: Values that each thread of the exponentials takes at a time.
CHAINS = 8
#: Products that each warp of mma.sync issues in a step.
PRODUCTS = 8
#: Rows of both warpgroups, columns, and depth of a step of wgmma.
WGMMA_TILE = (128, 256, 64)
_ROW_BYTES = 128


@dataclass(frozen=True, slots=True)
class CeilingKernel:
    """A kernel in ``templates/kernels/lab``; its parameters are two arrays and a number."""

    name: str
    smem_bytes: int = 0

    @property
    def symbol(self) -> str:
        """The name of the ``__global__`` function."""
        return f"lab_{self.name}"

    @property
    def text(self) -> str:
        """The CUDA C++, for NVRTC and the emulator."""
        return render_plain(f"kernels/lab/{self.name}.cu")


COPY = CeilingKernel("copy")
EXPONENTIALS = CeilingKernel("exponentials")
PRODUCTS_TURING = CeilingKernel("products_turing")
PRODUCTS_MMA = CeilingKernel("products")
PRODUCTS_WGMMA = CeilingKernel("products_sm90", smem_bytes=(WGMMA_TILE[0] + WGMMA_TILE[1]) * _ROW_BYTES)


def products_of(arch: Arch) -> CeilingKernel:
    """The fastest products of an architecture that flashgen's kernels use."""
    return PRODUCTS_WGMMA if arch.has_wgmma else PRODUCTS_MMA if arch.has_bf16 else PRODUCTS_TURING


def product_flops(kernel: CeilingKernel) -> int:
    """Floating-point operations of a block in a step."""
    if kernel is PRODUCTS_WGMMA:
        rows, columns, depth = WGMMA_TILE
        return 2 * rows * columns * depth
    return THREADS // 32 * PRODUCTS * 2 * 16 * 8 * 16


def product_source(kernel: CeilingKernel, random: np.random.Generator) -> NDArray[Any]:
    """Random operands: zeros would take less power, and so run faster."""
    dtype = (FP16 if kernel is PRODUCTS_TURING else BF16).numpy()
    if kernel is PRODUCTS_WGMMA:
        rows, columns, depth = WGMMA_TILE
        return swizzled(random.standard_normal((rows + columns, depth)).astype(dtype))
    fragments = 32 * (4 + 2 * PRODUCTS)
    return random.standard_normal(2 * fragments).astype(dtype)


def product_values(kernel: CeilingKernel) -> int:
    """Floats that a block writes."""
    return THREADS * (WGMMA_TILE[1] // 2 if kernel is PRODUCTS_WGMMA else 4 * PRODUCTS)


def swizzled(rows: NDArray[Any]) -> NDArray[Any]:
    """Rows of 128 bytes as wgmma reads them: chunks of 16 bytes exchanged by the row's number."""
    chunks = rows.reshape(len(rows), 8, 8)
    numbers = np.arange(len(rows))[:, None]
    places = np.arange(8)[None, :]
    return np.ascontiguousarray(chunks[numbers, places ^ (numbers % 8)]).reshape(rows.shape)


class Launcher(Protocol):
    """A place that runs ceiling kernels."""

    def prepared(self, kernel: CeilingKernel, blocks: int, arrays: Sequence[Any], number: int) -> Callable[[], object]:
        """A launch of a kernel on arrays of the device, to be repeated."""


class GpuLauncher:
    """Compiles for a GPU's architecture, and launches on a stream of it."""

    def __init__(self, ordinal: int, arch: Arch, stream: int = 0) -> None:
        self._ordinal, self._arch, self._stream = ordinal, arch, stream

    def prepared(self, kernel: CeilingKernel, blocks: int, arrays: Sequence[Any], number: int) -> Callable[[], object]:
        """A launch on the stream."""
        from flashgen.compile import compile_text
        from flashgen.launch.driver.cuda import get_driver

        driver = get_driver()
        cubin = compile_text(kernel.symbol, kernel.text, self._arch)
        with driver.on(self._ordinal):
            function = driver.function(driver.load(cubin), kernel.symbol, kernel.smem_bytes)
        memory = ctypes.create_string_buffer(packed(*(array.info.pointer for array in arrays), number))
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(memory))
        shape = (function, blocks, 1, 1, THREADS, 1, 1, kernel.smem_bytes)

        # The arrays and the parameters stay alive with this function.
        def launch(kept: object = (arrays, memory)) -> None:
            with driver.on(self._ordinal):
                (status,) = driver.launch_kernel(*shape, self._stream, ctypes.addressof(pointers), 0)
                if status != driver.success:
                    raise driver.fail(f"launching {kernel.symbol}", status)

        return launch


def packed(*words: int) -> bytes:
    """The parameters of a kernel: addresses of its arrays, and a number."""
    return struct.pack(f"<{len(words)}q", *words)
