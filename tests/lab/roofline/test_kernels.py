"""The kernels that measure ceilings compute what they say, on the emulator at tiny sizes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flashgen.arch import get_arch
from flashgen.compile import compile_text
from flashgen.dtypes import BF16
from flashgen.lab.roofline.kernels import (
    CHAINS,
    COPY,
    EXPONENTIALS,
    PRODUCTS,
    PRODUCTS_MMA,
    PRODUCTS_TURING,
    PRODUCTS_WGMMA,
    THREADS,
    WGMMA_TILE,
    CeilingKernel,
    product_flops,
    product_source,
    product_values,
    products_of,
    swizzled,
)
from tests.lab.roofline.emulated import EmulatorLauncher

BLOCKS = 2


def run(kernel: CeilingKernel, source: Any, values: int, number: int) -> Any:
    target = np.full(values, np.nan, np.float32)
    EmulatorLauncher().prepared(kernel, BLOCKS, (source, target), number)()
    return target


def test_copy_moves_every_byte_and_no_other() -> None:
    source = np.random.default_rng(0).standard_normal(4 * 1001).astype(np.float32)
    target = run(COPY, source, len(source), len(source) // 4)
    np.testing.assert_array_equal(target, source)


def test_exponentials_are_taken_as_often_as_asked() -> None:
    source = np.random.default_rng(0).random(BLOCKS * THREADS * CHAINS, np.float32)
    expected = source.astype(np.float64)
    for _ in range(5):
        expected = 2.0**-expected
    np.testing.assert_allclose(run(EXPONENTIALS, source, len(source), 5), expected, rtol=1e-5)


@pytest.mark.parametrize("kernel", [PRODUCTS_MMA, PRODUCTS_TURING], ids=lambda kernel: kernel.name)
def test_products_of_fragments_are_added_up(kernel: CeilingKernel) -> None:
    source = product_source(kernel, np.random.default_rng(0))
    got = run(kernel, source, BLOCKS * product_values(kernel), 3)
    a = source[: 32 * 8].astype(np.float64).reshape(8, 4, 2, 2, 2)  # row, column pair, k half, row half, element
    left = a.transpose(3, 0, 2, 1, 4).reshape(16, 16)
    b = source[32 * 8 :].astype(np.float64).reshape(PRODUCTS, 8, 4, 2, 2)  # product, column, k pair, k half, element
    right = b.transpose(0, 3, 2, 4, 1).reshape(PRODUCTS, 16, 8)
    d = (3 * left @ right).reshape(PRODUCTS, 2, 8, 4, 2)  # product, row half, row, column pair, element
    expected = d.transpose(2, 3, 0, 1, 4).reshape(32, PRODUCTS, 4)
    np.testing.assert_allclose(
        got.reshape(BLOCKS * THREADS // 32, 32, PRODUCTS, 4),
        np.broadcast_to(expected, (BLOCKS * THREADS // 32, *expected.shape)),
        rtol=1e-4,
        atol=1e-4,
    )


def test_products_of_shared_memory_are_added_up() -> None:
    rows, columns, depth = WGMMA_TILE
    tiles = np.random.default_rng(1).standard_normal((rows + columns, depth)).astype(BF16.numpy())
    got = run(PRODUCTS_WGMMA, swizzled(tiles), BLOCKS * product_values(PRODUCTS_WGMMA), 2)
    plain = tiles.astype(np.float64)
    d = (2 * plain[:rows] @ plain[rows:].T).reshape(2, 4, 2, 8, columns // 8, 4, 2)
    # Warpgroup, warp, row half, row, columns by eight, column pair, element.
    expected = d.transpose(0, 1, 3, 5, 4, 2, 6).reshape(THREADS, columns // 2)
    for block in got.reshape(BLOCKS, THREADS, columns // 2):
        np.testing.assert_allclose(block, expected, rtol=1e-4, atol=1e-3)


def test_a_steps_work_is_counted() -> None:
    assert product_flops(PRODUCTS_MMA) == 8 * 8 * 4096
    assert product_flops(PRODUCTS_WGMMA) == 2 * 128 * 256 * 64


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90a", "sm_120"])
def test_the_kernels_compile(arch: str) -> None:
    row = get_arch(arch)
    for kernel in (COPY, EXPONENTIALS, products_of(row)):
        assert compile_text(kernel.symbol, kernel.text, row).startswith(b"\x7fELF")
