"""stmatrix, ldmatrix of one matrix, and products of 8-bit elements, by the formulas of the PTX ISA."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from flashgen.errors import EmulationError

EIGHT_BIT = {"e4m3_t": ml_dtypes.float8_e4m3fn, "e5m2_t": ml_dtypes.float8_e5m2}


@pytest.mark.parametrize("trans", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_stmatrix_puts_each_lanes_pair_into_each_matrix(run: Any, count: int, trans: bool) -> None:
    matrices = np.arange(count * 64, dtype=np.uint16).reshape(count, 8, 8)
    given = np.zeros((32, count), np.uint32)
    for lane in range(32):
        for i in range(count):
            m = matrices[i].T if trans else matrices[i]
            row, col = lane // 4, lane % 4 * 2
            given[lane, i] = int(m[row, col]) | int(m[row, col + 1]) << 16
    out = np.zeros((count * 8, 8), np.uint16)
    # Rows go to shared memory in reverse, so that every address is seen to count.
    run(
        f"""u32 r[{count}];
        for (int i = 0; i < {count}; ++i) r[i] = given[thread_idx() * {count} + i];
        const u32 row = {count * 8 - 1} - thread_idx() % {count * 8};
        stmatrix_x{count}{"_trans" if trans else ""}(shared_address(shared) + row * 16, r);
        warp_sync();
        auto* words = reinterpret_cast<u16*>(shared);
        for (int i = thread_idx(); i < {count * 64}; i += 32) out[i] = words[i];""",
        smem=count * 128,
        given=given,
        out=out,
        race=True,
    )
    np.testing.assert_array_equal(out[::-1].reshape(count, 8, 8), matrices)


@pytest.mark.parametrize("trans", ["", "_trans"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_what_stmatrix_stored_ldmatrix_loads(run: Any, count: int, trans: str) -> None:
    given = np.random.default_rng(0).integers(0, 2**32, (32, count), dtype=np.uint32)
    out = np.zeros_like(given)
    run(
        f"""u32 r[{count}], s[{count}];
        for (int i = 0; i < {count}; ++i) r[i] = given[thread_idx() * {count} + i];
        const u32 address = shared_address(shared) + thread_idx() % {count * 8} * 16;
        stmatrix_x{count}{trans}(address, r);
        warp_sync();
        ldmatrix_x{count}{trans}(s, address);
        for (int i = 0; i < {count}; ++i) out[thread_idx() * {count} + i] = s[i];""",
        smem=512,
        given=given,
        out=out,
    )
    np.testing.assert_array_equal(out, given)


def test_stmatrix_ignores_the_addresses_of_lanes_beyond_its_rows(run: Any) -> None:
    body = "const u32 r[1] = {7};\nstmatrix_x1(thread_idx() < 8 ? shared_address(shared) + thread_idx() * 16 : 1, r);"
    run(body, smem=128)


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("thread_idx() * 16 + 8", "misaligned: stmatrix needs a shared-memory address that is a multiple of 16"),
        ("thread_idx() * 16 + 16", "shared memory out of bounds: stmatrix touches 16 bytes at offset 512 of 512"),
    ],
)
def test_a_bad_address_of_stmatrix_is_a_finding(run: Any, address: str, message: str) -> None:
    with pytest.raises(EmulationError) as caught:
        run(f"const u32 r[4] = {{}};\nstmatrix_x4(shared_address(shared) + {address}, r);", smem=512)
    assert str(caught.value).startswith(message)
    assert "kernels/test.cu:2" in str(caught.value)


def test_other_lanes_see_what_stmatrix_stored_only_after_a_warp_sync(run: Any) -> None:
    body = "const u32 r[1] = {7};\nstmatrix_x1(shared_address(shared) + thread_idx() % 8 * 16, r);\n"
    load = "out[thread_idx()] = reinterpret_cast<u32*>(shared)[31 - thread_idx()];"
    out = np.zeros(32, np.uint32)
    run(body + "warp_sync();\n" + load, smem=128, race=True, out=out)
    assert (out == 7).all()
    with pytest.raises(EmulationError, match=r"race: a load of 4 bytes at offset \d+ of shared memory and a stmatrix"):
        run(body + load, smem=128, race=True, out=out)


def place_a(lane: int, i: int) -> tuple[int, int]:
    row = lane // 4 + (0 if i < 4 or 8 <= i < 12 else 8)
    return row, lane % 4 * 4 + (i & 3) + (16 if i >= 8 else 0)


def place_b(lane: int, i: int) -> tuple[int, int]:
    return lane % 4 * 4 + (i & 3) + (16 if i >= 4 else 0), lane // 4


def place_c(lane: int, i: int) -> tuple[int, int]:
    return lane // 4 + (8 if i >= 2 else 0), lane % 4 * 2 + (i & 1)


def multiply(run: Any, element: str, a: Any, b: Any, c: Any) -> Any:
    fragments = [
        np.array([[m[place(lane, i)] for i in range(n)] for lane in range(32)], m.dtype)
        for m, place, n in ((a, place_a, 16), (b, place_b, 8), (c, place_c, 4))
    ]
    d = fragments[2]
    run(
        f"""u32 a[4], b[2]; float d[4];
        for (int i = 0; i < 4; ++i) {{ a[i] = fa[4 * thread_idx() + i]; d[i] = fd[4 * thread_idx() + i]; }}
        for (int i = 0; i < 2; ++i) b[i] = fb[2 * thread_idx() + i];
        mma_m16n8k32({element}{{}}, d, a, b);
        for (int i = 0; i < 4; ++i) fd[4 * thread_idx() + i] = d[i];""",
        fa=fragments[0].view(np.uint32),
        fb=fragments[1].view(np.uint32),
        fd=d,
    )
    result = np.full((16, 8), np.nan, np.float32)
    for lane in range(32):
        for i in range(4):
            result[place_c(lane, i)] = d[lane, i]
    return result


@pytest.mark.parametrize("element", EIGHT_BIT)
def test_mma_m16n8k32_follows_the_isa_layout(run: Any, element: str) -> None:
    random = np.random.default_rng(1)
    a, b = (random.integers(-8, 9, s).astype(np.float32).astype(EIGHT_BIT[element]) for s in ((16, 32), (32, 8)))
    c = random.integers(-8, 9, (16, 8)).astype(np.float32)
    expected = a.astype(np.float32) @ b.astype(np.float32) + c
    np.testing.assert_array_equal(multiply(run, element, a, b, c), expected)


@pytest.mark.parametrize("element", EIGHT_BIT)
def test_every_8_bit_number_is_what_it_stands_for(run: Any, element: str) -> None:
    numbers = np.arange(256, dtype=np.uint8).view(EIGHT_BIT[element])
    one = np.zeros((32, 8), EIGHT_BIT[element])
    one[0] = 1
    for part in range(16):
        a = np.zeros((16, 32), EIGHT_BIT[element])
        a[:, 0] = numbers[16 * part : 16 * part + 16]
        result = multiply(run, element, a, one, np.zeros((16, 8), np.float32))
        np.testing.assert_array_equal(result, np.repeat(a[:, :1].astype(np.float32), 8, 1))
