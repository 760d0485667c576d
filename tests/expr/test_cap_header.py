"""Softcaps as Hopper's forward kernel computes them, ``flashgen/cap.cuh`` and ``flashgen/cap_shares.cuh``: exact
wherever a product lies, by polynomials, as shares of the cap, and by either as the product says."""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import numpy as np
import pytest

import flashgen as fg
from flashgen.emulator.kernel import Buffer, EmulatedKernel
from flashgen.oracle.bounds import LSE_TOLERANCE
from flashgen.plan.hopper.forward_traits import has_fine_cap

Array = np.ndarray[Any, Any]

#: Numbers that a thread is given at once: four of each of two rows.
GIVEN = 8
WARP = 32 * GIVEN


class Computed(NamedTuple):
    """Products, and what is computed of each."""

    x: Array
    #: Whether all of its lane are below the polynomial's end, by the largest; and by squares.
    all_below: Array
    known_below: Array
    #: Whether one of its lane is below the polynomial's lower end, of all and of those beside forbidden rows; and of
    #: nothing but forbidden ones.
    are_below: Array
    are_below_beside: Array
    none_below: Array
    #: Whether it is.
    is_below: Array
    #: Its exponent by the polynomial; by that or a share; the same beside forbidden rows; and that of what is
    #: forbidden, by the polynomial.
    by_polynomial: Array
    exponent: Array
    beside: Array
    forbidden: Array
    #: Its logit; that by itself, and as near as is enough for a row's highest; as a share of the cap; and as one of a
    #: low cap, by itself and in a tile in which every third product is forbidden.
    logit: Array
    alone: Array
    near: Array
    share: Array
    of_fine_cap: Array
    of_fine_cap_beside: Array
    #: The sum that allows for shares.
    least: Array
    #: Exponentials of what is forbidden, as a share and relative to the product, and whether they count; and beyond the
    #: polynomial, in a tile of which that is known.
    lowest: Array
    lowest_counts: Array
    lowest_beyond: Array


RESULTS = len(Computed._fields) - 1
OUT = {name: f"out[{at}]" for at, name in enumerate(Computed._fields[1:])}
SOURCE = f"""
#include "flashgen/cap_shares.cuh"
using namespace flashgen;
struct Params {{ const float* x; float* out; float amplitude, slope; i32 count; }};
template <class Shares, i32 count>
FLASHGEN_DEVICE void replace(const Shares& shares, float (&products)[count], const float (&shift)[2]) {{
  shares.take_powers(products);
  shares.replace_powers(products, shift);
}}
FLASHGEN_KERNEL(32, 1) caps(FLASHGEN_GRID_CONSTANT Params p) {{
  FLASHGEN_SHARED_MEMORY(shared);
  constexpr float kShifts[2] = {{0.375f, 0.375f}}, kNone[2] = {{}};
  const Cap cap = Cap::of(p.amplitude, p.slope);
  const CapPolynomial polynomial = CapPolynomial::of(cap);
  const CappedProducts any = CappedProducts::of(cap);
  const SharesOfCap shares = {{any.share}};
  const auto fine = SharesOfFineCap::of(any.share, false), fine_and_forbidden = SharesOfFineCap::of(any.share, true);
  const SharesBeyond beyond = {{any, false}}, beyond_and_forbidden = {{any, true}};
  const ProductsBelowCap below = {{polynomial}};
  for (i32 from = {GIVEN} * thread_idx(); from < p.count; from += {GIVEN} * 32) {{
    float s[{GIVEN}], logits[{GIVEN}], capped[{GIVEN}], as_shares[{GIVEN}], as_fine[{GIVEN}];
    float forbidden[{GIVEN}], third[{GIVEN}];
    for (i32 i = 0; i < {GIVEN}; ++i) s[i] = p.x[from + i];
    if (cap.falls()) turn_round(s);
    raise_lowest(s);
    for (i32 i = 0; i < {GIVEN}; ++i) {{
      logits[i] = capped[i] = as_shares[i] = as_fine[i] = third[i] = s[i];
      // Every second row is forbidden, and others are not.
      forbidden[i] = i / 2 % 2 == 0 ? s[i] : kForbidden;
    }}
    const bool all_below = !polynomial.is_beyond(largest_of(s));
    ProductsSupposedBelowCap supposed = {{polynomial}};
    for (i32 i = 0; i < {GIVEN}; i += 2) supposed.see(s[i], s[i + 1]);
    const bool below_end = are_below(s, polynomial, false);
    const bool below_end_beside = are_below(forbidden, polynomial, true);
    replace(beyond, logits, kNone);
    replace(beyond, capped, kShifts);
    replace(beyond_and_forbidden, forbidden, kShifts);
    replace(shares, as_shares, kNone);
    replace(fine, as_fine, kNone);
    raise_lowest(third, any.share.least_product());
    for (i32 i = 0; i < {GIVEN}; i += 3) third[i] = kForbidden;
    replace(fine_and_forbidden, third, kNone);
    for (i32 i = 0; i < {GIVEN}; ++i) {{
      const i32 row = i / 2 % 2;
      const float shift = kShifts[row];
      float* const out = p.out + {RESULTS} * (from + i);
      {OUT["all_below"]} = all_below ? 1.0f : 0.0f;
      {OUT["known_below"]} = polynomial.might_be_beyond(supposed.largest_square) ? 0.0f : 1.0f;
      {OUT["are_below"]} = below_end ? 1.0f : 0.0f;
      {OUT["are_below_beside"]} = below_end_beside ? 1.0f : 0.0f;
      {OUT["is_below"]} = polynomial.is_beyond(s[i]) ? 0.0f : 1.0f;
      {OUT["by_polynomial"]} = below.relative(s[i], shift, row);
      {OUT["exponent"]} = capped[i];
      // What stands for a forbidden product is never a maximum; its exponent is for the mask to say once more.
      {OUT["beside"]} = row == 1 ? any.logit(kForbidden) : forbidden[i];
      {OUT["forbidden"]} = polynomial.forbids() ? below.relative(kForbidden, shift, row) : -kInfinity;
      {OUT["logit"]} = logits[i];
      {OUT["alone"]} = any.logit(s[i]);
      {OUT["near"]} = row == 1 ? any.share.logit(s[i]) : any.share.logit(kForbidden);
      {OUT["share"]} = as_shares[i];
      {OUT["of_fine_cap"]} = as_fine[i];
      {OUT["of_fine_cap_beside"]} = third[i];
      {OUT["least"]} = any.share.least_sum();
      const float relative_to[2] = {{s[i], s[i]}};
      float lowest[2][{GIVEN}];
      for (i32 j = 0; j < {GIVEN}; ++j) lowest[0][j] = lowest[1][j] = kForbidden;
      {OUT["none_below"]} = are_below(lowest[1], polynomial, true) ? 1.0f : 0.0f;
      replace(shares, lowest[0], relative_to);
      replace(beyond_and_forbidden, lowest[1], relative_to);
      {OUT["lowest"]} = exp2_approx(lowest[0][0]);
      {OUT["lowest_counts"]} = any.share.lowest_counts(relative_to) ? 1.0f : 0.0f;
      {OUT["lowest_beyond"]} = exp2_approx(lowest[1][0]);
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


def computed(name: str, x: Array | None = None) -> Computed:
    """By the emulator; of the products for a cap, if none are given."""
    x = products(name) if x is None else x
    out = np.zeros((x.size, RESULTS), np.float32)
    buffers = [Buffer("x", x.ctypes.data, x.nbytes), Buffer("out", out.ctypes.data, out.nbytes, True)]
    params = struct.pack("QQffi4x", x.ctypes.data, out.ctypes.data, *CAPS[name], x.size)
    EmulatedKernel("caps", SOURCE).launch(1, params, buffers, threads=32)
    return Computed(x, *np.ascontiguousarray(out.T))


def exact(name: str, x: Array) -> Array:
    """Logits in powers of two."""
    amplitude, slope = map(np.float32, CAPS[name])
    return np.asarray(amplitude * np.tanh(slope * x.astype(np.float64)) / np.log(2))


@pytest.mark.parametrize("name", CAPS)
def test_a_capped_logit_is_exact_wherever_its_product_lies(name: str) -> None:
    found = computed(name)
    expected = exact(name, found.x)
    # Of what is beyond the polynomial a part of the cap is rounded.
    relative = {"no powers": 8e-6, "infinite powers": 0.0}.get(name, 1.2e-6)
    rounded = 6e-7 * abs(CAPS[name][0]) if name == "infinite powers" else 1e-28
    allowed = relative * abs(expected) + rounded
    assert np.all(abs(found.logit - expected) <= allowed)
    assert np.all(abs(found.alone - expected) <= allowed)
    # And last the difference.
    assert np.all(
        abs(found.exponent + 0.375 - expected) <= allowed + np.spacing(np.float32(np.maximum(abs(expected), 0.375)))
    )


@pytest.mark.parametrize("name", CAPS)
def test_an_exponent_is_the_same_number_whichever_way_it_is_computed(name: str) -> None:
    found = computed(name)
    is_below = found.is_below == 1
    for all_below in (found.all_below, found.known_below):
        assert np.array_equal(all_below, np.repeat(found.is_below.reshape(-1, GIVEN).min(1), GIVEN))
    assert found.by_polynomial[is_below].tobytes() == found.exponent[is_below].tobytes()
    first_row = np.arange(is_below.size) // 2 % 2 == 0
    assert found.beside[first_row].tobytes() == found.exponent[first_row].tobytes()
    assert np.all(found.beside[~first_row] == -np.inf)
    assert np.all(found.forbidden == -np.inf)


@pytest.mark.parametrize("name", CAPS)
def test_a_product_below_the_lower_end_is_found_beside_what_is_forbidden(name: str) -> None:
    found = computed(name)
    amplitude, slope = CAPS[name]
    is_below = (found.is_below == 0) & ((found.x if amplitude * slope >= 0 else -found.x) < 0)
    of_lanes = is_below.reshape(-1, GIVEN)
    rows = np.arange(GIVEN) // 2 % 2
    for seen, expected in ((found.are_below, of_lanes), (found.are_below_beside, of_lanes[:, rows == 0])):
        assert np.array_equal(seen.reshape(-1, GIVEN)[:, 0] == 1, expected.any(axis=1))
    assert not found.none_below.any()


def test_a_nan_hides_no_product_beyond_the_polynomial() -> None:
    x = np.full((GIVEN, 2, WARP // 2), 0.01, np.float32)
    x[:, 0] = 1e3
    for at, lane in enumerate(x.reshape(-1, GIVEN)):
        lane[at % GIVEN] = [np.nan, -np.nan][at // GIVEN % 2]
    known_below = computed("cap 30", x.ravel()).known_below.reshape(GIVEN, 2, -1)
    assert not np.any(known_below[:, 0])
    are_below = computed("cap 30", -x.ravel()).are_below.reshape(GIVEN, 2, -1)
    assert np.all(are_below[:, 0])


@pytest.mark.parametrize("name", CAPS)
def test_a_share_of_the_cap_is_exact_for_products_of_all_sizes(name: str) -> None:
    found = computed(name)
    expected = exact(name, found.x)
    for share, error in ((found.share, SHARE_ERROR), (found.of_fine_cap, FINE_SHARE_ERROR)):
        assert np.all(abs(share - expected) <= error * abs(CAPS[name][0]) / np.log(2) + 4.5e-7 * abs(expected))


@pytest.mark.parametrize("name", CAPS)
def test_under_a_low_cap_what_is_forbidden_has_no_share_and_others_have_what_they_have_without(name: str) -> None:
    found = computed(name)
    is_forbidden = np.arange(found.x.size) % GIVEN % 3 == 0
    allowed, alone = found.of_fine_cap_beside[~is_forbidden], found.of_fine_cap[~is_forbidden]
    # Four have a division in common, which is rounded with what is forbidden among them.
    assert np.all(abs(allowed - alone) <= FINE_SHARE_ERROR * abs(CAPS[name][0]) / np.log(2) + 4.5e-7 * abs(alone))
    if abs(CAPS[name][0]) >= 0.01:
        # No exponential of it is anything, whatever low caps have rows relative to.
        assert np.all(found.of_fine_cap_beside[is_forbidden] < -1e4)


@pytest.mark.parametrize("name", CAPS)
def test_a_rows_highest_logit_is_near_its_own_and_that_of_a_forbidden_row_is_none(name: str) -> None:
    found = computed(name)
    is_forbidden = np.arange(found.x.size) // 2 % 2 == 0
    assert np.all(found.near[is_forbidden] == -np.inf)
    expected = exact(name, found.x)[~is_forbidden]
    allowed = SHARE_ERROR * abs(CAPS[name][0]) / np.log(2) + 4.5e-7 * abs(expected)
    assert np.all(abs(found.near[~is_forbidden] - expected) <= allowed)


@pytest.mark.parametrize("name", CAPS)
def test_shares_are_taken_where_what_they_are_off_by_is_nothing_beside_the_logarithm_of_a_sum(name: str) -> None:
    cap = np.float64(abs(CAPS[name][0]))
    least = float(computed(name).least[0]) * np.log(2)
    assert SHARE_ERROR * cap <= LSE_TOLERANCE * max(1.0, least)
    spec = fg.AttentionSpec(64, score=fg.softcap(float(cap))) if cap else None
    if spec is not None and has_fine_cap(spec):
        assert FINE_SHARE_ERROR * cap <= LSE_TOLERANCE
        assert least == -np.inf
    # And where it may be what probabilities are rounded to, only what has a product beyond the polynomial.
    assert SHARE_ERROR * cap <= 1e-4 or least > 0.25 * cap


@pytest.mark.parametrize("name", CAPS)
def test_what_is_forbidden_counts_for_nothing_where_it_is_left_as_low_as_the_cap(name: str) -> None:
    found = computed(name)
    counts = found.lowest_counts == 1
    assert not np.any(found.lowest[~counts])
    assert not np.any(found.lowest_beyond)
    # And it is left where it is, if that is certain.
    amplitude, slope = CAPS[name]
    lowest = -abs(amplitude) / np.log(2)
    shift = -found.x if amplitude * slope < 0 else found.x
    relative, near = shift - lowest, 1.0 - 1e-6 * lowest
    assert not np.any(counts[relative > 128 + near])
    assert np.all(counts[relative < 128 - near])


@pytest.mark.parametrize("name", CAPS)
def test_the_polynomial_ends_where_it_should(name: str) -> None:
    found = computed(name)
    argument = abs(np.float32(CAPS[name][1]) * found.x.astype(np.float64))
    assert np.all(found.is_below[argument < BELOW[name] * 0.999999])
    assert not np.any(found.is_below[argument > BELOW[name] * 1.000001])


def test_infinite_products_reach_the_cap_and_a_nan_stays_one() -> None:
    # In either row of a lane, in either place. A NaN may be that of its whole row.
    for order in ((0, 1, 2, 3), (1, 0, 3, 2), (2, 3, 0, 1), (3, 2, 1, 0)):
        given = np.float32([np.inf, -np.inf, 1.0, np.nan])[list(order)]
        found = computed("cap 30", np.resize(given, WARP))
        infinite = np.isinf(given)
        assert not found.is_below[:4][infinite].any()
        for logits in (found.exponent + 0.375, found.share, found.of_fine_cap):
            np.testing.assert_allclose(logits[:4][infinite], np.sign(given[infinite]) * 30 / np.log(2), rtol=1e-6)
            assert np.all(np.isnan(logits[:4][np.isnan(given)]))
