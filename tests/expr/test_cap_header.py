"""Softcaps as Hopper's forward kernel computes them, ``flashgen/cap.cuh``: exact wherever a product lies, by
polynomials, as shares of the cap, and by either as the product says."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest

import flashgen as fg
from flashgen.emulator.kernel import Buffer, EmulatedKernel
from flashgen.oracle.bounds import LSE_TOLERANCE
from flashgen.plan.forward_traits_sm90 import has_fine_cap

Array = np.ndarray[Any, Any]

#: Numbers that a thread is given at once: four of each of two rows.
GIVEN = 8
WARP = 32 * GIVEN
#: What is computed of each product.
RESULTS = 13
SOURCE = f"""
#include "flashgen/cap.cuh"
using namespace flashgen;
struct Params {{ const float* x; float* out; float amplitude, slope; i32 count; }};
FLASHGEN_KERNEL(32, 1) caps(FLASHGEN_GRID_CONSTANT Params p) {{
  FLASHGEN_SHARED_MEMORY(shared);
  constexpr float kShifts[2] = {{0.375f, 0.375f}}, kNone[2] = {{}};
  const Cap cap = Cap::of(p.amplitude, p.slope);
  const CapPolynomial polynomial = CapPolynomial::of(cap);
  const CappedProducts any = CappedProducts::of(cap);
  const SharesOfCap shares = {{any.share}};
  const SharesOfFineCap fine = {{any.share}};
  const ProductsBelowCap below = {{polynomial}};
  for (i32 from = {GIVEN} * thread_idx(); from < p.count; from += {GIVEN} * 32) {{
    float s[{GIVEN}], logits[{GIVEN}], capped[{GIVEN}], as_shares[{GIVEN}], as_fine[{GIVEN}], forbidden[{GIVEN}];
    for (i32 i = 0; i < {GIVEN}; ++i) s[i] = p.x[from + i];
    prepare_products(s, cap);
    for (i32 i = 0; i < {GIVEN}; ++i) {{
      logits[i] = capped[i] = as_shares[i] = as_fine[i] = s[i];
      // Every second row is forbidden, and others are not.
      forbidden[i] = i / 2 % 2 == 0 ? s[i] : kForbidden;
    }}
    const bool all_below = !polynomial.is_beyond(largest_of(s));
    ProductsSupposedBelowCap supposed = {{polynomial}};
    for (i32 i = 0; i < {GIVEN}; i += 2) supposed.see(s[i], s[i + 1]);
    any.replace(logits, kNone);
    any.replace(capped, kShifts);
    any.replace(forbidden, kShifts);
    const float bound = any.share.bound(shares.replace(as_shares, kNone));
    fine.replace(as_fine, kNone);
    for (i32 i = 0; i < {GIVEN}; ++i) {{
      const i32 row = i / 2 % 2;
      const float shift = kShifts[row];
      float* const out = p.out + {RESULTS} * (from + i);
      out[0] = all_below ? 1.0f : 0.0f;
      out[1] = polynomial.is_beyond(s[i]) ? 0.0f : 1.0f;
      out[2] = below.relative(s[i], shift, row);
      out[3] = capped[i];
      out[5] = any.logit(s[i]);
      // What stands for a forbidden product is never a maximum; its exponent is for the mask to say once more.
      out[4] = row == 1 ? any.logit(kForbidden) : forbidden[i];
      out[6] = polynomial.forbids() ? below.relative(kForbidden, shift, row) : -kInfinity;
      out[7] = logits[i];
      out[8] = as_shares[i];
      out[9] = bound;
      out[10] = as_fine[i];
      out[11] = any.share.least_sum();
      out[12] = polynomial.might_be_beyond(supposed.largest_square) ? 0.0f : 1.0f;
    }}
  }}
}}
"""
#: Amplitudes and slopes: of products of 64 columns at usual caps and at others, caps close to zero and far from it,
#: logits that fall, slopes whose powers are infinite or vanish.
CAPS = {
    "cap 30": (30.0, 0.125 / 30),
    "cap 50": (50.0, 0.0625 / 50),
    "cap 100": (100.0, 0.0625 / 100),
    "cap 101": (101.0, 0.0625 / 101),
    "cap 1000": (1000.0, 0.125 / 1000),
    "cap 1010": (1010.0, 0.125 / 1010),
    "cap 0.001": (1e-3, 125.0),
    "cap 1e5": (1e5, 1.25e-6),
    "falls": (-5.0, 0.1),
    "both negative": (-5.0, -0.1),
    "infinite powers": (2.0, 1e11),
    "no powers": (1e15, 1e-15),
    "constant": (0.0, 0.1),
}
#: What shares of a cap of 1 are off by near zero, on a GPU: half of what its exponential is.
SHARE_ERROR = 8e-8
#: And the shares of low caps, which take fewer instructions.
FINE_SHARE_ERROR = 1.9e-7
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
    return np.resize(np.random.default_rng(0).permutation(x), -(-x.size // WARP) * WARP)


def computed(name: str, x: Array | None = None) -> tuple[Array, ...]:
    """Products, and of each: whether all of its lane are below, and it is; its exponent if it is; its exponent; the
    same beside forbidden rows, and of these the logit; its logit by itself; the exponent of what is forbidden, by the
    polynomial; its logit; its logit as a share of the cap, what no such logit of its lane is above, and its logit as a
    share of a low cap; the sum that allows for shares; whether all of its lane are known to be below by squares."""
    x = products(name) if x is None else x
    out = np.zeros((x.size, RESULTS), np.float32)
    buffers = [Buffer("x", x.ctypes.data, x.nbytes), Buffer("out", out.ctypes.data, out.nbytes, True)]
    params = struct.pack("QQffi4x", x.ctypes.data, out.ctypes.data, *CAPS[name], x.size)
    EmulatedKernel("caps", SOURCE).launch(1, params, buffers, threads=32)
    return x, *np.ascontiguousarray(out.T)


def exact(name: str, x: Array) -> Array:
    """Logits in powers of two."""
    amplitude, slope = map(np.float32, CAPS[name])
    return np.asarray(amplitude * np.tanh(slope * x.astype(np.float64)) / np.log(2))


@pytest.mark.parametrize("name", CAPS)
def test_a_capped_logit_is_exact_wherever_its_product_lies(name: str) -> None:
    x, _, _, _, exponent, _, alone, _, logit, *_ = computed(name)
    expected = exact(name, x)
    # Of what is beyond the polynomial a part of the cap is rounded.
    relative = {"no powers": 8e-6, "infinite powers": 0.0}.get(name, 1.2e-6)
    rounded = 6e-7 * abs(CAPS[name][0]) if name == "infinite powers" else 1e-28
    allowed = relative * abs(expected) + rounded
    assert np.all(abs(logit - expected) <= allowed)
    assert np.all(abs(alone - expected) <= allowed)
    # And last the difference.
    assert np.all(
        abs(exponent + 0.375 - expected) <= allowed + np.spacing(np.float32(np.maximum(abs(expected), 0.375)))
    )


@pytest.mark.parametrize("name", CAPS)
def test_an_exponent_is_the_same_number_whichever_way_it_is_computed(name: str) -> None:
    _, all_below, is_below, by_polynomial, exponent, beside, _, forbidden, *_, known_below = computed(name)
    for found in (all_below, known_below):
        assert np.array_equal(found, np.repeat(is_below.reshape(-1, GIVEN).min(1), GIVEN))
    assert by_polynomial[is_below == 1].tobytes() == exponent[is_below == 1].tobytes()
    first_row = np.arange(exponent.size) // 2 % 2 == 0
    assert beside[first_row].tobytes() == exponent[first_row].tobytes()
    assert np.all(beside[~first_row] == -np.inf)
    assert np.all(forbidden == -np.inf)


def test_a_nan_hides_no_product_beyond_the_polynomial() -> None:
    x = np.full((GIVEN, 2, WARP // 2), 0.01, np.float32)
    x[:, 0] = 1e3
    for at, lane in enumerate(x.reshape(-1, GIVEN)):
        lane[at % GIVEN] = [np.nan, -np.nan][at // GIVEN % 2]
    known_below = computed("cap 30", x.ravel())[-1].reshape(GIVEN, 2, -1)
    assert not np.any(known_below[:, 0])


@pytest.mark.parametrize("name", CAPS)
def test_a_share_of_the_cap_is_exact_for_products_of_all_sizes(name: str) -> None:
    x, *_, share, _, of_fine_cap, _, _ = computed(name)
    expected = exact(name, x)
    for found, error in ((share, SHARE_ERROR), (of_fine_cap, FINE_SHARE_ERROR)):
        assert np.all(abs(found - expected) <= error * abs(CAPS[name][0]) / np.log(2) + 4.5e-7 * abs(expected))


@pytest.mark.parametrize("name", CAPS)
def test_no_share_of_a_lane_is_above_its_bound(name: str) -> None:
    x, *_, bound, _, _, _ = computed(name)
    highest = exact(name, x).reshape(-1, GIVEN).max(1)
    top = abs(CAPS[name][0]) / np.log(2)
    bounds = bound.reshape(-1, GIVEN)[:, 0]
    assert np.all((bounds >= highest - 1e-5 * top) & (bounds <= 1.00001 * top))


def test_the_bound_of_shares_tells_rows_far_below_zero_from_others() -> None:
    name = "cap 100"
    for argument, least, most in ((-2.0, -0.97, -0.8), (-0.3, -0.3, 0.75), (0.3, 0.29, 0.97)):
        x = np.full(WARP, argument / CAPS[name][1], np.float32)
        _, *_, bound, _, _, _ = computed(name, x)
        share = bound * np.log(2) / CAPS[name][0]
        assert np.all((share >= least) & (share <= most)), share[0]


@pytest.mark.parametrize("name", CAPS)
def test_shares_are_taken_where_what_they_are_off_by_is_nothing_beside_the_logarithm_of_a_sum(name: str) -> None:
    cap = np.float64(abs(CAPS[name][0]))
    least = float(computed(name)[-2][0]) * np.log(2)
    assert SHARE_ERROR * cap <= LSE_TOLERANCE * max(1.0, least)
    spec = fg.AttentionSpec(64, score=fg.softcap(float(cap))) if cap else None
    if spec is not None and has_fine_cap(spec):
        assert FINE_SHARE_ERROR * cap <= LSE_TOLERANCE
        assert least == -np.inf
    # And where it may be what probabilities are rounded to, only what has a product beyond the polynomial.
    assert SHARE_ERROR * cap <= 1e-4 or least > 0.25 * cap


@pytest.mark.parametrize("name", CAPS)
def test_the_polynomial_ends_where_it_should(name: str) -> None:
    x, _, is_below, *_ = computed(name)
    argument = abs(np.float32(CAPS[name][1]) * x.astype(np.float64))
    assert np.all(is_below[argument < BELOW[name] * 0.999999])
    assert not np.any(is_below[argument > BELOW[name] * 1.000001])


def test_infinite_products_reach_the_cap_and_a_nan_stays_one() -> None:
    given = np.resize(np.float32([np.inf, -np.inf, 1.0, np.nan]), WARP)
    _, _, is_below, _, exponent, *_, share, _, of_fine_cap, _, _ = computed("cap 30", given)
    assert not is_below[:2].any()
    for found in (exponent + 0.375, share, of_fine_cap):
        np.testing.assert_allclose(found[:2], [30 / np.log(2), -30 / np.log(2)], rtol=1e-6)
        assert np.isnan(found[3])
