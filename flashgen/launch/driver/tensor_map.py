"""Tensor maps (CUtensorMap): the tensor and the box of a TMA copy.

A description is validated when it is made, and encoded twice: by the driver for a GPU, and for the emulator
in the layout that ``flashgen/emulator/runtime/tensor_map.h`` documents.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from flashgen.errors import LaunchError

if TYPE_CHECKING:
    from flashgen.launch.driver.cuda import CudaDriver

#: Both encodings have this size, and go to addresses that are a multiple of 64.
MAP_BYTES = 128

Fill: TypeAlias = Literal["zero", "nan"]


class _Element(NamedTuple):
    """An element type of TMA."""

    bytes: int
    is_float: bool
    #: Its number in the emulator's encoding.
    number: int
    #: What ``CUtensorMapDataType`` calls it.
    cuda: str


ELEMENTS = {
    "u8": _Element(1, False, 0, "UINT8"),
    "u16": _Element(2, False, 1, "UINT16"),
    "u32": _Element(4, False, 2, "UINT32"),
    "fp16": _Element(2, True, 3, "FLOAT16"),
    "bf16": _Element(2, True, 4, "BFLOAT16"),
    "fp32": _Element(4, True, 5, "FLOAT32"),
}
SWIZZLES = (0, 32, 64, 128)
_FILLS: tuple[Fill, ...] = ("zero", "nan")
_MAX_RANK = 5
_MAX_DIM = 2**32
_MAX_STRIDE = 2**40
_MAX_BOX = 256
_MAX_STEP = 8

_MARK = 0x70616D726F736E74
_PROMOTIONS = {0: "NONE", 256: "L2_256B"}
#: Mark, address, strides, dims, box, steps, rank, element, swizzle, fill.
_RECORD = struct.Struct("<QQ4Q5Q5H5BBBBB21x")
#: Where the address lies in either encoding. That of GPUs is not documented, so it is put to the test before
#: anything relies on it.
EMULATED_ADDRESS = struct.calcsize("<Q")
GPU_ADDRESS = 0


@dataclass(frozen=True, slots=True)
class TensorMap:
    """A tensor in global memory and a box of it; dimension 0 is the contiguous one."""

    address: int
    #: One of ``ELEMENTS``; 8-bit floats travel as ``u8``.
    element: str
    #: Elements along each dimension.
    dims: tuple[int, ...]
    #: Bytes from one element to the next along dimensions 1, 2 and so on.
    strides: tuple[int, ...]
    #: Elements of the tensor that a box reaches over along each dimension.
    box: tuple[int, ...]
    #: Every how many-th element of a box is copied, along each dimension; all of them unless given.
    element_strides: tuple[int, ...] = field(default=())
    #: Within stretches of so many bytes of shared memory, 16-byte chunks change places; 0 for none.
    swizzle: int = 0
    #: What loads put where a box reaches out of the tensor.
    fill: Fill = "zero"
    #: Bytes of memory that L2 reads at once; 0: what the box needs.
    l2_promotion: int = 256

    def __post_init__(self) -> None:
        if self.element not in ELEMENTS:
            raise LaunchError(f"element={self.element!r} cannot be copied by boxes; use one of {', '.join(ELEMENTS)}")
        if not 1 <= self.rank <= _MAX_RANK:
            raise LaunchError(f"dims={self.dims} has {self.rank} dimensions; a tensor map takes 1 to {_MAX_RANK}")
        if not self.element_strides:
            object.__setattr__(self, "element_strides", (1,) * self.rank)
        self._check_lengths()
        self._check_tensor()
        self._check_box()
        self._check_layout()

    @property
    def rank(self) -> int:
        """How many dimensions."""
        return len(self.dims)

    def for_gpu(self, driver: CudaDriver) -> bytes:
        """The map as GPUs read it."""
        api = driver.api
        kinds = api.CUtensorMapDataType
        made: Any = driver.call(
            "cuTensorMapEncodeTiled",
            getattr(kinds, f"CU_TENSOR_MAP_DATA_TYPE_{ELEMENTS[self.element].cuda}"),
            self.rank,
            self.address,
            [api.cuuint64_t(n) for n in self.dims],
            [api.cuuint64_t(n) for n in self.strides],
            [api.cuuint32_t(n) for n in self.box],
            [api.cuuint32_t(n) for n in self.element_strides],
            api.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            getattr(api.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{f'{self.swizzle}B' if self.swizzle else 'NONE'}"),
            getattr(api.CUtensorMapL2promotion, f"CU_TENSOR_MAP_L2_PROMOTION_{_PROMOTIONS[self.l2_promotion]}"),
            api.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NAN_REQUEST_ZERO_FMA
            if self.fill == "nan"
            else api.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
        return struct.pack(f"={MAP_BYTES // 8}Q", *(int(word) for word in made.opaque))

    def for_emulator(self) -> bytes:
        """The map as the emulator reads it."""
        return _RECORD.pack(
            _MARK,
            self.address,
            *_padded(self.strides, _MAX_RANK - 1, 0),
            *_padded(self.dims, _MAX_RANK, 1),
            *_padded(self.box, _MAX_RANK, 1),
            *_padded(self.element_strides, _MAX_RANK, 1),
            self.rank,
            ELEMENTS[self.element].number,
            self.swizzle,
            _FILLS.index(self.fill),
        )

    def _check_lengths(self) -> None:
        wanted = {"strides": self.rank - 1, "box": self.rank, "element_strides": self.rank}
        for name, count in wanted.items():
            if len(getattr(self, name)) != count:
                raise LaunchError(
                    f"{name}={getattr(self, name)} does not fit dims={self.dims}; give {count} of them"
                    + (", one for each dimension but the first" if name == "strides" else "")
                )

    def _check_tensor(self) -> None:
        problem = tensor_problem(self.address, self.dims, self.strides)
        if problem is not None:
            raise LaunchError(problem)

    def _check_box(self) -> None:
        for i, n in enumerate(self.box):
            if not 1 <= n <= _MAX_BOX:
                raise LaunchError(f"box[{i}]={n} is not from 1 to {_MAX_BOX}; copy several boxes")
        for i, n in enumerate(self.element_strides):
            if not 1 <= n <= _MAX_STEP:
                raise LaunchError(f"element_strides[{i}]={n} is not from 1 to {_MAX_STEP}")
        if self.element_strides[0] != 1:
            raise LaunchError(
                f"element_strides[0]={self.element_strides[0]}, but the contiguous dimension is copied whole; use 1"
            )

    def _check_layout(self) -> None:
        row = self.box[0] * ELEMENTS[self.element].bytes
        if row % 16:
            raise LaunchError(f"box[0]={self.box[0]} elements of {self.element} take {row} bytes, not a multiple of 16")
        if self.swizzle not in SWIZZLES:
            raise LaunchError(f"swizzle={self.swizzle!r} is not one of {', '.join(map(str, SWIZZLES))} bytes")
        if self.swizzle and row > self.swizzle:
            raise LaunchError(
                f"box[0]={self.box[0]} elements of {self.element} take {row} bytes, more than the {self.swizzle} of the"
                " swizzle; copy several boxes"
            )
        if self.fill not in _FILLS:
            raise LaunchError(f"fill={self.fill!r} is not known; use 'zero' or 'nan'")
        if self.fill == "nan" and not ELEMENTS[self.element].is_float:
            raise LaunchError(f"fill='nan' needs floating-point elements, and {self.element} is not one; use 'zero'")


def tensor_problem(address: int, dims: tuple[int, ...], strides: tuple[int, ...]) -> str | None:
    """Why TMA cannot copy boxes of this tensor; None if it can."""
    if address < 0 or address % 16:
        return f"address={address:#x} is not a multiple of 16; copy the tensor to one that is"
    for i, n in enumerate(dims):
        if not 1 <= n <= _MAX_DIM:
            return f"dims[{i}]={n} is not from 1 to 2^32; launch nothing for an empty tensor"
    for i, n in enumerate(strides):
        if not 0 <= n < _MAX_STRIDE or n % 16:
            return (
                f"strides[{i}]={n} bytes is not a multiple of 16 from 0 to 2^40; copy the tensor to one with"
                " such strides"
            )
    return None


def _padded(values: tuple[int, ...], count: int, filler: int) -> tuple[int, ...]:
    return values + (filler,) * (count - len(values))
