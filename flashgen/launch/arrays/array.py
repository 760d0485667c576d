"""``ArrayInfo``: what a launch must know of an array, whichever library it came from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from flashgen.dtypes import ALIASES
from flashgen.errors import ArgumentError

HOST = -1
#: The widest access kernels are planned for; a pointer aligned further than this is no better.
MAX_ACCESS_BYTES = 16


@dataclass(frozen=True, slots=True)
class ArrayInfo:
    """An array argument: where it lies, its extents, and its strides in elements."""

    name: str
    #: The address, or of arguments its low bits: calls are prepared for any address with the same.
    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    #: A name of ``flashgen.dtypes``, or the library's own spelling when flashgen does not know the type.
    dtype: str
    #: CUDA ordinal, or ``HOST``.
    device: int
    #: Whether the library lets others write to it.
    writable: bool = True

    @property
    def where(self) -> str:
        """The device in words."""
        return "the CPU" if self.device == HOST else f"cuda:{self.device}"


class Framework(Protocol):
    """How one array library is read, and how outputs are allocated in it."""

    name: str

    def signature(self, arrays: tuple[Any, ...], requested: Any) -> tuple[Any, tuple[int, ...]]:
        """A hashable summary of all but the addresses (their low bits are part of it), and the addresses."""

    def describe(self, names: Sequence[str], signature: Any) -> list[ArrayInfo]:
        """The arrays that a signature is of; a typed error for one that kernels cannot read.

        It has the signature alone to go by, and of addresses their low bits. So nothing that a check looks at is
        missing in the key by which calls are remembered.
        """

    def layout(self, shape: tuple[int, ...], dtype: str) -> Any:
        """The arguments of ``allocate`` for a contiguous array, in the library's own terms."""

    def allocate(self, like: Any, layouts: Sequence[Any], stream: int) -> tuple[list[Any], list[int]]:
        """New arrays on the device of ``like``, and their addresses."""

    def stream(self, device: int, requested: Any) -> int:
        """The raw handle of the stream to launch on."""


def dtype_name(spelling: str) -> str:
    """flashgen's name for a dtype as a library spells it (``torch.float16``, ``bfloat16`` ...)."""
    text = spelling.rpartition(".")[2].lower()
    return ALIASES[text].name if text in ALIASES else spelling


def elements(name: str, byte_strides: tuple[int, ...], item_bytes: int) -> tuple[int, ...]:
    """Strides in elements from strides in bytes."""
    for stride in byte_strides:
        if stride % item_bytes:
            raise ArgumentError(
                f"{name} has a stride of {stride} bytes, no multiple of its {item_bytes}-byte elements; "
                "pass a contiguous copy"
            )
    return tuple(stride // item_bytes for stride in byte_strides)


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides in elements."""
    strides = [1] * len(shape)
    for i in range(len(shape) - 2, -1, -1):
        strides[i] = strides[i + 1] * max(shape[i + 1], 1)
    return tuple(strides)


def canonical(info: ArrayInfo) -> ArrayInfo:
    """The same array with the strides that no address depends on made plain: 1 at the end, 0 elsewhere."""
    if 0 in info.shape:
        return replace(info, strides=contiguous_strides(info.shape))
    if 1 not in info.shape:
        return info
    last = len(info.shape) - 1
    strides = tuple(
        (1 if i == last else 0) if size == 1 else stride
        for i, (size, stride) in enumerate(zip(info.shape, info.strides, strict=True))
    )
    return replace(info, strides=strides)


def low_bits(pointer: int) -> int:
    """What an address says of alignment."""
    return pointer & (MAX_ACCESS_BYTES - 1)


def alignment(infos: Sequence[ArrayInfo], item_bytes: int) -> int:
    """The largest power of two, at most 16, that divides every address and stride but the last, in bytes."""
    bits = MAX_ACCESS_BYTES
    for info in infos:
        if 0 in info.shape:
            continue
        bits |= info.pointer
        for stride in info.strides[:-1]:
            bits |= stride * item_bytes
    return bits & -bits
