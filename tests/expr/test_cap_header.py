"""Softcaps as Hopper's forward kernel computes them, ``flashgen/cap.cuh``: exact wherever a product lies, and the same
number for it whatever others of its warp are, in rows near their cap and in others."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest

from flashgen.emulator.kernel import Buffer, EmulatedKernel

Array = np.ndarray[Any, Any]

#: Numbers that a thread is given at once.
GIVEN = 8
#: What is computed of each product.
RESULTS = 9
SOURCE = f"""
#include "flashgen/cap.cuh"
using namespace flashgen;
struct Params {{ const float* x; float* out; float amplitude, slope; i32 count, near; }};
FLASHGEN_KERNEL(32, 1) caps(FLASHGEN_GRID_CONSTANT Params p) {{
  FLASHGEN_SHARED_MEMORY(shared);
  constexpr float kShift = 0.375f;
  const Cap cap = Cap::of(p.amplitude, p.slope);
  const CapPolynomial polynomial = CapPolynomial::of(cap);
  // A lane's first row is as it is asked for, and its second one is not near the cap.
  const NearCap near = {{{{p.near != 0, false}}}};
  const CappedProducts any = CappedProducts::of(cap, near);
  const OrderedProducts ordered = OrderedProducts::of(cap, near);
  const SharesOfCap shares = {{any.share}};
  for (i32 i = thread_idx(); i < p.count; i += 32) {{
    // The last of the numbers is another lane's.
    float s[{GIVEN}] = {{p.x[i]}};
    s[{GIVEN - 1}] = p.x[(i + 1) % p.count];
    const ProductsBelowCap below = {{polynomial}};
    float* const out = p.out + {RESULTS} * i;
    out[0] = polynomial.is_beyond(largest_of(s)) ? 0.0f : 1.0f;
    out[1] = polynomial.is_beyond(s[0]) ? 0.0f : 1.0f;
    out[2] = below.relative(s[0], kShift, 0);
    out[3] = any.relative(s[0], kShift, 0);
    out[8] = shares.relative(s[0], kShift, 0);
    ordered.put_in_order(s, cap);
    out[4] = ordered.relative(s[0], kShift, 0);
    out[5] = s[0];
    out[6] = ordered.relative(-kInfinity, kShift, 0);
    out[7] = any.logit(p.x[i], 0);
  }}
}}
"""
#: Amplitudes and slopes: of products of 64 columns at caps of 30 and 50, caps close to zero and far from it, logits
#: that fall, slopes whose powers are infinite or vanish.
CAPS = {
    "cap 30": (30.0, 0.125 / 30),
    "cap 50": (50.0, 0.0625 / 50),
    "cap 0.001": (1e-3, 125.0),
    "cap 1e5": (1e5, 1.25e-6),
    "falls": (-5.0, 0.1),
    "both negative": (-5.0, -0.1),
    "infinite powers": (2.0, 1e11),
    "no powers": (1e15, 1e-15),
    "constant": (0.0, 0.1),
}
#: Where the polynomial ends.
REACH = 0.265
BELOW = {name: {"infinite powers": 0.0, "no powers": 0.05}.get(name, REACH) for name in CAPS}


def products(name: str) -> Array:
    """Products of all sizes, and all that are near where the polynomial ends."""
    slope = CAPS[name][1]
    edge = np.float32(BELOW[name] or REACH) / np.abs(np.float32(slope))
    sizes = np.geomspace(1e-6, 40.0, 4000) / abs(slope)
    near = np.clip(edge.view(np.int32) + np.arange(-3000, 3000, dtype=np.int32), 1, 0x7F7FFFFF).view(np.float32)
    x = np.concatenate([np.clip(sizes, 1e-37, 1e38).astype(np.float32), near])
    x = np.concatenate([x, -x, np.float32([0.0])])
    return np.resize(np.random.default_rng(0).permutation(x), -(-x.size // 32) * 32)


def computed(name: str, x: Array | None = None, *, near: bool = False) -> tuple[Array, ...]:
    """Products, and of each: whether it and another one are below, and it is; its exponent if it is; its exponent; the
    same by what stands for it in the order of logits; that; the exponent of what is forbidden; its logit; the exponent
    of a product whose row is near the cap."""
    x = products(name) if x is None else x
    out = np.zeros((x.size, RESULTS), np.float32)
    buffers = [Buffer("x", x.ctypes.data, x.nbytes), Buffer("out", out.ctypes.data, out.nbytes, True)]
    params = struct.pack("QQffii", x.ctypes.data, out.ctypes.data, *CAPS[name], x.size, near)
    EmulatedKernel("caps", SOURCE).launch(1, params, buffers, threads=32)
    return x, *np.ascontiguousarray(out.T)


@pytest.mark.parametrize("name", CAPS)
def test_a_capped_logit_is_exact_wherever_its_product_lies(name: str) -> None:
    x, _, _, _, exponent, _, _, _, logit, _ = computed(name)
    amplitude, slope = map(np.float32, CAPS[name])
    exact = amplitude * np.tanh(slope * x.astype(np.float64)) / np.log(2)
    # Of what is beyond the polynomial a part of the cap is rounded.
    relative = {"no powers": 8e-6, "infinite powers": 0.0}.get(name, 1.2e-6)
    allowed = relative * abs(exact) + (6e-7 * abs(amplitude) if name == "infinite powers" else 1e-28)
    assert np.all(abs(logit - exact) <= allowed)
    # And last the difference.
    assert np.all(abs(exponent + 0.375 - exact) <= allowed + np.spacing(np.float32(np.maximum(abs(exact), 0.375))))


@pytest.mark.parametrize("name", CAPS)
def test_an_exponent_is_the_same_number_whichever_way_it_is_computed(name: str) -> None:
    _, both, is_below, by_polynomial, exponent, by_order, _, forbidden, _, _ = computed(name)
    assert np.array_equal(both, is_below * np.roll(is_below, -1))
    assert by_polynomial[is_below == 1].tobytes() == exponent[is_below == 1].tobytes()
    assert exponent.tobytes() == by_order.tobytes()
    assert np.all(forbidden == -np.inf)


@pytest.mark.parametrize("name", CAPS)
def test_in_rows_near_their_cap_it_is_so_for_products_of_all_sizes(name: str) -> None:
    x, _, _, _, exponent, by_order, _, forbidden, logit, near = computed(name, near=True)
    assert exponent.tobytes() == near.tobytes()
    assert by_order.tobytes() == near.tobytes()
    assert np.all(forbidden == -np.inf)
    # Beside the logarithm of such a row's sum, which is about the cap, an error of 1e-5 is none.
    amplitude, slope = map(np.float32, CAPS[name])
    exact = amplitude * np.tanh(slope * x.astype(np.float64)) / np.log(2)
    assert np.all(abs(logit - exact) <= 4e-7 * abs(amplitude) / np.log(2))


@pytest.mark.parametrize("name", CAPS)
def test_the_polynomial_ends_where_it_should(name: str) -> None:
    x, _, is_below, *_ = computed(name)
    argument = abs(np.float32(CAPS[name][1]) * x.astype(np.float64))
    assert np.all(is_below[argument < BELOW[name] * 0.999999])
    assert not np.any(is_below[argument > BELOW[name] * 1.000001])


@pytest.mark.parametrize("name", [name for name in CAPS if name != "constant"])
def test_what_stands_for_products_is_in_the_order_of_their_logits(name: str) -> None:
    x, *_, stands, _, _, _ = computed(name)
    below = abs(np.float32(CAPS[name][1]) * x.astype(np.float64)) < BELOW[name] * 0.999999
    sign = -1 if np.prod(CAPS[name]) < 0 else 1
    assert np.all(stands[below] == sign * x[below])
    if below.any():
        assert abs(stands[~below]).min() >= abs(stands[below]).max()
    assert np.all(stands[~below] * sign * x[~below] >= 0)


def test_infinite_products_reach_the_cap_and_a_nan_stays_one() -> None:
    given = np.resize(np.float32([np.inf, -np.inf, np.nan, 1.0]), 32)
    _, _, is_below, _, exponent, by_order, _, _, _, _ = computed("cap 30", given)
    assert not is_below[:2].any()
    for found in (exponent, by_order):
        np.testing.assert_allclose(found[:2] + 0.375, [30 / np.log(2), -30 / np.log(2)], rtol=1e-6)
        assert np.isnan(found[2])
