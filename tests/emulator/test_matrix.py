"""Fragments as the PTX ISA lays them out, element by element, with its own formulas."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from flashgen.errors import EmulationError

HALF = {"half_t": np.float16, "bfloat16_t": ml_dtypes.bfloat16}
Array = np.ndarray[Any, Any]


def place_a16(lane: int, i: int) -> tuple[int, int]:
    row = lane // 4 + (0 if i < 2 or 4 <= i < 6 else 8)
    return row, lane % 4 * 2 + (i & 1) + (8 if i >= 4 else 0)


def place_b16(lane: int, i: int) -> tuple[int, int]:
    return lane % 4 * 2 + (i & 1) + (8 if i >= 2 else 0), lane // 4


def place_a8(lane: int, i: int) -> tuple[int, int]:
    return lane // 4 + (8 if i >= 2 else 0), lane % 4 * 2 + (i & 1)


def place_b8(lane: int, i: int) -> tuple[int, int]:
    return lane % 4 * 2 + i, lane // 4


def place_a1(lane: int, i: int) -> tuple[int, int]:
    return lane // 4 + (8 if i >= 32 else 0), lane % 4 * 32 + (i & 31)


def place_b1(lane: int, i: int) -> tuple[int, int]:
    return lane % 4 * 32 + i, lane // 4


def place_c(lane: int, i: int) -> tuple[int, int]:
    return lane // 4 + (8 if i >= 2 else 0), lane % 4 * 2 + (i & 1)


def scatter(matrix: Array, place: Any, elements: int) -> Array:
    fragments = np.zeros((32, elements), matrix.dtype)
    for lane in range(32):
        for i in range(elements):
            fragments[lane, i] = matrix[place(lane, i)]
    return fragments


def collect(fragments: Array, place: Any, shape: tuple[int, int]) -> Array:
    matrix = np.full(shape, np.nan, fragments.dtype)
    for lane in range(32):
        for i in range(fragments.shape[1]):
            matrix[place(lane, i)] = fragments[lane, i]
    return matrix


def integers(shape: tuple[int, int], seed: int) -> Array:
    return np.random.default_rng(seed).integers(-8, 9, shape).astype(np.float32)


@pytest.mark.parametrize("element", HALF)
def test_mma_m16n8k16_follows_the_isa_layout(run: Any, element: str) -> None:
    a, b, c = integers((16, 16), 1), integers((16, 8), 2), integers((16, 8), 3)
    d = scatter(c, place_c, 4)
    run(
        f"""u32 a[4], b[2]; float d[4];
        for (int i = 0; i < 4; ++i) {{ a[i] = fa[4 * thread_idx() + i]; d[i] = fd[4 * thread_idx() + i]; }}
        for (int i = 0; i < 2; ++i) b[i] = fb[2 * thread_idx() + i];
        mma_m16n8k16({element}{{}}, d, a, b);
        for (int i = 0; i < 4; ++i) fd[4 * thread_idx() + i] = d[i];""",
        fa=scatter(a, place_a16, 8).astype(HALF[element]).view(np.uint32),
        fb=scatter(b, place_b16, 4).astype(HALF[element]).view(np.uint32),
        fd=d,
    )
    np.testing.assert_array_equal(collect(d, place_c, (16, 8)), a @ b + c)


def test_mma_adds_in_the_order_in_which_wgmma_does(run: Any) -> None:
    """One after the other, so that scores of either come to the same bits, as they do on a GPU."""
    random, element = np.random.default_rng(9), HALF["bfloat16_t"]
    a, b, c = (random.standard_normal(shape).astype(element) for shape in ((16, 16), (16, 8), (16, 8)))
    d = scatter(c.astype(np.float32), place_c, 4)
    run(
        """u32 a[4], b[2]; float d[4];
        for (int i = 0; i < 4; ++i) { a[i] = fa[4 * thread_idx() + i]; d[i] = fd[4 * thread_idx() + i]; }
        for (int i = 0; i < 2; ++i) b[i] = fb[2 * thread_idx() + i];
        mma_m16n8k16(bfloat16_t{}, d, a, b);
        for (int i = 0; i < 4; ++i) fd[4 * thread_idx() + i] = d[i];""",
        fa=scatter(a, place_a16, 8).view(np.uint32),
        fb=scatter(b, place_b16, 4).view(np.uint32),
        fd=d,
    )
    expected = c.astype(np.float32)
    for k in range(16):
        expected += a[:, k : k + 1].astype(np.float32) * b[k].astype(np.float32)
    assert collect(d, place_c, (16, 8)).tobytes() == expected.tobytes()


def test_mma_m16n8k8_follows_the_isa_layout(run: Any) -> None:
    a, b, c = integers((16, 8), 4), integers((8, 8), 5), integers((16, 8), 6)
    d = scatter(c, place_c, 4)
    run(
        """float d[4];
        for (int i = 0; i < 4; ++i) d[i] = fd[4 * thread_idx() + i];
        mma_m16n8k8(half_t{}, d, fa[2 * thread_idx()], fa[2 * thread_idx() + 1], fb[thread_idx()]);
        for (int i = 0; i < 4; ++i) fd[4 * thread_idx() + i] = d[i];""",
        fa=scatter(a, place_a8, 4).astype(np.float16).view(np.uint32),
        fb=scatter(b, place_b8, 2).astype(np.float16).view(np.uint32),
        fd=d,
    )
    np.testing.assert_array_equal(collect(d, place_c, (16, 8)), a @ b + c)


def bit_words(fragments: Array) -> Array:
    """The lowest bit of a word is the first."""
    return np.packbits(fragments, axis=1, bitorder="little").view(np.uint32)


def test_mma_m16n8k128_bits_follows_the_isa_layout(run: Any) -> None:
    random = np.random.default_rng(10)
    a, b = (random.integers(0, 2, shape, dtype=np.int32) for shape in ((16, 128), (128, 8)))
    # Counts are 32 on average: some of these stay below zero, some pass it.
    c = random.integers(-64, 64, (16, 8), dtype=np.int32)
    d = scatter(c, place_c, 4)
    run(
        """const u32 a[2] = {fa[2 * thread_idx()], fa[2 * thread_idx() + 1]};
        i32 d[4];
        for (int i = 0; i < 4; ++i) d[i] = fd[4 * thread_idx() + i];
        mma_m16n8k128_bits(d, a, fb[thread_idx()]);
        for (int i = 0; i < 4; ++i) fd[4 * thread_idx() + i] = d[i];""",
        fa=bit_words(scatter(a, place_a1, 64)),
        fb=bit_words(scatter(b, place_b1, 32)),
        fd=d,
    )
    np.testing.assert_array_equal(d, scatter(a @ b + c, place_c, 4))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            "if (thread_idx() < 20) {\n  mma_m16n8k128_bits(d, a, 1);\n} else {\n  warp_sync();\n}",
            "divergent collective: this lane is at warp_sync while 20 other lanes of its warp wait at "
            "a product of bits (test.cu:3)",
        ),
        (
            "if (thread_idx() == 0) return;\nmma_m16n8k128_bits(d, a, 1);",
            "divergent collective: a product of bits needs all 32 lanes",
        ),
        (
            "if (thread_idx() != 9) mma_m16n8k128_bits(d, a, 1);\nblock_sync();",
            "31 threads (warps 0) wait at a product of bits at test.cu:2 (31 of its warp's 32 lanes have arrived)",
        ),
    ],
)
def test_a_product_of_bits_to_which_not_all_lanes_come_is_a_finding(run: Any, body: str, message: str) -> None:
    with pytest.raises(EmulationError) as caught:
        run("const u32 a[2] = {}; i32 d[4] = {};\n" + body)
    assert message in str(caught.value)


@pytest.mark.parametrize("element", HALF)
def test_mma_keeps_nan_infinity_and_subnormals(run: Any, element: str) -> None:
    tiny = np.float32(2.0**-24 if element == "half_t" else 2.0**-130)
    a, b = np.zeros((16, 16), np.float32), np.zeros((16, 8), np.float32)
    a[0, 0], a[1, 1], a[2, 2] = np.nan, np.inf, tiny
    b[:, :] = 4.0
    d = np.zeros((32, 4), np.float32)
    run(
        f"""u32 a[4], b[2]; float d[4] = {{}};
        for (int i = 0; i < 4; ++i) a[i] = fa[4 * thread_idx() + i];
        for (int i = 0; i < 2; ++i) b[i] = fb[2 * thread_idx() + i];
        mma_m16n8k16({element}{{}}, d, a, b);
        for (int i = 0; i < 4; ++i) fd[4 * thread_idx() + i] = d[i];""",
        fa=scatter(a, place_a16, 8).astype(HALF[element]).view(np.uint32),
        fb=scatter(b, place_b16, 4).astype(HALF[element]).view(np.uint32),
        fd=d,
    )
    result = collect(d, place_c, (16, 8))
    assert np.isnan(result[0]).all()
    assert np.isposinf(result[1]).all()
    np.testing.assert_array_equal(result[2], 4 * tiny)
    np.testing.assert_array_equal(result[3:], 0)


@pytest.mark.parametrize("trans", [False, True])
@pytest.mark.parametrize("count", [2, 4])
def test_ldmatrix_gives_each_lane_its_pair_of_each_matrix(run: Any, count: int, trans: bool) -> None:
    # Rows lie in shared memory in reverse, so that every address is seen to count.
    matrices = np.arange(count * 64, dtype=np.uint16).reshape(count, 8, 8)
    stored = matrices.reshape(count * 8, 8)[::-1].copy()
    out = np.zeros((32, count), np.uint32)
    run(
        f"""auto* words = reinterpret_cast<u16*>(shared);
        for (int i = thread_idx(); i < {count * 64}; i += 32) words[i] = stored[i];
        warp_sync();
        u32 r[{count}];
        const u32 row = {count * 8 - 1} - thread_idx() % {count * 8};
        ldmatrix_x{count}{"_trans" if trans else ""}(r, shared_address(shared) + row * 16);
        for (int i = 0; i < {count}; ++i) out[thread_idx() * {count} + i] = r[i];""",
        smem=512,
        stored=stored,
        out=out,
    )
    for lane in range(32):
        for i in range(count):
            m = matrices[i].T if trans else matrices[i]
            row, col = lane // 4, lane % 4 * 2
            assert out[lane, i] == int(m[row, col]) | int(m[row, col + 1]) << 16


def test_ldmatrix_x2_ignores_the_addresses_of_the_upper_lanes(run: Any) -> None:
    out = np.zeros(32, np.uint32)
    run(
        """reinterpret_cast<u32*>(shared)[thread_idx()] = thread_idx();
        reinterpret_cast<u32*>(shared)[thread_idx() + 32] = thread_idx() + 32;
        warp_sync();
        u32 r[2];
        ldmatrix_x2(r, thread_idx() < 16 ? shared_address(shared) + thread_idx() * 16 : 0xfffffff1u);
        out[thread_idx()] = r[1];""",
        smem=256,
        out=out,
    )
    np.testing.assert_array_equal(out, np.arange(32, 64))
