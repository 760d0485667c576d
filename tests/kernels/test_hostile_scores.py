"""Scores of minus infinity, and finite ones far beyond the logits that are exact, on the emulator.

A row of nothing but minus infinity attends to nothing. A finite score counts, however low it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

import flashgen as fg
from flashgen import oracle
from flashgen.spec import score
from tests.drawn import some

pytestmark = pytest.mark.in_turns(12)

Array = np.ndarray[Any, Any]
BATCH, HEADS, LEN_Q, LEN_KV = 1, 2, 70, 270
LOWEST = float(np.finfo(np.float32).min)
#: In float32, the product with log2 e has a rounding error of many powers of two. For the last two it overflows.
HUGE = (1e9, 1e10, 1.7e10, 1e30, -LOWEST / 2, 0.9 * -LOWEST, -LOWEST)
RUNNING_MAX = fg.Schedule(softmax="running-max")
BY_KEYS = fg.Schedule(warps=fg.WarpPartition("split_k", 4))
#: Both kernels that sum dQ, and Hopper's for narrow heads and for wide ones.
KERNELS = [("sm_80", 64, False), ("sm_80", 128, True), ("sm_90a", 64, False), ("sm_90a", 128, True)]
each_kernel = pytest.mark.parametrize(
    ("arch", "dim", "deterministic"),
    some([*KERNELS, ("sm_90a", 256, False)], ("sm_80", 128, True), ("sm_90a", 64, False)),
)
#: One row for each implementation of the softmax: architecture, head_dim, element type and schedule.
each_softmax = pytest.mark.parametrize(
    ("arch", "dim", "dtype", "schedule"),
    [
        ("sm_80", 64, "bf16", None),
        ("sm_80", 128, "fp16", None),
        ("sm_80", 64, "bf16", BY_KEYS),
        ("sm_90a", 64, "bf16", None),
        ("sm_90a", 128, "fp16", None),
        ("sm_90a", 128, "bf16", RUNNING_MAX),
    ],
)


@dataclass(frozen=True)
class Call:
    """A spec, the values that its score captures, and a kernel for it."""

    spec: fg.AttentionSpec
    arch: str = "sm_80"
    schedule: fg.Schedule | None = None
    captured: Mapping[str, Array] = field(default_factory=dict)

    def inputs(self) -> tuple[Array, Array, Array, Array]:
        random, dtype, dim = np.random.default_rng(1), self.spec.element.numpy(), self.spec.head_dim
        shapes = ((LEN_Q, HEADS), (LEN_KV, 1), (LEN_KV, 1), (LEN_Q, HEADS))
        q, k, v, do = (random.standard_normal((BATCH, *shape, dim)).astype(dtype) for shape in shapes)
        return q, k, v, do

    def kernel(self) -> fg.Kernel:
        kernel = fg.build(self.spec, self.schedule, arch=self.arch, target="emulator")
        algorithm = kernel.plan.kernel("forward").algorithm
        assert (algorithm == "FlashAttention-3") == (self.arch == "sm_90a"), algorithm
        return kernel

    def check_forward(self) -> tuple[Array, Array]:
        """O and the LSE, within the oracle's bounds."""
        q, k, v, _ = self.inputs()
        found = self.kernel()(q, k, v)
        exact = oracle.forward(self.spec, q, k, v)
        limits = oracle.bounds(self.spec, q, k, v, exact=exact)
        for name, result, reference in zip(("o", "lse"), found, exact, strict=True):
            verdict = oracle.check(result, reference, getattr(limits, name), exact_infinity=name == "lse")
            assert verdict.ok, (name, verdict)
        return found

    def check(self) -> dict[str, Array]:
        """Everything, gradients of captured tensors too, within the oracle's bounds."""
        q, k, v, do = self.inputs()
        kernel = self.kernel()
        o, lse = kernel(q, k, v)
        *gradients, captured = kernel.backward(do, q, k, v, o, lse, captured_gradients=True)
        found = dict(zip(("o", "lse", "dq", "dk", "dv"), (o, lse, *gradients), strict=True))
        exact = (*oracle.forward(self.spec, q, k, v), *oracle.backward(self.spec, q, k, v, do))
        limits = oracle.bounds(self.spec, q, k, v, do, exact=exact)
        for (name, result), reference in zip(found.items(), exact, strict=True):
            verdict = oracle.check(result, reference, getattr(limits, name), exact_infinity=name == "lse")
            assert verdict.ok, (name, verdict)
        exact_captured = oracle.captured_gradients(self.spec, q, k, v, do)
        for name, bound in oracle.captured_bounds(self.spec, q, k, v, do, exact=exact_captured).items():
            verdict = oracle.check(captured[name], exact_captured[name], bound)
            assert verdict.ok, (name, verdict)
        return {**found, **captured}


def normal(*shape: int) -> Array:
    return np.random.default_rng(2).standard_normal(shape).astype(np.float32)


# ---- Minus infinity


@each_kernel
def test_a_row_of_minus_infinity_attends_to_nothing(arch: str, dim: int, deterministic: bool) -> None:
    values = normal(HEADS, LEN_Q, LEN_KV)
    values[0, 3] = values[1, 40:] = -np.inf
    values[0, 5, :200] = values[0, 6, 200:] = values[1, 7, ::2] = -np.inf
    spec = fg.AttentionSpec(dim, score=fg.bias(values), deterministic=deterministic)
    found = Call(spec, arch).check()
    for row in ((0, 3, 0), (0, slice(40, None), 1)):
        assert not found["o"][row].any()
        assert not found["dq"][row].any()
    assert np.all(found["lse"][0, 1, 40:] == -np.inf)
    (name,) = spec.tensors
    assert not found[name][0, 3].any()
    assert not found[name][1, 40:].any()


@pytest.mark.parametrize("arch", some(["sm_80", "sm_90a"], "sm_90a"))
def test_summed_gradients_skip_rows_of_minus_infinity(arch: str) -> None:
    per_query, slopes, sinks = normal(LEN_Q), normal(HEADS), normal(HEADS)
    per_query[[2, 50]] = -np.inf
    sinks[1] = -np.inf
    biased = score.alibi(slopes) >> fg.Score.of(lambda s, b, h, q, k: s + per_query[q])
    for added in (biased, biased >> score.sink(sinks)):
        found = Call(fg.AttentionSpec(64, score=added, mask=fg.causal()), arch).check()
        assert not found["dq"][0, 2, 1].any()
        assert not found["o"][0, 2].any()


# ---- Finite scores, however low


@pytest.mark.parametrize("lowest", some(HUGE, *HUGE[::3]))
@each_softmax
def test_a_tile_of_huge_scores_leaves_the_other_tiles_as_they_are(
    arch: str, dim: int, dtype: str, schedule: fg.Schedule | None, lowest: float
) -> None:
    values = normal(HEADS, LEN_Q, LEN_KV)
    # Kernels begin with either end of the keys.
    values[0, :, :220] = values[1, :, 30:] = -lowest
    # All but a few keys of one tile, and all but one key.
    values[0, 5, :260] = values[0, 6, :-1] = -lowest
    Call(fg.AttentionSpec(dim, dtype=dtype, score=fg.bias(values), direction="forward"), arch, schedule).check_forward()


@pytest.mark.parametrize("huge", some([*(-x for x in HUGE), *HUGE], *(-x for x in HUGE[::3]), *HUGE[1::3]))
@each_softmax
def test_a_row_of_one_huge_score_averages_its_values(
    arch: str, dim: int, dtype: str, schedule: fg.Schedule | None, huge: float
) -> None:
    values = normal(LEN_Q, LEN_KV)
    values[3] = values[4, 20:] = huge
    values[4, :20] = -np.inf
    values[5] = -np.inf
    spec = fg.AttentionSpec(dim, dtype=dtype, score=fg.bias(values), direction="forward")
    call = Call(spec, arch, schedule)
    q, k, v, _ = call.inputs()
    q[:, 3:5] = 0
    o, lse = call.kernel()(q, k, v)
    v = v[0, :, 0].astype(np.float64)
    step = spec.element.epsilon
    for row, mean in ((3, v.mean(0)), (4, v[20:].mean(0))):
        np.testing.assert_allclose(o[0, row].astype(np.float64), [mean] * HEADS, rtol=2 * step, atol=2 * step)
        np.testing.assert_allclose(lse[0, :, row], np.float32(huge), rtol=1e-6)
    assert np.all(lse[0, :, 5] == -np.inf)


@pytest.mark.parametrize("lowest", some(HUGE, *HUGE[::3]))
@each_kernel
def test_huge_scores_beside_others_have_no_gradient(arch: str, dim: int, deterministic: bool, lowest: float) -> None:
    values = normal(HEADS, LEN_Q, LEN_KV)
    values[0, :, :220] = values[1, :, 30:] = -lowest
    Call(fg.AttentionSpec(dim, score=fg.bias(values), deterministic=deterministic), arch).check()


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("penalty", [1e10, 1.7e10, 1e30])
def test_a_penalty_that_is_counted_in_products_may_be_huge(dim: int, penalty: float) -> None:
    penalties, begins = np.full(HEADS, penalty, np.float32), np.array([0, 30], np.int32)
    added = fg.Score.of(
        lambda s, b, h, q, k: s - penalties[h] * fg.where((k >= begins[h]) & (k < begins[h] + 240), 1.0, 0.0)
    )
    call = Call(fg.AttentionSpec(dim, score=added, direction="forward"), "sm_90a")
    form = call.kernel().plan.kernel("forward").score
    assert form is not None
    assert form.in_products
    call.check_forward()


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_a_score_that_ends_with_a_product_may_be_huge(arch: str) -> None:
    # If a compiler fuses the product with the difference from the maximum, many powers of two remain.
    factors, begins = np.array([1.1e10, 1.7e10], np.float32), np.array([0, 30], np.int32)
    added = fg.Score.of(
        lambda s, b, h, q, k: (s * 1e-10 - fg.where((k >= begins[h]) & (k < begins[h] + 240), 1.3, 0.0)) * factors[h]
    )
    Call(fg.AttentionSpec(64, score=added, direction="forward"), arch).check_forward()


@pytest.mark.parametrize("huge", some([1e10, 1.7e10, -1.7e10, -1e30, LOWEST, -LOWEST], 1e10, -1.7e10, LOWEST, -LOWEST))
@each_kernel
def test_gradients_of_rows_of_huge_scores_are_finite(arch: str, dim: int, deterministic: bool, huge: float) -> None:
    values = normal(HEADS, LEN_Q, LEN_KV)
    values[0, 3] = values[1, 4, 7] = huge
    call = Call(fg.AttentionSpec(dim, score=fg.bias(values), deterministic=deterministic), arch)
    q, k, v, do = call.inputs()
    kernel = call.kernel()
    o, lse = kernel(q, k, v)
    *gradients, captured = kernel.backward(do, q, k, v, o, lse, captured_gradients=True)
    for gradient in (*gradients, *captured.values()):
        assert np.isfinite(gradient.astype(np.float64)).all()
        assert np.abs(gradient.astype(np.float64)).max() < 1e3
