"""The small problems a kernel is checked on: awkward lengths, shared heads, and hostile values."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from flashgen.oracle import allowed_pairs
from flashgen.spec import AttentionSpec

Fill = Literal["normal", "large_logits", "hidden_nan"]
LARGEST_LOGIT = 1e6
#: Products up to here are whole numbers that float32 holds exactly, with room for a sum of small ones.
_LARGEST_EXACT_PRODUCT = 2**23


@dataclass(frozen=True, slots=True)
class Case:
    """One problem: sizes, what the arrays hold, and the scale (None: the spec's default)."""

    name: str
    len_q: int
    len_kv: int
    batch: int = 1
    heads: int = 1
    heads_kv: int = 1
    fill: Fill = "normal"
    scale: float | None = None

    def describe(self) -> str:
        """The case in one line."""
        sizes = f"B={self.batch} H={self.heads}/{self.heads_kv} Sq={self.len_q} Sk={self.len_kv}"
        return f"{self.name} ({sizes}{'' if self.scale is None else f' scale={self.scale}'})"

    def inputs(self, spec: AttentionSpec, seed: int = 0) -> Inputs:
        """The arrays, in the spec's dtype; the same for the same case, spec and seed."""
        random = np.random.default_rng([seed, *self.name.encode()])
        q = random.standard_normal((self.batch, self.len_q, self.heads, spec.head_dim))
        k = random.standard_normal((self.batch, self.len_kv, self.heads_kv, spec.head_dim))
        v = random.standard_normal((self.batch, self.len_kv, self.heads_kv, spec.head_dim_v))
        do = random.standard_normal((self.batch, self.len_q, self.heads, spec.head_dim_v))
        if self.fill == "large_logits":
            _make_logits_large(q, k, spec.default_scale if self.scale is None else self.scale)
        elif self.fill == "hidden_nan":
            _hide_nan(k, v, spec)
        dtype = spec.element.numpy()
        return Inputs(*(x.astype(dtype) for x in (q, k, v, do)))


@dataclass(frozen=True, slots=True, eq=False)
class Inputs:
    """Arrays of one call."""

    q: NDArray[Any]
    k: NDArray[Any]
    v: NDArray[Any]
    do: NDArray[Any]


def cases_for(spec: AttentionSpec, *, tile_q: int = 64, tile_kv: int = 64) -> tuple[Case, ...]:
    """The standard cases for a spec, around the tile sizes of its kernel.

    A case is worth its time if a real mistake would show in it alone: an off-by-one at a tile's edge, a ring
    of stages that wraps, a head index, an empty row, a mask on the wrong diagonal, a finite stand-in for
    infinity.
    """
    cases = [
        Case("one query, one key", 1, 1),
        Case("one query", 1, tile_kv + 1, heads=2),
        Case("odd lengths, one k/v head", 37, 53, batch=2, heads=3, heads_kv=1, scale=0.3),
        Case("one short of a tile", tile_q - 1, tile_kv - 1, heads=2, heads_kv=2),
        Case("one over a tile", tile_q + 1, tile_kv + 1, heads=4, heads_kv=2),
        Case("a ring of tiles", tile_q // 2, 5 * tile_kv + 3),
        Case("more queries than keys", 2 * tile_q + 5, 19),
        Case("no keys", 5, 0, heads=2, heads_kv=2),
        Case("no queries", 0, 5, heads=2, heads_kv=2),
        Case("large logits", 33, tile_kv + 9, fill="large_logits"),
    ]
    if not spec.mask.is_full:
        cases.append(Case("NaN where it must not reach", 40, 40, fill="hidden_nan"))
    return tuple(cases)


def _make_logits_large(q: NDArray[Any], k: NDArray[Any], scale: float) -> None:
    """Logits near +1e6 (even queries) and -1e6 (odd), apart by small whole numbers times the scale."""
    np.clip(np.rint(q), -2, 2, out=q)
    np.clip(np.rint(k), -2, 2, out=k)
    product = min(LARGEST_LOGIT / abs(scale), _LARGEST_EXACT_PRODUCT)
    exponent = int(math.log2(product))
    q[..., 0] = 2.0 ** (exponent - exponent // 2)
    q[:, 1::2, :, 0] *= -1
    k[..., 0] = 2.0 ** (exponent // 2)


def _hide_nan(k: NDArray[Any], v: NDArray[Any], spec: AttentionSpec) -> None:
    """NaN and inf in the key that the fewest queries, but at least one fewer than all, may attend to."""
    attending = allowed_pairs(spec.mask, k.shape[1], k.shape[1]).sum(axis=0)
    key = int(np.argmin(attending))
    k[:, key, :, 0], v[:, key, :, -1] = np.nan, np.inf
