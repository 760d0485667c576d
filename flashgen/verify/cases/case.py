"""The small problems a kernel is checked on: awkward lengths, shared heads, and hostile values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from flashgen.oracle.scales import Scales
from flashgen.spec import AttentionSpec, Dropout
from flashgen.verify.cases.cached import Filling
from flashgen.verify.cases.layouts import Layout, laid_out
from flashgen.verify.cases.packed import Packing
from flashgen.verify.cases.scales import drawn_scales
from flashgen.verify.cases.values import Fill, NonFiniteValues, fill_values, put_non_finite

#: The results that are compared, in the order in which a run gives them.
TENSORS = ("o", "lse", "dq", "dk", "dv")
#: Of no round number of bits, so that a seed or an offset that is cut short shows.
_SEED, _OFFSET = 0x9E3779B97F4A7C15, 5 * 2**32 + 12
#: The size of gradients of the log-sum-exp.
_DLSE = 3.0
Layouts: TypeAlias = tuple[Layout, Layout, Layout, Layout]
PLAIN: Layouts = ("contiguous",) * 4


@dataclass(frozen=True, slots=True)
class Case:
    """One problem: sizes, what the arrays hold and how they lie, and the scale (None: the spec's default).

    ``layouts`` are those of q, k, v and do. Equal cases have equal arrays.
    """

    name: str
    len_q: int
    len_kv: int
    batch: int = 1
    heads: int = 1
    heads_kv: int = 1
    fill: Fill = "normal"
    scale: float | None = None
    layouts: Layouts = PLAIN
    non_finite: NonFiniteValues = "nothing"
    seed: int = 0
    #: With which probability pairs are dropped, if the spec drops any.
    p: float = 0.25
    #: Whether the loss depends on the log-sum-exp too.
    dlse: bool = False

    def describe(self) -> str:
        """The case in one line."""
        sizes = f"B={self.batch} H={self.heads}/{self.heads_kv} Sq={self.len_q} Sk={self.len_kv}"
        return f"{self.name} ({sizes}{'' if self.scale is None else f' scale={self.scale}'})"

    def scale_for(self, spec: AttentionSpec) -> float:
        """The factor on scores."""
        return spec.default_scale if self.scale is None else self.scale

    def dropout_for(self, spec: AttentionSpec) -> Dropout | None:
        """The dropout pattern; None for a spec without dropout."""
        return Dropout(self.p, _SEED ^ self.seed, _OFFSET + 4 * self.seed) if spec.dropout else None

    def packing_for(self, spec: AttentionSpec) -> Packing | None:
        """Where the sequences are cut; None for a spec without packed sequences."""
        return Packing.drawn(self.seed, self.batch, self.len_q, self.len_kv) if spec.varlen else None

    def filling_for(self, spec: AttentionSpec) -> Filling | None:
        """How the cache is filled; None for a spec without one."""
        return Filling.of_spec(spec, self.seed, self.batch, self.len_q, self.len_kv)

    def scales_for(self, spec: AttentionSpec) -> Scales:
        """The scales of 8-bit q, k and v, for a batch of sequences."""
        lengths, heads = (self.len_q, self.len_kv), (self.heads, self.heads_kv)
        return drawn_scales(spec, self.name, self.seed, self.batch, lengths, heads)

    @property
    def compared(self) -> tuple[str, ...]:
        """The results that mean something: NaN in a query reaches every key's gradient."""
        return ("o", "lse", "dq") if self.non_finite == "queries" else TENSORS

    def inputs(self, spec: AttentionSpec) -> Inputs:
        """The arrays, in the spec's dtype; the same for the same case and spec."""
        random = np.random.default_rng([self.seed, *self.name.encode()])
        queries, keys = (self.batch, self.len_q, self.heads), (self.batch, self.len_kv, self.heads_kv)
        shapes: tuple[tuple[int, ...], ...] = (
            (*queries, spec.head_dim),
            (*keys, spec.head_dim),
            (*keys, spec.head_dim_v),
            (*queries, spec.head_dim_v),
        )
        shapes += ((*queries, spec.head_dim_v),) if spec.qv else ()
        values = [random.standard_normal(shape) for shape in shapes]
        fill_values(self.fill, values, spec, self.scale_for(spec), random)
        dtype = spec.element.numpy()
        layouts = (*self.layouts, self.layouts[0])
        arrays = [laid_out(x, layout, dtype) for x, layout in zip(values, layouts, strict=False)]
        put_non_finite(self.non_finite, arrays, random)
        q, k, v, do, *qv = arrays
        return Inputs(q, k, v, do, self._gradient_of_lse() if spec.needs_backward else None, qv[0] if qv else None)

    def _gradient_of_lse(self) -> NDArray[np.float32] | None:
        """The gradient of LSE, about as large as D = rowsum(dO O); None if the loss depends on O alone."""
        if not self.dlse:
            return None
        random = np.random.default_rng([self.seed, *b"dlse"])
        values = _DLSE * random.standard_normal((self.batch, self.heads, self.len_q))
        return values.astype(np.float32)


@dataclass(frozen=True, slots=True, eq=False)
class Inputs:
    """Arrays of one call."""

    q: NDArray[Any]
    k: NDArray[Any]
    v: NDArray[Any]
    do: NDArray[Any]
    #: The gradient of the log-sum-exp, (batch, heads, length), in float32.
    dlse: NDArray[np.float32] | None = None
    #: The queries for the values of a spec with qv, laid out as q.
    qv: NDArray[Any] | None = None


def cases_for(spec: AttentionSpec, *, tile_q: int = 64, tile_kv: int = 64) -> tuple[Case, ...]:
    """The standard cases for a spec, around the tile sizes of its kernel.

    A case is worth its time if a real mistake would show in it alone: an off-by-one at a tile's edge, a ring
    of stages that wraps, a head index, an empty row, a mask on the wrong diagonal, a finite stand-in for
    infinity, a count that ends after a few hundred queries or 32 tiles of keys, an offset in 32 bits.
    """
    # Rows lead to packed sequences, and the first dimension of a paged cache is pages.
    huge: Layout = "huge-row-stride" if spec.varlen else "huge-batch-stride" if spec.cache else "huge-head-stride"
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
        Case("three sequences", 9, 21, batch=3, heads=2, heads_kv=2, dlse=True),
        Case("many queries", 300, 5),
        Case("33 tiles of keys", 5, 33 * tile_kv - 1),
        Case("huge strides", 9, 21, batch=3, heads=2, heads_kv=2, layouts=(huge,) * 4),
    ]
    if not spec.mask.is_full:
        cases.append(Case("NaN where it must not reach", 40, 40, fill="hidden_nan"))
    return tuple(cases)
