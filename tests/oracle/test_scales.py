"""Scales of 8-bit queries, keys and values in the oracle, and the computation that kernels are compared with."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from flashgen import oracle
from flashgen.errors import ArgumentError
from flashgen.spec import AttentionSpec, causal

SPEC = AttentionSpec(16, dtype="e4m3", mask=causal(), direction="forward")


def drawn(seed: int = 0, len_q: int = 70, len_kv: int = 150) -> tuple[Any, ...]:
    random = np.random.default_rng(seed)
    shapes = ((2, len_q, 4, 16), (2, len_kv, 2, 16), (2, len_kv, 2, 16))
    return tuple(random.standard_normal(shape).astype(ml_dtypes.float8_e4m3fn) for shape in shapes)


def scales_of(seed: int, *shape: int) -> Any:
    return np.random.default_rng(seed).uniform(0.25, 2.0, shape).astype(np.float32)


@pytest.mark.parametrize("shape", ["number", (), (1,), "heads", "all", "blocks"])
def test_scales_multiply_rows_before_anything_else(shape: Any) -> None:
    spec = AttentionSpec(
        16, dtype="e4m3", mask=causal(), direction="forward", scale_block=64 if shape == "blocks" else None
    )
    wide, arrays, scales = AttentionSpec(16, mask=causal(), direction="forward"), drawn(), {}
    rows = []
    for i, (x, name) in enumerate(zip(arrays, "qkv", strict=True)):
        batch, length, heads, _ = x.shape
        blocks = -(-length // 64)
        kinds = {"heads": (heads,), "all": (batch, heads), "blocks": (batch, heads, blocks)}
        scale = 0.75 if shape == "number" else scales_of(i, *kinds.get(shape, shape))
        scales[f"{name}_scale"] = scale
        of_rows = np.asarray(scale, np.float64)
        if shape == "blocks":
            of_rows = np.repeat(of_rows, 64, axis=2)[:, :, :length].transpose(0, 2, 1)[..., None]
        elif shape in ("heads", "all"):
            of_rows = np.broadcast_to(of_rows, (batch, heads))[:, None, :, None]
        rows.append(x.astype(np.float64) * of_rows)
    found, want = oracle.forward(spec, *arrays, **scales), oracle.forward(wide, *rows)
    for a, b in zip(found, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(
    ("block", "shape"), [(None, (3,)), (None, (2, 4, 1)), (64, (2, 4)), (64, (2, 4, 1)), (128, (2, 4, 2))]
)
def test_other_shapes_are_refused(block: int | None, shape: tuple[int, ...]) -> None:
    spec = AttentionSpec(16, dtype="e4m3", direction="forward", scale_block=block)
    with pytest.raises(ArgumentError, match="q_scale has shape"):
        oracle.forward(spec, *drawn(), q_scale=np.ones(shape, np.float32))


def test_scales_of_other_dtypes_are_refused() -> None:
    x = np.zeros((1, 2, 1, 16), np.float16)
    with pytest.raises(ArgumentError, match="k_scale is for dtype='e4m3', and dtype='fp16'; leave it out"):
        oracle.forward(AttentionSpec(16, dtype="fp16", direction="forward"), x, x, x, k_scale=2.0)


def test_the_rounded_computation_rounds_p_relative_to_the_largest_of_its_row() -> None:
    q, k, v = drawn()
    o, lse = oracle.rounded_forward(SPEC, q, k, v, v_scale=0.5)
    logits = q[0, :, 1].astype(np.float32) @ k[0, :, 0].astype(np.float32).T / 4
    allowed = np.arange(150)[None, :] <= np.arange(70)[:, None] + 80
    logits = np.where(allowed, logits, -np.inf)
    weights = np.exp(logits - logits.max(1, keepdims=True))
    p = (256 * weights).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    want = p @ v[0, :, 0].astype(np.float32) * 0.5 / (256 * weights.sum(1, keepdims=True))
    assert o.dtype == ml_dtypes.bfloat16
    np.testing.assert_allclose(o[0, :, 1].astype(np.float32), want, rtol=2**-8, atol=1e-3)
    np.testing.assert_allclose(lse[0, 1], logits.max(1) + np.log(weights.sum(1)), rtol=1e-5)


def test_bounds_are_a_few_roundings_of_p() -> None:
    q, k, v = drawn()
    exact = oracle.forward(SPEC, q, k, v)
    limits = oracle.bounds(SPEC, q, k, v, exact=exact)
    rounded, _ = oracle.rounded_forward(SPEC, q, k, v)
    error = float(np.abs(rounded.astype(np.float64) - exact[0]).max())
    assert 2 * error <= limits.o <= 8 * error
    # Keys of another head are far outside.
    other, _ = oracle.forward(SPEC, q, k[:, :, ::-1], v)
    assert not oracle.check(other, exact[0], limits.o).ok
