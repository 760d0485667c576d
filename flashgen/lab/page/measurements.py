"""Measurements as files of JSON: what ``flashgen bench`` and ``flashgen roofline`` write, and the page draws."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, TypeVar

import msgspec

from flashgen.common.show import show, show_path
from flashgen.errors import ArgumentError

#: No file of figures is nearly as large.
LONGEST_FILE = 16 * 2**20
#: Wider than anything measured, and narrow enough for the numbers along an axis.
Positive = Annotated[float, msgspec.Meta(ge=1e-12, le=1e12)]
Count = Annotated[int, msgspec.Meta(ge=1, le=2**40)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]


class BenchRow(msgspec.Struct, frozen=True):
    """One timing."""

    algorithm: Name
    pass_: Literal["forward", "backward", "decode"] = msgspec.field(name="pass")
    dtype: Name
    head_dim: Count
    causal: bool
    len: Count
    batch: Count
    heads: Count
    ms: Positive
    tflops: Positive
    #: Peak device memory of the call.
    bytes: Annotated[int, msgspec.Meta(ge=0, le=2**60)]
    #: Whether another library ran it.
    peer: bool

    @property
    def mebibytes(self) -> float:
        """The same peak in MiB."""
        return self.bytes / 2**20


class Bench(msgspec.Struct, frozen=True):
    """Timings of one run on one device."""

    schema: Literal[1]
    device: Name
    rows: tuple[BenchRow, ...]


class Ceilings(msgspec.Struct, frozen=True):
    """What a device was measured to reach: GB/s, TFLOP/s, and billions of exponentials per second."""

    copy_gbps: Positive
    matrix_tflops: Positive
    exp_gops: Positive


class RooflineKernel(msgspec.Struct, frozen=True):
    """A kernel's rate, its FLOP per byte, and the ceiling that binds it."""

    name: Name
    intensity: Positive
    tflops: Positive
    bound: Literal["copy", "matrix", "exp"]


class Roofline(msgspec.Struct, frozen=True):
    """The ceilings of a device, and the rates of kernels on it."""

    schema: Literal[1]
    device: Name
    ceilings: Ceilings
    kernels: tuple[RooflineKernel, ...]


_Kind = TypeVar("_Kind", Bench, Roofline)


def read_bench(path: str | Path) -> Bench:
    """The timings in a file that ``flashgen bench`` wrote."""
    return _read(path, Bench, "bench")


def read_roofline(path: str | Path) -> Roofline:
    """The ceilings and rates in a file that ``flashgen roofline`` wrote."""
    return _read(path, Roofline, "roofline")


def _read(name: str | Path, kind: type[_Kind], command: str) -> _Kind:
    remedy = f"pass a file that 'flashgen {command}' wrote"
    if not isinstance(name, (str, Path)):
        raise ArgumentError(f"path={show(name)} is no path; {remedy}")
    path = Path(name)
    try:
        with path.open("rb") as file:
            data = file.read(LONGEST_FILE + 1)
    except (OSError, ValueError) as error:
        # A path with a null or a lone surrogate in it is a ValueError.
        reason = error.strerror if isinstance(error, OSError) else "it is no path"
        raise ArgumentError(f"path={show(str(name))} cannot be read ({reason}); {remedy}") from None
    if len(data) > LONGEST_FILE:
        raise ArgumentError(f"{show_path(path)} has more than {LONGEST_FILE // 2**20} MiB; {remedy}")
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ArgumentError(f"{show_path(path)} holds no {command} figures ({error}); {remedy}") from None
