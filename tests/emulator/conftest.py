"""``run``: launch a few lines of device code on NumPy arrays and tensor maps."""

from __future__ import annotations

import struct
from typing import Any, Protocol

import numpy as np
import pytest

from flashgen.emulator.kernel import Buffer, EmulatedKernel
from flashgen.emulator.traffic import LaunchTraffic
from flashgen.launch.driver.tensor_map import TensorMap

MAP_ALIGNMENT = 64
C_TYPES = {"f4": "float", "u4": "u32", "i4": "i32", "f2": "half_t", "u2": "u16", "u1": "u8"}

KERNEL = """{prelude}
#include "flashgen/primitives.cuh"
using namespace flashgen;
struct Params {{ {maps} {fields} }};
FLASHGEN_KERNEL({threads}, 1) kernel_under_test(FLASHGEN_GRID_CONSTANT Params params) {{
  FLASHGEN_SHARED_MEMORY(shared);
  {locals}
#line 1 "kernels/test.cu"
{body}
}}
"""


class Run(Protocol):
    def __call__(
        self,
        body: str,
        *,
        threads: int = 32,
        blocks: int = 1,
        smem: int = 0,
        prelude: str = "",
        **arrays: Any,
    ) -> None: ...


def pack(maps: dict[str, TensorMap], addresses: list[int]) -> bytes:
    """The parameter struct: maps come first, and align all of it."""
    data = b"".join(m.for_emulator() for m in maps.values()) + struct.pack(f"{len(addresses)}Q", *addresses)
    return data.ljust(-(-len(data) // MAP_ALIGNMENT) * MAP_ALIGNMENT if maps else len(data) or 1, b"\0")


def pointer(name: str, array: np.ndarray[Any, Any]) -> str:
    const = "" if array.flags.writeable else "const "
    return f"{const}{C_TYPES[array.dtype.str[1:]]}* {name}"


@pytest.fixture
def run() -> Run:
    def run_(
        body: str,
        *,
        threads: int = 32,
        blocks: int = 1,
        smem: int = 0,
        prelude: str = "",
        schedule: str = "sequential",
        seed: int = 0,
        race: bool = False,
        resident: int | None = None,
        cluster: int = 1,
        cooperative: bool = False,
        from_primary: tuple[str, ...] = (),
        maps: dict[str, TensorMap] | None = None,
        traffic: list[LaunchTraffic] | None = None,
        **arrays: np.ndarray[Any, Any],
    ) -> None:
        maps = maps or {}
        text = KERNEL.format(
            prelude=prelude,
            maps=" ".join(f"TensorMap {name};" for name in maps),
            fields=" ".join(f"{pointer(name, array)};" for name, array in arrays.items()),
            threads=threads,
            locals=" ".join(f"{pointer(name, array)} = params.{name};" for name, array in arrays.items())
            + " ".join(f"const TensorMap* {name} = &params.{name};" for name in maps),
            body=body,
        )
        kernel = EmulatedKernel("kernel_under_test", text, race=race)
        addresses = [array.ctypes.data for array in arrays.values()]
        buffers = [Buffer(n, a.ctypes.data, a.nbytes, a.flags.writeable, n in from_primary) for n, a in arrays.items()]
        kernel.launch(
            blocks,
            pack(maps, addresses),
            buffers,
            threads=threads,
            smem_bytes=smem,
            schedule=schedule,
            seed=seed,
            race=race,
            resident=resident,
            cluster=cluster,
            cooperative=cooperative,
            traffic=traffic,
        )

    return run_


def frozen(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    array.flags.writeable = False
    return array


@pytest.fixture(name="frozen")
def frozen_fixture() -> Any:
    """Make an array one that kernels may only read."""
    return frozen
