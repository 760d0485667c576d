"""``fp8_attention`` on NumPy arrays, and its error against attention in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import flashgen as fg
from flashgen import oracle
from flashgen.oracle.eight_bits import values_of


def normal(seed: int, *shape: int, dtype: Any = np.float16) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def with_outliers(random: Any, *shape: int) -> Any:
    """The data of FlashAttention-3's paper: N(0, 1), and N(0, 100) besides in one element of a thousand."""
    x = random.standard_normal(shape)
    return (x + 10 * random.standard_normal(shape) * (random.random(shape) < 1e-3)).astype(np.float16)


def exact(q: Any, k: Any, v: Any, **fields: Any) -> tuple[Any, Any]:
    spec = fg.AttentionSpec(q.shape[-1], head_dim_v=v.shape[-1], dtype="fp16", **fields)
    return oracle.forward(spec, q, k, v)


def rms(x: Any) -> float:
    return float(np.sqrt(np.mean(np.square(np.asarray(x, np.float64)))))


@pytest.mark.parametrize("rotate", [False, True])
def test_the_result_is_attention_with_the_rounding_of_eight_bits(rotate: bool) -> None:
    q, k, v = normal(0, 2, 40, 4, 64), normal(1, 2, 90, 2, 64), normal(2, 2, 90, 2, 32)
    out, lse = fg.fp8_attention(q, k, v, mask=fg.causal(), rotate=rotate, return_lse=True)
    want, want_lse = exact(q, k, v, mask=fg.causal())
    assert out.dtype == q.dtype
    assert rms(out - want) < 0.06 * rms(want)
    assert np.abs(lse - want_lse).max() < 0.2


def test_it_is_quantization_and_then_attention_to_the_codes() -> None:
    q, k, v = normal(0, 1, 130, 2, 32), normal(1, 1, 200, 1, 32), normal(2, 1, 200, 1, 32)
    spec = fg.AttentionSpec(32, dtype="e4m3", out_dtype="fp16", scale_block=64, mask=fg.causal(), direction="forward")
    kernel = fg.build(spec, target="emulator")
    codes = kernel.quantize(q, k, v)
    scales = {name: getattr(codes, name) for name in ("q_scale", "k_scale", "v_scale")}
    want, want_lse = kernel(*codes[:3], scale=0.3, **scales)
    out, lse = fg.fp8_attention(q, k, v, mask=fg.causal(), scale=0.3, block=64, return_lse=True)
    np.testing.assert_array_equal(out, want)
    np.testing.assert_array_equal(lse, want_lse)


def test_scores_and_masks_see_the_logits_of_the_tensors() -> None:
    q, k, v = (normal(i, 1, 70, 2, 64) for i in range(3))
    mask, score = fg.window(20, 5) & fg.Mask.of(lambda b, h, q, k: (q + k) % 3 > 0), fg.softcap(5.0)
    out = fg.fp8_attention(3 * q, k, v, mask=mask, score=score)
    want, _ = exact(3 * q, k, v, mask=mask, score=score)
    assert rms(out - want) < 0.06 * rms(want)


def test_packed_sequences_are_those_alone() -> None:
    q, k, v = normal(0, 150, 2, 64), normal(1, 190, 2, 64), normal(2, 190, 2, 64)
    starts_q, starts_k = np.array([0, 70, 150], np.int32), np.array([0, 90, 190], np.int32)
    sequences = fg.Sequences(starts_q, starts_k, 80, 100)
    out = fg.fp8_attention(q, k, v, mask=fg.causal(), sequences=sequences)
    for i in range(2):
        rows, keys = slice(*starts_q[i : i + 2]), slice(*starts_k[i : i + 2])
        alone = fg.fp8_attention(q[None, rows], k[None, keys], v[None, keys], mask=fg.causal())
        np.testing.assert_array_equal(out[rows], alone[0])


def test_heads_may_come_before_lengths() -> None:
    q, k, v = (normal(i, 1, 50, 2, 16) for i in range(3))
    swapped = fg.fp8_attention(*(x.swapaxes(1, 2) for x in (q, k, v)), layout="bhsd")
    np.testing.assert_array_equal(swapped.swapaxes(1, 2), fg.fp8_attention(q, k, v))


def test_a_nan_that_no_row_attends_to_reaches_none() -> None:
    q, k, v = (normal(i, 1, 64, 1, 32) for i in range(3))
    want = fg.fp8_attention(q, k, v, mask=fg.causal())
    k[0, 50:, 0, 3], v[0, 50:, 0, 5] = np.nan, np.inf
    out = fg.fp8_attention(q, k, v, mask=fg.causal())
    # The other values of their block change its scale.
    assert np.isfinite(out[:, :50]).all()
    assert rms(out[:, :50] - want[:, :50]) < 0.06 * rms(want)


def attention_of_codes(q: Any, k: Any, v: Any, rotate: bool, block: int = 128) -> Any:
    """The quantized attention of one head as the kernels' definition has it, in NumPy: P is e4m3, too."""
    held = []
    for x, turns in ((q, rotate), (k, rotate), (v, False)):
        codes, scales = oracle.quantized_rows(x[None, :, None], block, rotate=turns)
        held.append(oracle.dequantized_rows(codes, scales, block)[0, :, 0])
    logits = held[0] @ held[1].T / np.sqrt(q.shape[-1])
    weights = np.exp(logits - logits.max(1, keepdims=True))
    p = values_of("e4m3")[oracle.quantized("e4m3", 256 * weights)] / 256
    return p @ held[2] / weights.sum(1, keepdims=True)


def attention_of(q: Any, k: Any, v: Any) -> Any:
    logits = q.astype(np.float64) @ k.astype(np.float64).T / np.sqrt(q.shape[-1])
    weights = np.exp(logits - logits.max(1, keepdims=True))
    return weights @ v.astype(np.float64) / weights.sum(1, keepdims=True)


def test_rotation_halves_the_error_that_outliers_cause_and_costs_nothing_without_them() -> None:
    random, errors = np.random.default_rng(0), {}
    for outliers in (True, False):
        make = with_outliers if outliers else lambda random, *shape: random.standard_normal(shape).astype(np.float16)
        q, k, v = make(random, 512, 128), make(random, 4096, 128), make(random, 4096, 128)
        want = attention_of(q, k, v)
        for rotate in (True, False):
            errors[outliers, rotate] = rms(attention_of_codes(q, k, v, rotate) - want)
    assert errors[True, True] < 0.65 * errors[True, False]
    assert errors[True, True] < 1.1e-2
    assert errors[False, True] == pytest.approx(errors[False, False], rel=0.05)
    assert errors[False, True] < 1.45e-3


@pytest.mark.parametrize("place", [0.0, 0.37, 1.0])
def test_a_needle_among_many_keys_is_found(place: float) -> None:
    """One key of 16,384 is like the queries, which should then return its value."""
    random, length = np.random.default_rng(7), 16384
    k, v = random.standard_normal((2, length, 128))
    needle = int(place * (length - 1))
    q = 1.6 * k[needle] + 0.1 * random.standard_normal((4, 128))
    k, q, v = (x.astype(np.float16) for x in (k, q, v))
    found, want = attention_of_codes(q, k, v, True), attention_of(q, k, v)
    assert rms(want - v[needle]) < 0.1
    assert rms(found - want) < 0.04 * rms(want)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block": 32}, "block=32 is not supported; use 64 or 128 rows"),
        ({"rotate": None}, "rotate=None is not a bool"),
        ({"layout": "sbhd"}, "layout='sbhd' is unknown"),
        ({"q": np.zeros((4, 1, 64), np.float16)}, "q is a ndarray of shape .4, 1, 64.; pass arrays with 4 dimensions"),
        ({"q": normal(0, 1, 9, 1, 64, dtype=np.float32)}, "q is fp32; convert it: fp8_attention quantizes float16"),
        ({"k": normal(0, 1, 9, 1, 64, dtype=np.float32)}, "k is fp32, but this kernel was built for fp16"),
        ({"scale": 0.0}, "scale=0.0 must be a finite number above 0"),
    ],
)
def test_what_it_cannot_do_is_refused_in_a_sentence(change: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = dict(zip("qkv", (normal(i, 1, 9, 1, 64) for i in range(3)), strict=True))
    with pytest.raises(fg.ArgumentError, match=message):
        fg.fp8_attention(**{**given, **change})


def test_head_dims_that_no_kernel_takes_are_refused() -> None:
    q, k, v = (normal(i, 1, 9, 1, 40) for i in range(3))
    with pytest.raises(fg.SpecError, match="head_dim=40 and dtype='e4m3' need a multiple of 16; pad the heads"):
        fg.fp8_attention(q, k, v)


def test_a_bad_scale_is_refused_before_anything_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[Any] = []
    monkeypatch.setattr(fg.Kernel, "quantize", lambda *given, **_: launches.append(given))
    q, k, v = (normal(i, 1, 9, 1, 64) for i in range(3))
    with pytest.raises(fg.ArgumentError, match=r"scale=0\.0 must be a finite number above 0"):
        fg.fp8_attention(q, k, v, scale=0.0)
    assert not launches
