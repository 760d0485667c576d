"""What the arrays of a case hold: plain noise, and values that kernels have gone wrong on."""

from __future__ import annotations

import math
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from flashgen.oracle import Rules
from flashgen.oracle.problem import read_problem
from flashgen.spec import AttentionSpec

Floats: TypeAlias = NDArray[np.float64]
Fill: TypeAlias = Literal["normal", "spread", "large_logits", "huge", "flat", "sparse", "hidden_nan"]
FILLS: tuple[Fill, ...] = get_args(Fill)
#: Where values that are not finite stand: in keys and values, or in queries and their gradients.
NonFiniteValues: TypeAlias = Literal["nothing", "keys", "queries"]
NON_FINITE_VALUES: tuple[NonFiniteValues, ...] = get_args(NonFiniteValues)

LARGEST_LOGIT = 1e6
#: Products up to here are whole numbers that float32 holds exactly, with room for a sum of small ones.
_LARGEST_EXACT_PRODUCT = 2**23
#: The factors of these are e4m3 numbers.
_LARGEST_EIGHT_BIT_PRODUCT = 2**16


def fill_values(
    kind: Fill, arrays: list[Floats], spec: AttentionSpec, scale: float, random: np.random.Generator
) -> None:
    """Turns the standard normal q, k, v and do, and qv where there is one, into values of that kind."""
    q, k, v, _, *qv = arrays
    if qv and kind in ("large_logits", "huge"):
        for x in (v, *qv):
            np.clip(np.rint(x), -2, 2, out=x)
    if kind == "spread":  # a row's largest logits stand far above the others
        q *= 6.0
        k *= 6.0
    elif kind == "large_logits":
        _make_logits_large(spec, q, k, scale)
        q[:, 1::2, :, 0] *= -1
    elif kind == "huge":
        _make_logits_large(spec, q, k, scale)
        for x in (q, k):
            x[..., 0] *= random.choice([-1.0, 1.0], x.shape[:-1])
    elif kind == "flat":  # every key is as good as any other
        for x in arrays:
            x[...] = 0.5
    elif kind == "sparse":
        for x in arrays:
            x *= random.random(x.shape) < 0.1
    elif kind == "hidden_nan":
        _hide_nan(q, k, v, spec, *qv)


def put_non_finite(kind: NonFiniteValues, arrays: list[NDArray[Any]], random: np.random.Generator) -> None:
    """Puts values that are not finite into a few elements."""
    q, k, v, do, *_ = arrays
    if kind == "keys":
        _scatter(k, (np.nan,), random)
        _scatter(v, (np.nan, np.inf, -np.inf), random)
    elif kind == "queries":
        _scatter(q, (np.nan,), random)
        _scatter(do, (np.nan,), random)


def _scatter(x: NDArray[Any], values: tuple[float, ...], random: np.random.Generator) -> None:
    for _ in range(int(random.integers(0, 3)) if x.size else 0):
        x[tuple(random.integers(0, x.shape))] = random.choice(values)


def _make_logits_large(spec: AttentionSpec, q: Floats, k: Floats, scale: float) -> None:
    """Logits near +1e6 where the dtype can hold their factors, apart by small whole numbers times the scale."""
    for x in (q, k):
        np.clip(np.rint(x), -2, 2, out=x)
    largest = _LARGEST_EIGHT_BIT_PRODUCT if spec.element.is_eight_bit else _LARGEST_EXACT_PRODUCT
    product = min(LARGEST_LOGIT / abs(scale), largest)
    exponent = int(math.log2(product))
    q[..., 0] = 2.0 ** (exponent - exponent // 2)
    k[..., 0] = 2.0 ** (exponent // 2)


def _hide_nan(q: Floats, k: Floats, v: Floats, spec: AttentionSpec, qv: Floats | None = None) -> None:
    """NaN and inf in the key that the fewest queries may attend to: with a mask, fewer than all."""
    if q.size == 0 or k.size == 0:
        return
    attending = Rules(spec, read_problem(spec, q, k, v, qv=qv)).allowed(0, 0).sum(axis=0)
    key = int(np.argmin(attending))
    k[:, key, :, 0], v[:, key, :, -1] = np.nan, np.inf
