"""Masks given as arrays of bools."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import flashgen as fg


@pytest.mark.parametrize("shape", [(5, 6), (6,), (1, 6), (2, 1, 6), (3, 1, 1, 6), (3, 2, 5, 6)])
def test_an_array_of_bools_is_the_mask_that_it_broadcasts_to(shape: tuple[int, ...]) -> None:
    array = np.random.default_rng(0).random(shape) > 0.4
    mask, spec = fg.Mask.of(array), fg.AttentionSpec(16, mask=array)
    assert spec.mask == mask
    assert spec.tensors["mask"] is array
    b, h, q, k = np.ogrid[:3, :2, :5, :6]
    allowed = fg.expr.evaluate(mask.traced.root, {"b": b, "h": h, "q": q, "k": k, "mask": array})
    assert np.array_equal(np.broadcast_to(allowed, (3, 2, 5, 6)), np.broadcast_to(array, (3, 2, 5, 6)))


def test_an_array_combines_with_other_masks() -> None:
    array = np.ones((5, 6), bool)
    assert (fg.causal() & fg.Mask.of(array)).describe() == "causal & (mask[q, k])"


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (np.zeros((2, 3)), r"mask is a tensor of float64 and shape \(2, 3\); .* score=flashgen\.bias\(m\)"),
        (np.zeros((1,) * 5, bool), "leading dimensions may be missing"),
        (np.array(True), r"shape \(\)"),
    ],
)
def test_other_arrays_are_refused_with_a_remedy(array: Any, words: str) -> None:
    for make in (fg.Mask.of, lambda mask: fg.AttentionSpec(16, mask=mask)):
        with pytest.raises(fg.SpecError, match=f"(?s){words}"):
            make(array)


def test_a_kernel_takes_an_array_of_bools() -> None:
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal((1, 9, 2, 16)).astype(np.float16) for _ in range(3))
    array = rng.random((9, 9)) > 0.4
    out, _ = fg.build(fg.AttentionSpec(16, dtype="fp16", mask=array, direction="forward"), target="emulator")(q, k, v)
    scores = np.einsum("bqhd,bkhd->bhqk", q.astype(float), k.astype(float)) / 4
    weights = np.where(array, np.exp(scores), 0)
    weights /= np.maximum(weights.sum(-1, keepdims=True), 1e-300)
    assert np.allclose(out, np.einsum("bhqk,bkhd->bqhd", weights, v.astype(float)), atol=5e-3)
