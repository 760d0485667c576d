"""Tensor maps: what a case says of one; its address is known at the launch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

#: Elements by flashgen's names.
ELEMENTS: dict[str, Any] = {
    "u8": np.uint8,
    "u16": np.uint16,
    "u32": np.uint32,
    "fp16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "fp32": np.float32,
}


@dataclass(frozen=True)
class MapOf:
    """A tensor map of one of the case's arrays; all but the array is as in ``flashgen.launch.driver.tensor_map``."""

    array: str
    element: str
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    element_strides: tuple[int, ...]
    swizzle: int
    fill: str = "zero"

    @property
    def box_bytes(self) -> int:
        """What one copy moves, also where it lies outside the tensor."""
        counts = [-(-size // step) for size, step in zip(self.box, self.element_strides, strict=True)]
        return int(np.prod(counts)) * np.dtype(ELEMENTS[self.element]).itemsize

    def encoded(self, addresses: Mapping[str, int], driver: Any = None) -> bytes:
        """The 128 bytes that a kernel gets: from the driver, or for the emulator where there is none."""
        from flashgen.launch.driver.tensor_map import TensorMap

        made = TensorMap(
            addresses[self.array],
            self.element,
            self.dims,
            self.strides,
            self.box,
            self.element_strides,
            self.swizzle,
            self.fill,  # type: ignore[arg-type]
        )
        return made.for_emulator() if driver is None else made.for_gpu(driver)
