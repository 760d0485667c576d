from __future__ import annotations

import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flashgen.errors import LaunchError
from flashgen.launch.driver.tensor_map import MAP_BYTES, TensorMap

ROOT = Path(__file__).parents[2]
GOOD: dict[str, Any] = {
    "address": 0x10000,
    "element": "bf16",
    "dims": (128, 1000, 8),
    "strides": (2048, 256),
    "box": (64, 128, 1),
    "swizzle": 128,
}


def test_a_map_is_a_value() -> None:
    first, second = TensorMap(**GOOD), TensorMap(**GOOD, element_strides=(1, 1, 1))
    assert first == second
    assert hash(first) == hash(second)
    with pytest.raises(AttributeError):
        first.address = 0  # type: ignore[misc]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"element": "fp64"}, "element='fp64' cannot be copied by boxes; use one of u8, u16, u32, fp16, bf16, fp32"),
        ({"dims": ()}, r"dims=\(\) has 0 dimensions; a tensor map takes 1 to 5"),
        ({"dims": (16,) * 6}, "has 6 dimensions; a tensor map takes 1 to 5"),
        ({"strides": (2048,)}, r"strides=\(2048,\) does not fit dims=\(128, 1000, 8\); give 2 of them, one for each"),
        ({"box": (64, 128)}, r"box=\(64, 128\) does not fit dims=\(128, 1000, 8\); give 3 of them"),
        ({"element_strides": (1,)}, r"element_strides=\(1,\) does not fit dims"),
        ({"address": 0x10008}, "address=0x10008 is not a multiple of 16; copy the tensor"),
        ({"address": -16}, "address=-0x10 is not a multiple of 16"),
        ({"dims": (128, 0, 8)}, r"dims\[1\]=0 is not from 1 to 2\^32; launch nothing for an empty tensor"),
        ({"dims": (128, 2**32 + 1, 8)}, r"dims\[1\]=4294967297 is not from 1 to 2\^32"),
        ({"strides": (2048, 250)}, r"strides\[1\]=250 bytes is not a multiple of 16 from 0 to 2\^40; copy the tensor"),
        ({"strides": (2**40, 256)}, r"strides\[0\]=1099511627776 bytes"),
        ({"strides": (-2048, 256)}, r"strides\[0\]=-2048 bytes"),
        ({"box": (64, 257, 1)}, r"box\[1\]=257 is not from 1 to 256; copy several boxes"),
        ({"box": (64, 0, 1)}, r"box\[1\]=0 is not from 1 to 256"),
        ({"element_strides": (1, 9, 1)}, r"element_strides\[1\]=9 is not from 1 to 8"),
        (
            {"element_strides": (2, 1, 1)},
            r"element_strides\[0\]=2, but the contiguous dimension is copied whole; use 1",
        ),
        ({"box": (12, 8, 1)}, r"box\[0\]=12 elements of bf16 take 24 bytes, not a multiple of 16"),
        ({"swizzle": 96}, "swizzle=96 is not one of 0, 32, 64, 128 bytes"),
        ({"swizzle": 64}, r"box\[0\]=64 elements of bf16 take 128 bytes, more than the 64 of the swizzle"),
        ({"fill": "one"}, "fill='one' is not known; use 'zero' or 'nan'"),
        ({"fill": "nan", "element": "u16"}, "fill='nan' needs floating-point elements, and u16 is not one"),
    ],
)
def test_what_the_copy_engine_cannot_do_is_refused_in_a_sentence(change: dict[str, Any], message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        TensorMap(**(GOOD | change))


def test_limits_themselves_are_allowed() -> None:
    TensorMap(0, "u8", (2**32, 2**32), (2**40 - 16,), (256, 256))
    TensorMap(0, "u8", (16, 5), (0,), (16, 1))
    TensorMap(0, "fp16", (16,), (), (8,), fill="nan")


def test_the_emulators_encoding_is_the_documented_one() -> None:
    data = TensorMap(**GOOD, element_strides=(1, 2, 1), fill="nan").for_emulator()
    assert len(data) == MAP_BYTES
    fields = struct.unpack_from("<QQ4Q5Q5H5B4B", data)
    assert fields[1] == 0x10000
    assert fields[2:6] == (2048, 256, 0, 0)
    assert fields[6:11] == (128, 1000, 8, 1, 1)
    assert fields[11:16] == (64, 128, 1, 1, 1)
    assert fields[16:21] == (1, 2, 1, 1, 1)
    assert fields[21:] == (3, 4, 128, 1)
    assert not any(data[struct.calcsize("<QQ4Q5Q5H5B4B") :])


def encode(library: Path, arguments: str) -> list[str]:
    """What the driver is asked for, through the real bindings."""
    code = f"""
from flashgen.launch.driver.cuda import get_driver
from flashgen.launch.driver.tensor_map import TensorMap
data = TensorMap({arguments}).for_gpu(get_driver())
print(len(data), data[:8].hex(), data[-8:].hex())
"""
    environment = os.environ | {"LD_LIBRARY_PATH": str(library), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-u", "-c", code], env=environment, capture_output=True, text=True)
    return [*done.stdout.splitlines(), *done.stderr.splitlines()[-1:]]


def test_the_driver_encodes_for_gpus(libcuda: Path) -> None:
    lines = encode(
        libcuda,
        "0x10000, 'bf16', (128, 1000, 8), (2048, 256), (64, 128, 1),"
        " element_strides=(1, 2, 1), swizzle=128, fill='nan'",
    )
    asked = (
        "encode type 9 rank 3 address 0x10000 interleave 0 swizzle 3 promotion 3 fill 1"
        " dims 128 1000 8 strides 2048 256 box 64 128 1 steps 1 2 1"
    )
    assert asked in lines
    assert "128 0000010000000000 1f00000000000000" in lines


@pytest.mark.parametrize(
    ("element", "type_", "swizzle", "number"),
    [("u8", 0, 0, 0), ("u16", 1, 32, 1), ("u32", 2, 64, 2), ("fp16", 6, 128, 3), ("fp32", 7, 0, 0)],
)
def test_every_element_and_swizzle_has_its_number(
    libcuda: Path, element: str, type_: int, swizzle: int, number: int
) -> None:
    lines = encode(libcuda, f"64, {element!r}, (16, 1), (64,), (16, 1), swizzle={swizzle}")
    assert any(
        line.startswith(f"encode type {type_} rank 2 address 0x40 interleave 0 swizzle {number} ") for line in lines
    )


def test_what_the_driver_refuses_is_reported_in_its_words(libcuda: Path) -> None:
    lines = encode(libcuda, "0xbad0, 'fp32', (16, 1), (64,), (16, 1)")
    assert "flashgen.errors.DriverError: cuTensorMapEncodeTiled failed: LAUNCH_FAILED: in words" in lines
