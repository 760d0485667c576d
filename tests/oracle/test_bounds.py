from __future__ import annotations

import numpy as np
import pytest

from flashgen import oracle
from flashgen.oracle.rounded import dot
from flashgen.spec import AttentionSpec, causal, full, window

NAMES = ("o", "lse", "dq", "dk", "dv")
EPSILON = {"fp16": 2.0**-11, "bf16": 2.0**-8, "fp32": 2.0**-24}


def problem(spec, len_q, len_kv, heads=1, seed=0):
    random = np.random.default_rng(seed)
    lengths = (
        (len_q, spec.head_dim),
        (len_kv, spec.head_dim),
        (len_kv, spec.head_dim_v),
        (len_q, spec.head_dim_v),
    )
    return [random.standard_normal((1, n, heads, d)).astype(spec.element.numpy()) for n, d in lengths]


def exact_results(spec, q, k, v, do):
    return (*oracle.forward(spec, q, k, v), *oracle.backward(spec, q, k, v, do))


STEPS = {"fp16": 2, "bf16": 2, "fp32": 6}


def errors_of_one_run(spec, arrays, exact):
    rounded = (*oracle.rounded_forward(spec, *arrays[:3]), *oracle.rounded_backward(spec, *arrays))
    finite = [np.isfinite(reference) for reference in exact]
    return [
        np.abs(run[where].astype(np.float64) - reference[where]).max()
        for run, reference, where in zip(rounded, exact, finite, strict=True)
    ]


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize(("mask", "len_q", "len_kv"), [(full(), 80, 90), (causal(), 90, 80), (window(20, 9), 2, 30)])
def test_the_bound_is_twice_the_error_of_one_run_and_a_few_steps(dtype, mask, len_q, len_kv):
    spec = AttentionSpec(48, head_dim_v=24, dtype=dtype, mask=mask)
    arrays = problem(spec, len_q, len_kv, heads=2)
    exact = exact_results(spec, *arrays)
    limits = oracle.bounds(spec, *arrays, exact=exact)
    step = STEPS[dtype] * EPSILON[dtype]
    reach = dict(zip(("dq", "dk"), reach_of_rounding_o(spec, *arrays), strict=True))
    for name, error, reference in zip(NAMES, errors_of_one_run(spec, arrays, exact), exact, strict=True):
        if name != "lse":
            size = max(np.abs(reference).max(), reach.get(name, 0))
            assert getattr(limits, name) == pytest.approx(2 * error + step * size, rel=1e-12), name


def reach_of_rounding_o(spec, q, k, v, do):
    """One head of k/v for each of q: the change of dQ and dK when D moves by the root of its squared terms."""
    q, k, v, do = (x[0].astype(np.float64).transpose(1, 0, 2) for x in (q, k, v, do))
    s = q @ k.mT * spec.default_scale
    s = np.where(oracle.allowed_pairs(spec.mask, *s.shape[1:]), s, -np.inf)
    e = np.exp(s)
    p = e / np.maximum(e.sum(axis=2, keepdims=True), 1e-300)
    ds = p * np.linalg.norm(do * (p @ v), axis=2, keepdims=True) * spec.default_scale
    return np.abs(ds @ k).max(), np.abs(ds.mT @ q).max()


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_the_bound_of_an_ordinary_problem_is_a_few_errors_of_one_run(dtype):
    spec = AttentionSpec(64, dtype=dtype, mask=causal())
    arrays = problem(spec, 300, 300, heads=2)
    exact = exact_results(spec, *arrays)
    limits = oracle.bounds(spec, *arrays, exact=exact)
    for name, error in zip(NAMES, errors_of_one_run(spec, arrays, exact), strict=True):
        assert name == "lse" or 2 * error < getattr(limits, name) < 5.5 * error, name


def test_the_bound_does_not_hang_on_chance():
    spec = AttentionSpec(32, dtype="bf16", mask=causal())
    arrays = problem(spec, 20, 20)
    one, two = oracle.bounds(spec, *arrays), oracle.bounds(spec, *arrays)
    assert (one.o, one.dq, one.dk, one.dv) == (two.o, two.dq, two.dk, two.dv)


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_gradients_that_vanish_have_a_bound_above_the_noise_and_far_below_their_terms(dtype):
    spec = AttentionSpec(64, dtype=dtype)
    arrays = problem(spec, 3, 1)  # one key: P = 1, so dS = dP - D = 0
    exact = exact_results(spec, *arrays)
    assert np.abs(exact[2]).max() < 1e-13
    limits = oracle.bounds(spec, *arrays, exact=exact)
    for limit in (limits.dq, limits.dk):
        assert EPSILON[dtype] / 8 < limit < 100 * EPSILON[dtype]


@pytest.mark.parametrize("corrupted", ["k", "v"])
def test_a_key_that_is_not_a_number_leaves_the_bound_of_queries_that_do_not_attend_to_it(corrupted):
    # Rows with one key to speak of, so that dQ vanishes and what rounding O does to it is the bound.
    spec = AttentionSpec(16, mask=causal(), dtype="bf16")
    q, k, v, do = problem(spec, 33, 40)
    changed = {"k": k, "v": v}[corrupted]
    q[:], k[:], changed[:, -1] = 6 * q, 6 * k, np.nan
    # As only the last query attends to the last key, the others have a problem without both.
    rest = oracle.bounds(spec, *(x[:, :-1] for x in (q, k, v, do)))
    assert oracle.bounds(spec, q, k, v, do).dq == pytest.approx(rest.dq, rel=1e-9)


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_bounds_shrink_with_the_dtype_and_are_never_zero_where_there_is_work(dtype):
    spec = AttentionSpec(8, dtype=dtype)
    limits = oracle.bounds(spec, *problem(spec, 1, 1))
    assert limits.dv is not None
    assert EPSILON[dtype] / 8 < limits.o < 16 * EPSILON[dtype]
    assert EPSILON[dtype] / 8 < limits.dv < 32 * EPSILON[dtype]
    assert np.all(limits.lse >= 1e-5)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_scores_beyond_the_dtype_leave_a_bound(dtype):
    spec = AttentionSpec(2, dtype=dtype)
    q = np.full((1, 4, 1, 2), 1000.0)
    k = np.full((1, 6, 1, 2), 700.0)
    k[0, :, 0, 1] -= np.arange(6) % 2 * 2.0**-9  # logits of 1e6, which fp16 has not, all but equal
    v, do = (np.random.default_rng(0).standard_normal(shape) for shape in ((1, 6, 1, 2), (1, 4, 1, 2)))
    limits = oracle.bounds(spec, *(x.astype(spec.element.numpy()) for x in (q, k, v, do)))
    assert limits.o < 8 * EPSILON[dtype]
    assert limits.dv < 0.5  # LSE in float32 alone moves P by 3 %


def test_products_are_chains_of_fused_multiply_adds():
    left = np.array([[1.0, 2.0**-24, 1.0 + 2.0**-12]], np.float32)
    right = np.array([[1.0], [1.0], [1.0 + 2.0**-12]], np.float32)
    after_two = np.float32(1.0)  # 1 + 2**-24 is rounded to even
    assert dot(left[:, :2], right[:2]) == after_two
    assert dot(left, right) == np.float32(1.0 + (1.0 + 2.0**-12) ** 2)
    assert dot(left, right, np.full((1, 1), -1, np.float32)) == np.float32(2.0**-24 + (1.0 + 2.0**-12) ** 2)


def test_a_chain_is_the_same_whatever_the_shape_and_leaves_its_arguments_and_numpy_as_they_were() -> None:
    random, buffer = np.random.default_rng(0), np.getbufsize()
    left, right, start = (random.standard_normal(n).astype(np.float32) for n in ((70, 90), (90, 33), (70, 33)))
    given = start.copy()
    found = dot(left.T.copy().T, right, start)
    for i, j in ((0, 0), (3, 32), (69, 17)):
        total = start[i, j]
        for a, b in zip(left[i], right[:, j], strict=True):
            total = np.float32(np.float64(total) + np.float64(a) * np.float64(b))
        assert found[i, j] == total
    assert found.dtype == np.float32
    assert start.tobytes() == given.tobytes()
    assert np.getbufsize() == buffer


def test_bounds_without_do_have_no_gradients_and_are_the_same_with_the_oracle_given():
    spec = AttentionSpec(8, mask=window(3, 3))
    q, k, v, do = problem(spec, 9, 12)
    limits = oracle.bounds(spec, q, k, v)
    assert (limits.dq, limits.dk, limits.dv) == (None, None, None)
    both = oracle.bounds(spec, q, k, v, do)
    given = oracle.bounds(spec, q, k, v, do, exact=exact_results(spec, q, k, v, do))
    assert (both.o, both.dq, both.dk, both.dv) == (given.o, given.dq, given.dk, given.dv)
    assert both.o == limits.o


def test_a_lost_key_among_many_is_out_of_bounds():
    spec = AttentionSpec(64, dtype="bf16")
    q, k, v, _ = problem(spec, 64, 512)
    o, lse = oracle.forward(spec, q, k, v)
    limits = oracle.bounds(spec, q, k, v)
    lossy_o, lossy_lse = oracle.forward(spec, q, k[:, :-1], v[:, :-1])
    assert not oracle.check(lossy_o, o, limits.o).ok
    assert not oracle.check(lossy_lse, lse, limits.lse).ok


def test_lse_is_held_to_its_relative_tolerance():
    spec = AttentionSpec(1, dtype="fp32")
    q, k, v = (np.full((1, 1, 1, 1), x) for x in (1000.0, 2.0, 1.0))
    limits = oracle.bounds(spec, q, k, v)
    exact = oracle.forward(spec, q, k, v)[1]
    assert exact.item() == 2000.0
    assert oracle.check(exact + 0.019, exact, limits.lse).ok
    assert not oracle.check(exact + 0.021, exact, limits.lse).ok


def test_large_logits_that_float32_holds_exactly_earn_no_leniency():
    spec = AttentionSpec(4, dtype="fp32")
    q = np.tile([2.0**10, 1, 0, 0], (40, 1)).reshape(1, 40, 1, 4)
    k = np.array([[2.0**10, n % 5, 0, 0] for n in range(50)]).reshape(1, 50, 1, 4)
    v = np.random.default_rng(0).standard_normal((1, 50, 1, 4))
    assert oracle.bounds(spec, q, k, v, scale=1.0).o < 1e-5


@pytest.mark.parametrize(
    ("result", "exact", "ok"),
    [
        (1.0, 1.0, True),
        (1.5, 1.0, True),
        (1.51, 1.0, False),
        (np.nan, 1.0, False),
        (np.inf, 1.0, False),
        (1.0, np.nan, False),
        (np.nan, np.nan, True),
        (np.inf, np.nan, True),
        (-np.inf, -np.inf, True),
        (1.0, -np.inf, False),
    ],
)
def test_check_holds_values_to_the_bound_and_to_the_pattern(result, exact, ok):
    verdict = oracle.check(np.array([0.0, result]), np.array([0.0, exact]), 0.5)
    assert verdict.ok is ok
    assert (verdict.ratio <= 1) is ok
    assert ok or verdict.max_error > verdict.bound


def test_minus_infinity_is_exact_where_asked():
    exact = np.array([-np.inf, 0.0])
    assert oracle.check(exact, exact, 1.0, exact_infinity=True).ok
    for wrong in (np.inf, np.nan, -1e38):
        assert not oracle.check(np.array([wrong, 0.0]), exact, 1.0, exact_infinity=True).ok
    assert not oracle.check(np.array([-np.inf]), np.array([np.nan]), 1.0, exact_infinity=True).ok


def test_a_bound_that_is_not_a_number_is_not_met():
    assert not oracle.check(np.array([1.0]), np.array([1.0]), float("nan")).ok


def test_the_worst_element_is_the_one_nearest_to_its_own_bound():
    verdict = oracle.check(np.array([0.5, 0.2]), np.zeros(2), np.array([1.0, 0.25]))
    assert (verdict.worst, verdict.ratio, verdict.ok) == ((0.2, 0.25), 0.8, True)


def test_the_largest_error_stands_beside_the_bound_of_its_own_element():
    verdict = oracle.check(np.array([0.5, 0.2]), np.zeros(2), np.array([1.0, 0.25]))
    assert (verdict.max_error, verdict.bound) == (0.5, 1.0)
    verdict = oracle.check(np.array([0.5, 0.2]), np.zeros(2), np.array([0.5, 0.25]))
    assert (verdict.max_error, verdict.bound, verdict.worst, verdict.ratio) == (0.5, 0.5, None, 1.0)


def test_nothing_to_compare_passes():
    assert oracle.check(np.zeros((1, 0)), np.zeros((1, 0)), 0.0) == oracle.Check(0.0, 0.0, True)


@pytest.mark.parametrize("mask", [full(), causal(), window(2, 2)], ids=lambda m: m.describe())
def test_the_rounded_computation_contains_nan_as_the_oracle_does(mask):
    spec = AttentionSpec(8, dtype="fp16", mask=mask)
    q, k, v, do = problem(spec, 12, 12)
    k[0, 7, 0, 3], v[0, 7, 0, 1] = np.nan, np.inf
    exact = oracle.forward(spec, q, k, v)
    rounded = oracle.rounded_forward(spec, q, k, v)
    assert np.array_equal(np.isfinite(exact[0]), np.isfinite(rounded[0].astype(np.float64)))
    assert np.array_equal(np.isfinite(exact[1]), np.isfinite(rounded[1]))
    limits = oracle.bounds(spec, q, k, v, do)
    assert all(np.isfinite(x) for x in (limits.o, limits.dq, limits.dk, limits.dv))


def test_the_rounded_computation_takes_any_scale_and_empty_rows():
    spec = AttentionSpec(8, dtype="bf16", mask=causal())
    q, k, v, do = problem(spec, 9, 4)
    for scale in (-0.5, 0.0, 3.0):
        o, lse = oracle.rounded_forward(spec, q, k, v, scale=scale)
        assert o.dtype == spec.element.numpy()
        assert lse.dtype == np.float32
        assert np.all(o[:, :5].astype(np.float32) == 0)
        assert np.all(lse[..., :5] == -np.inf)
        exact = oracle.forward(spec, q, k, v, scale=scale)
        np.testing.assert_allclose(o.astype(np.float64), exact[0], atol=0.03)
        gradients = oracle.rounded_backward(spec, q, k, v, do, scale=scale)
        for actual, expected in zip(gradients, oracle.backward(spec, q, k, v, do, scale=scale), strict=True):
            np.testing.assert_allclose(actual.astype(np.float64), expected, atol=0.1)


@pytest.mark.parametrize(
    ("result", "exact", "ok"),
    [
        # Beyond what fp16 can hold, or so near to its end that the bound reaches beyond.
        (np.inf, 77500.0, True),
        (-np.inf, -66224.0, True),
        (np.inf, 65000.0, True),
        (np.inf, 60000.0, False),
        (-np.inf, 77500.0, False),
        (np.nan, 77500.0, False),
    ],
)
def test_what_overflows_its_dtype_may_be_infinite(result: float, exact: float, ok: bool) -> None:
    results = np.array([0.0, result], np.float16)
    assert oracle.check(results, np.array([0.0, exact]), 1000.0).ok == ok
    assert not oracle.check(results.astype(np.float32), np.array([0.0, exact]), 1000.0).ok
