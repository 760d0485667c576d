"""Products of a warpgroup: every type, form, major and swizzle against NumPy, and what must not be done."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest

Array = np.ndarray[Any, Any]

TYPES = {
    "half_t": np.float16,
    "bfloat16_t": ml_dtypes.bfloat16,
    "e4m3_t": ml_dtypes.float8_e4m3fn,
    "e5m2_t": ml_dtypes.float8_e5m2,
}
SIXTEEN_BIT = ("half_t", "bfloat16_t")
#: Swizzle -> its number in descriptors, and the bytes of a line that lie together.
SWIZZLES = {"none": (0, 16), "128": (1, 128), "64": (2, 64), "32": (3, 32)}
STEPS = 4


class Placed(NamedTuple):
    """An operand as it lies in shared memory."""

    image: Array
    leading: int
    stride: int
    #: From one step of the summed dimension to the next one; by step, since panels may lie between.
    steps: list[int]


def place(operand: Array, mn_major: bool, swizzle: str) -> Placed:
    """Lay out ``operand`` (rows along MN, columns along K), by the picture of eight lines with exchanged chunks."""
    lines = operand.T if mn_major else operand
    data = np.ascontiguousarray(lines).view(np.uint8).reshape(lines.shape[0], -1, 16)
    count, chunks = data.shape[:2]
    width = SWIZZLES[swizzle][1]
    per_width = width // 16
    # What lies side by side are panels of eight-line groups, one group after another; without a swizzle, columns
    # of core matrices.
    group = 8 * width
    panel = count // 8 * group
    image = np.full((chunks // per_width) * panel, 0xEE, np.uint8)
    for line, chunk in product(range(count), range(chunks)):
        slot = chunk % per_width ^ (line % 8 * per_width // 8)
        at = chunk // per_width * panel + line // 8 * group + line % 8 * width + slot * 16
        image[at : at + 16] = data[line, chunk]
    step_bytes = 32
    if mn_major:
        leading, stride = (group, panel) if swizzle == "none" else (panel, group)
        steps = [2 * group * k for k in range(STEPS)]
    else:
        leading, stride = (panel if swizzle == "none" else 16), group
        steps = [k * step_bytes // width * panel + k * step_bytes % width for k in range(STEPS)]
    return Placed(image, leading, stride, steps)


def collect(registers: Array) -> Array:
    """The 64 x n matrix of the lanes' accumulators."""
    columns = registers.shape[1] * 2
    matrix = np.full((64, columns), np.nan, np.float32)
    for thread, i in product(range(128), range(columns // 2)):
        row = 16 * (thread // 32) + thread % 32 // 4 + 8 * (i // 2 % 2)
        matrix[row, 8 * (i // 4) + 2 * (thread % 4) + i % 2] = registers[thread, i]
    return matrix


def scatter(matrix: Array) -> Array:
    """The lanes' accumulators of a 64 x n matrix."""
    registers = np.zeros((128, matrix.shape[1] // 2), np.float32)
    for thread, i in product(range(128), range(registers.shape[1])):
        row = 16 * (thread // 32) + thread % 32 // 4 + 8 * (i // 2 % 2)
        registers[thread, i] = matrix[row, 8 * (i // 4) + 2 * (thread % 4) + i % 2]
    return registers


def fragments(left: Array) -> Array:
    """The lanes' registers of a 64 x k operand: by step, thread and register."""
    words = np.ascontiguousarray(left).view(np.uint32).reshape(64, STEPS, 8)
    out = np.zeros((STEPS, 128, 4), np.uint32)
    for step, thread, i in product(range(STEPS), range(128), range(4)):
        row = 16 * (thread // 32) + thread % 32 // 4 + 8 * (i % 2)
        out[step, thread, i] = words[row, step, thread % 4 + 4 * (i // 2)]
    return out


def integers(shape: tuple[int, int], element: str, seed: int) -> Array:
    return np.random.default_rng(seed).integers(-4, 5, shape).astype(np.float32).astype(TYPES[element])


LOAD = """const int t = thread_idx();
for (int i = t; i < {bytes}; i += 128) shared[i] = image[i];
fence_proxy_async();
block_sync();
const u32 base = shared_address(shared);
const auto descriptor = [&](const u32* form, u32 step) {{
  return matrix_descriptor(base + form[0] + form[4 + step], form[1], form[2], static_cast<Swizzle>(form[3]));
}};
float d[{n} / 2];
for (int i = 0; i < {n} / 2; ++i) d[i] = start[t * {n} / 2 + i];
"""
STORE = """
wgmma_commit();
wgmma_wait<0>();
wgmma_pin(d);
for (int i = 0; i < {n} / 2; ++i) out[t * {n} / 2 + i] = d[i];
"""


def form(placed: Placed, offset: int, swizzle: str) -> Array:
    return np.array([offset, placed.leading, placed.stride, SWIZZLES[swizzle][0], *placed.steps], np.uint32)


def swizzles_that_fit(element: str, n: int, majors: tuple[bool, ...]) -> Iterator[tuple[str, ...]]:
    """Swizzles of both operands: MN-major lines are panels of whole widths."""
    lengths = (64, n)[2 - len(majors) :]
    size = TYPES[element](0).itemsize
    for chosen in product(SWIZZLES, repeat=len(majors)):
        fits = (
            not major or length * size % SWIZZLES[s][1] == 0
            for s, major, length in zip(chosen, majors, lengths, strict=True)
        )
        if all(fits):
            yield chosen


def multiply_ss(run: Any, element: str, n: int, majors: tuple[bool, bool], **options: Any) -> None:
    depth = STEPS * 32 // TYPES[element](0).itemsize
    a, b = integers((64, depth), element, 1), integers((n, depth), element, 2)
    start = np.random.default_rng(3).integers(-50, 50, (64, n)).astype(np.float32)
    sums = a.astype(np.float32) @ b.astype(np.float32).T
    template = ", ".join([element, str(n), *(f"Major::{'mn' if m else 'k'}" for m in majors)])
    for chosen in swizzles_that_fit(element, n, majors):
        left, right = place(a, majors[0], chosen[0]), place(b, majors[1], chosen[1])
        image = np.concatenate([left.image, right.image])
        out = np.zeros((128, n // 2), np.float32)
        for accumulate in (0, 1):
            body = (
                LOAD
                + "wgmma_fence();\nfor (u32 k = 0; k < 4; ++k)\n"
                + f"  wgmma_ss<{template}>(d, descriptor(fa, k), descriptor(fb, k), k > 0 || accumulate[0]);"
                + STORE
            )
            run(
                body.format(bytes=64 * depth * a.itemsize + n * depth * a.itemsize, n=n),
                threads=128,
                smem=image.size,
                image=image,
                start=scatter(start),
                fa=form(left, 0, chosen[0]),
                fb=form(right, left.image.size, chosen[1]),
                accumulate=np.array([accumulate], np.uint32),
                out=out,
                **options,
            )
            np.testing.assert_array_equal(collect(out), sums + accumulate * start, err_msg=f"{chosen}")


@pytest.mark.parametrize("majors", list(product([False, True], repeat=2)))
@pytest.mark.parametrize("element", SIXTEEN_BIT)
def test_products_of_16_bit_elements_in_every_layout(run: Any, element: str, majors: tuple[bool, bool]) -> None:
    multiply_ss(run, element, 64, majors)


@pytest.mark.parametrize("element", ["e4m3_t", "e5m2_t"])
def test_products_of_8_bit_elements_in_every_swizzle(run: Any, element: str) -> None:
    multiply_ss(run, element, 64, (False, False))


@pytest.mark.parametrize("n", [8, 24, 80, 96, 176, 256])
def test_products_of_any_width(run: Any, n: int) -> None:
    multiply_ss(run, "bfloat16_t", n, (False, True))


def test_products_in_race_mode_and_out_of_order(run: Any) -> None:
    multiply_ss(run, "bfloat16_t", 16, (False, False), race=True)
    for seed in range(3):
        multiply_ss(run, "bfloat16_t", 16, (True, True), schedule="random", seed=seed)


@pytest.mark.parametrize(
    ("element", "major"), [(e, m) for e in TYPES for m in ("k", "mn") if m == "k" or e in SIXTEEN_BIT]
)
def test_the_left_operand_may_be_in_registers(run: Any, element: str, major: str) -> None:
    n = 64
    depth = STEPS * 32 // TYPES[element](0).itemsize
    a, b = integers((64, depth), element, 4), integers((n, depth), element, 5)
    right = place(b, major == "mn", "128")
    out = np.zeros((128, n // 2), np.float32)
    body = (
        LOAD
        + """u32 a[4][4];
        for (int k = 0; k < 4; ++k) for (int i = 0; i < 4; ++i) a[k][i] = fragments[(k * 128 + t) * 4 + i];
        wgmma_fence();
        wgmma_rs_first<ELEMENT, 64, Major::MAJOR>(d, a[0], descriptor(fb, 0));
        for (u32 k = 1; k < 4; ++k) wgmma_rs<ELEMENT, 64, Major::MAJOR>(d, a[k], descriptor(fb, k), true);""".replace(
            "ELEMENT", element
        ).replace("MAJOR", major)
        + STORE
    )
    run(
        body.format(bytes=right.image.size, n=n),
        threads=128,
        smem=right.image.size,
        image=right.image,
        start=np.full((128, n // 2), np.nan, np.float32),
        fb=form(right, 0, "128"),
        fragments=fragments(a),
        out=out,
    )
    np.testing.assert_array_equal(collect(out), a.astype(np.float32) @ b.astype(np.float32).T)
