"""Softcaps as Hopper's forward kernel computes them, ``flashgen/cap.cuh``: exact wherever a product lies, and the same
number for it whatever others of its warp are."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest

from flashgen.emulator.kernel import Buffer, EmulatedKernel

Array = np.ndarray[Any, Any]

#: Numbers that a thread is given at once.
GIVEN = 8
SOURCE = f"""
#include "flashgen/cap.cuh"
using namespace flashgen;
struct Params {{ const float* x; float* out; float amplitude, slope; i32 count; }};
FLASHGEN_KERNEL(32, 1) caps(FLASHGEN_GRID_CONSTANT Params p) {{
  FLASHGEN_SHARED_MEMORY(shared);
  const Cap cap = {{p.amplitude, p.slope}};
  const CapPolynomial polynomial = CapPolynomial::of(CapAtZero::of(cap));
  const CappedProducts capped = CappedProducts::of(polynomial);
  for (i32 i = thread_idx(); i < p.count; i += 32) {{
    // The last of the numbers is another lane's.
    float s[{GIVEN}] = {{p.x[i]}};
    s[{GIVEN - 1}] = p.x[(i + 1) % p.count];
    ProductsBelowCap below = {{polynomial}};
    below.look(s[0], 0.0f);
    p.out[4 * i] = below.were_below() ? 1.0f : 0.0f;
    p.out[4 * i + 1] = below.relative(s[0], 0.375f);
    capped.stand_for(s, cap);
    p.out[4 * i + 2] = capped.relative(s[0], 0.375f);
    p.out[4 * i + 3] = s[0];
  }}
}}
"""
#: Amplitudes and slopes: of products of 64 columns at caps of 30 and 50, caps close to zero and far from it, logits
#: that fall, slopes whose powers are infinite or vanish.
CAPS = {
    "cap 30": (30.0, 0.125 / 30),
    "cap 50": (50.0, 0.0625 / 50),
    "cap 0.001": (1e-3, 125.0),
    "cap 1e7": (1e7, 1.25e-8),
    "falls": (-5.0, 0.1),
    "both negative": (-5.0, -0.1),
    "infinite powers": (2.0, 1e11),
    "no powers": (1e15, 1e-15),
    "constant": (0.0, 0.1),
}
#: Where the polynomial ends.
FAR_BELOW = {name: {"infinite powers": 0.0, "no powers": 0.05}.get(name, 0.28) for name in CAPS}


def products(name: str) -> Array:
    """Products of all sizes, and all that are near where the polynomial ends."""
    slope = CAPS[name][1]
    edge = np.float32(FAR_BELOW[name] or 0.28) / np.abs(np.float32(slope))
    sizes = np.geomspace(1e-6, 40.0, 4000) / abs(slope)
    near = np.clip(edge.view(np.int32) + np.arange(-3000, 3000, dtype=np.int32), 1, 0x7F7FFFFF).view(np.float32)
    x = np.concatenate([np.clip(sizes, 1e-37, 1e38).astype(np.float32), near])
    x = np.concatenate([x, -x, np.float32([0.0])])
    return np.resize(np.random.default_rng(0).permutation(x), -(-x.size // 32) * 32)


def computed(x: Array, amplitude: float, slope: float) -> Array:
    """Of each product: whether it was seen to be below, its exponent as such and in general, and what stands for it."""
    out = np.zeros((x.size, 4), np.float32)
    buffers = [Buffer("x", x.ctypes.data, x.nbytes), Buffer("out", out.ctypes.data, out.nbytes, True)]
    params = struct.pack("QQffi4x", x.ctypes.data, out.ctypes.data, amplitude, slope, x.size)
    EmulatedKernel("caps", SOURCE).launch(1, params, buffers, threads=32)
    return out.T


@pytest.mark.parametrize("name", CAPS)
def test_a_capped_logit_is_exact_wherever_its_product_lies(name: str) -> None:
    amplitude, slope = CAPS[name]
    x = products(name)
    _, _, general, _ = computed(x, amplitude, slope)
    exact = np.float32(amplitude) * np.tanh(np.float32(slope) * x.astype(np.float64)) / np.log(2)
    # Of what is beyond the polynomial a part of the cap is rounded; and the difference, last.
    relative = {"no powers": 8e-6, "infinite powers": 0.0}.get(name, 1.5e-6)
    absolute = 4e-7 * abs(amplitude) if name == "infinite powers" else 0.0
    allowed = relative * abs(exact) + absolute + np.spacing(np.float32(np.maximum(abs(exact), 0.375)))
    assert np.all(abs(general + 0.375 - exact) <= allowed)


@pytest.mark.parametrize("name", CAPS)
def test_what_is_seen_to_be_far_below_a_cap_has_the_same_exponent_either_way(name: str) -> None:
    amplitude, slope = CAPS[name]
    x = products(name)
    below, by_polynomial, general, _ = computed(x, amplitude, slope)
    if amplitude * slope >= 0:
        # Logits that fall are never taken for products far below the cap.
        assert by_polynomial[below == 1].tobytes() == general[below == 1].tobytes()
    argument = abs(np.float32(slope) * x.astype(np.float64))
    assert not np.any(below[argument > FAR_BELOW[name] * 1.000001])
    assert np.all(below[argument < FAR_BELOW[name] * 0.999998])


@pytest.mark.parametrize("name", CAPS)
def test_what_stands_for_products_is_in_their_order(name: str) -> None:
    amplitude, slope = CAPS[name]
    x = products(name)
    stands = computed(x, amplitude, slope)[3]
    edge = FAR_BELOW[name] / abs(np.float64(np.float32(slope)))
    sign = -1 if amplitude * slope < 0 else 1
    inside, beyond = abs(x) < edge * 0.999999, abs(x) > edge * 1.000001
    assert np.all(stands[inside] == sign * x[inside])
    if amplitude:
        assert np.all(abs(stands[beyond]) >= np.float32(edge))
        assert np.all(stands[beyond] * sign * x[beyond] >= 0)


def test_infinite_products_reach_the_cap_and_a_nan_stays_one() -> None:
    x = np.resize(np.float32([np.inf, -np.inf, np.nan, 1.0]), 32)
    below, _, general, _ = computed(x, 30.0, 0.01)
    assert not below[:2].any()
    np.testing.assert_allclose(general[:2] + 0.375, [30 / np.log(2), -30 / np.log(2)], rtol=1e-6)
    assert np.isnan(general[2])
