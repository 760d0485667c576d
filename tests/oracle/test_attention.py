from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashgen.errors import ArgumentError
from flashgen.oracle import allowed_pairs, backward, forward
from flashgen.spec import AttentionSpec, causal, full, window

MASKS = [full(), causal(), causal(align="top-left"), window(2, 1), causal() & window(3, 2, align="top-left")]


def draw(spec, *, batch=1, len_q=5, len_kv=7, heads=2, heads_kv=1, seed=0, dtype=np.float64):
    random = np.random.default_rng(seed)
    shapes = (
        (batch, len_q, heads, spec.head_dim),
        (batch, len_kv, heads_kv, spec.head_dim),
        (batch, len_kv, heads_kv, spec.head_dim_v),
        (batch, len_q, heads, spec.head_dim_v),
    )
    return [random.standard_normal(shape).astype(dtype) for shape in shapes]


def attention_by_loops(mask, q, k, v, scale):
    """The textbook, one number at a time, with its own idea of masks."""
    (batch, len_q, heads, dim), (_, len_kv, heads_kv, dim_v) = q.shape, v.shape
    o, lse = np.zeros((batch, len_q, heads, dim_v)), np.full((batch, heads, len_q), -math.inf)
    for b in range(batch):
        for h in range(heads):
            h_kv = h // (heads // heads_kv)
            for i in range(len_q):
                terms = []
                for j in range(len_kv):
                    shifted = i + len_kv - len_q
                    far_left = [(mask.bottom_right.left, shifted - j), (mask.top_left.left, i - j)]
                    far_right = [(mask.bottom_right.right, j - shifted), (mask.top_left.right, j - i)]
                    if all(limit is None or by <= limit for limit, by in far_left + far_right):
                        logit = scale * math.fsum(q[b, i, h, d] * k[b, j, h_kv, d] for d in range(dim))
                        terms.append((j, logit))
                if terms:
                    peak = max(logit for _, logit in terms)
                    total = math.fsum(math.exp(logit - peak) for _, logit in terms)
                    lse[b, h, i] = peak + math.log(total)
                    for e in range(dim_v):
                        numerator = math.fsum(math.exp(x - peak) * v[b, j, h_kv, e] for j, x in terms)
                        o[b, i, h, e] = numerator / total
    return o, lse


@pytest.mark.parametrize("mask", MASKS, ids=lambda m: m.describe())
@pytest.mark.parametrize(("len_q", "len_kv"), [(1, 1), (5, 7), (7, 4), (0, 3), (3, 0)])
def test_forward_is_the_textbook(mask, len_q, len_kv):
    spec = AttentionSpec(3, head_dim_v=2, mask=mask)
    q, k, v, _ = draw(spec, batch=2, len_q=len_q, len_kv=len_kv, heads=4, heads_kv=2)
    for scale in (None, 0.7, -1.3, 0.0):
        o, lse = forward(spec, q, k, v, scale=scale)
        factor = spec.default_scale if scale is None else scale
        expected_o, expected_lse = attention_by_loops(mask, q, k, v, factor)
        np.testing.assert_allclose(o, expected_o, rtol=1e-12, atol=1e-13)
        np.testing.assert_allclose(lse, expected_lse, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("mask", MASKS, ids=lambda m: m.describe())
@pytest.mark.parametrize(("len_q", "len_kv"), [(4, 6), (6, 3)])
@pytest.mark.parametrize("of_lse", [False, True])
def test_backward_is_the_derivative_of_forward(mask, len_q, len_kv, of_lse):
    spec = AttentionSpec(2, head_dim_v=3, mask=mask)
    q, k, v, do = draw(spec, len_q=len_q, len_kv=len_kv, heads=4, heads_kv=2)
    dlse = np.random.default_rng(1).standard_normal((1, 4, len_q)) if of_lse else None
    gradients = backward(spec, q, k, v, do, scale=0.9, dlse=dlse)
    step = 1e-5

    def loss():
        o, lse = forward(spec, q, k, v, scale=0.9)
        return (o * do).sum() + (0.0 if dlse is None else (dlse * lse)[lse > -np.inf].sum())

    for x, gradient in zip((q, k, v), gradients, strict=True):
        for index in np.ndindex(x.shape):
            losses = []
            middle = x[index]
            for moved in (middle - step, middle + step):
                x[index] = moved
                losses.append(loss())
            x[index] = middle
            assert gradient[index] == pytest.approx((losses[1] - losses[0]) / (2 * step), rel=1e-6, abs=1e-8)


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_inputs_of_any_float_type_are_widened_without_loss(dtype):
    spec = AttentionSpec(8, dtype=dtype)
    narrow = draw(spec, dtype=spec.element.numpy())
    wide = [x.astype(np.float64) for x in narrow]
    for a, b in zip(forward(spec, *narrow[:3]), forward(spec, *wide[:3]), strict=True):
        assert a.dtype == np.float64
        assert np.array_equal(a, b)
    for a, b in zip(backward(spec, *narrow), backward(spec, *wide), strict=True):
        assert np.array_equal(a, b)


def test_rows_without_keys_are_zero_and_minus_infinity():
    spec = AttentionSpec(4, mask=causal())
    q, k, v, do = draw(spec, len_q=6, len_kv=2)
    do[:, :4] = np.nan  # what the caller holds for rows that do not exist
    o, lse = forward(spec, q, k, v)
    dq, dk, dv = backward(spec, q, k, v, do)
    assert np.all(o[:, :4] == 0)
    assert np.all(lse[..., :4] == -np.inf)
    assert np.all(np.isfinite(lse[..., 4:]))
    assert np.all(dq[:, :4] == 0)
    assert all(np.isfinite(x).all() for x in (dq, dk, dv))


def test_no_keys_and_no_queries():
    spec = AttentionSpec(4, head_dim_v=3)
    q, k, v, do = draw(spec, len_kv=0)
    o, lse = forward(spec, q, k, v)
    assert np.all(o == 0)
    assert np.all(lse == -np.inf)
    dq, dk, dv = backward(spec, q, k, v, do)
    assert np.all(dq == 0)
    assert (dk.shape, dv.shape) == ((1, 0, 1, 4), (1, 0, 1, 3))
    q, k, v, do = draw(spec, len_q=0)
    assert forward(spec, q, k, v)[0].shape == (1, 0, 2, 3)
    assert all(np.all(x == 0) for x in backward(spec, q, k, v, do))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["k", "v", "q", "do"])
def test_what_is_not_finite_reaches_only_those_who_may_attend(bad, where):
    spec = AttentionSpec(4, mask=window(2, 1))
    arrays = dict(zip(("q", "k", "v", "do"), draw(spec, len_q=9, len_kv=9, heads=2, heads_kv=2), strict=True))
    clean = (*forward(spec, *list(arrays.values())[:3]), *backward(spec, *arrays.values()))
    with_bad_values = arrays[where]
    with_bad_values[0, 4, 0] = bad
    results = (*forward(spec, *list(arrays.values())[:3]), *backward(spec, *arrays.values()))
    allowed = allowed_pairs(spec.mask, 9, 9)
    queries = allowed[:, 4] if where in ("k", "v") else np.arange(9) == 4
    keys = allowed[queries].any(axis=0)
    for name, result, expected in zip(("o", "lse", "dq", "dk", "dv"), results, clean, strict=True):
        result, expected = (x.transpose(0, 2, 1) if name == "lse" else x for x in (result, expected))
        out_of_reach = ~(keys if name in ("dk", "dv") else queries)
        assert np.array_equal(result[:, :, 1], expected[:, :, 1]), "the other head"
        np.testing.assert_allclose(result[0, out_of_reach, 0], expected[0, out_of_reach, 0], rtol=1e-13)


def test_nan_in_a_key_makes_the_rows_that_attend_to_it_nan():
    spec = AttentionSpec(4, mask=causal())
    q, k, v, _ = draw(spec, len_q=5, len_kv=5, heads=1)
    k[0, 3] = np.nan
    o, lse = forward(spec, q, k, v)
    assert np.array_equal(np.isnan(lse[0, 0]), [False, False, False, True, True])
    assert np.isnan(o[0, 3:]).all()


@settings(max_examples=30, deadline=None)
@given(st.sampled_from([-1e6, 1e6]), st.lists(st.integers(-8, 8), min_size=1, max_size=6))
def test_logits_of_a_million_lose_nothing(base, offsets):
    spec = AttentionSpec(2)
    q = np.array([1.0, 1.0]).reshape(1, 1, 1, 2)
    k = np.array([[base, offset] for offset in offsets]).reshape(1, -1, 1, 2)
    v = np.arange(2.0 * len(offsets)).reshape(1, -1, 1, 2)
    o, lse = forward(spec, q, k, v, scale=1.0)
    small_k = k * [0.0, 1.0]
    small_o, small_lse = forward(spec, q, small_k, v, scale=1.0)
    np.testing.assert_array_equal(o, small_o)
    assert lse.item() == pytest.approx(base + small_lse.item(), rel=1e-15)


def test_a_shared_head_gathers_the_gradients_of_its_group():
    spec = AttentionSpec(4, mask=causal())
    q, k, v, do = draw(spec, len_q=6, len_kv=6, heads=6, heads_kv=2)
    dq, dk, dv = backward(spec, q, k, v, do)
    repeated = backward(spec, q, np.repeat(k, 3, axis=2), np.repeat(v, 3, axis=2), do)
    np.testing.assert_allclose(dq, repeated[0], rtol=1e-13)
    for grouped, single in ((dk, repeated[1]), (dv, repeated[2])):
        np.testing.assert_allclose(grouped, single.reshape(1, 6, 2, 3, 4).sum(axis=3), rtol=1e-12)


def test_every_wrong_argument_is_named():
    spec = AttentionSpec(4, head_dim_v=2)
    q, k, v, do = draw(spec, heads=3, heads_kv=2)
    with pytest.raises(ArgumentError) as caught:
        forward(spec, q, k[..., :3], v[:, :5], scale=float("nan"))
    assert "scale=nan" in str(caught.value)
    with pytest.raises(ArgumentError) as caught:
        backward(spec, q, k[..., :3], v[:, :5, :1], do[:, :2])
    message = str(caught.value)
    for part in ("head_dim=4", "7 keys and v has 5", "2 heads and v has 1", "q has 3 heads", "do has shape"):
        assert part in message
    with pytest.raises(ArgumentError, match="four dimensions"):
        forward(spec, q[0], k, v)
    with pytest.raises(ArgumentError, match="real numbers"):
        forward(spec, q.astype(complex), k, v)
    with pytest.raises(ArgumentError, match="batch 2, q has 1"):
        forward(AttentionSpec(4, head_dim_v=2), q[:, :, :2], np.repeat(k, 2, axis=0), np.repeat(v, 2, axis=0))


def test_with_qv_values_are_part_of_the_keys():
    random = np.random.default_rng(3)
    spec = AttentionSpec(16, head_dim_v=64, mask=causal(), direction="forward", cache="paged", qv=True)
    q, qv = random.standard_normal((1, 3, 4, 16)), random.standard_normal((1, 3, 4, 64))
    k, v = random.standard_normal((1, 7, 2, 16)), random.standard_normal((1, 7, 2, 64))
    o, lse = forward(spec, q, k, v, qv=qv)
    for h in range(4):
        scores = (q[0, :, h] @ k[0, :, h // 2].T + qv[0, :, h] @ v[0, :, h // 2].T) / np.sqrt(16 + 64)
        weights = np.exp(np.where(np.arange(7) <= np.arange(3)[:, None] + 4, scores, -np.inf))
        np.testing.assert_allclose(o[0, :, h], weights @ v[0, :, h // 2] / weights.sum(1)[:, None])
        np.testing.assert_allclose(lse[0, h], np.log(weights.sum(1)))


def test_qv_goes_with_specs_that_have_it_and_has_their_shape():
    spec = AttentionSpec(16, head_dim_v=64, direction="forward", cache="paged", qv=True)
    q, k, v = np.zeros((1, 3, 4, 16)), np.zeros((1, 7, 2, 16)), np.zeros((1, 7, 2, 64))
    with pytest.raises(ArgumentError, match="qv=None and a spec with qv=True do not go together; pass qv where it is"):
        forward(spec, q, k, v)
    with pytest.raises(ArgumentError, match=r"qv has shape \(1, 3, 4, 16\); with this q it must be \(1, 3, 4, 64\)"):
        forward(spec, q, k, v, qv=q)
    with pytest.raises(ArgumentError, match="do not go together"):
        forward(AttentionSpec(16), q, k, k, qv=q)
