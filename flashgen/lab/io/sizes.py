"""What a model counts bytes for: a spec, the sizes of one call, and the on-chip memory of a block."""

from __future__ import annotations

from dataclasses import dataclass

from flashgen.arch import Arch
from flashgen.lab.io.visits import Side, Walk, walk
from flashgen.plan.model.plans import KernelPlan, Pass, Problem
from flashgen.spec import AttentionSpec

FLOAT_BYTES = 4
#: Those of an H100 or H200.
MULTIPROCESSORS = 132


@dataclass(frozen=True, slots=True)
class Sizes:
    """One call. Quantities of bytes are for all heads of all sequences."""

    spec: AttentionSpec
    batch: int
    heads: int
    heads_kv: int
    len_q: int
    len_kv: int
    arch: Arch
    #: On-chip memory of one block, in bytes: ``M`` of the papers.
    sram: int
    pass_: Pass = "forward"
    #: Of the GPU; they decide how the decode kernel splits keys.
    multiprocessors: int = MULTIPROCESSORS

    @property
    def problem(self) -> Problem:
        """The sizes as the plan takes them."""
        return Problem(self.batch, self.heads, self.heads_kv, self.len_q, self.len_kv)

    @property
    def item(self) -> int:
        """Bytes of an element."""
        return self.spec.element.bytes

    @property
    def sram_elements(self) -> int:
        """``M`` in elements of the dtype, which is how the papers count it."""
        return self.sram // self.item

    @property
    def all_heads(self) -> int:
        """Heads of queries in the batch."""
        return self.batch * self.heads

    @property
    def rows(self) -> int:
        """Rows of queries in the call."""
        return self.all_heads * self.len_q

    @property
    def pairs(self) -> int:
        """Elements of the score matrices, masked ones included."""
        return self.rows * self.len_kv

    @property
    def allowed_pairs(self) -> int:
        """Pairs that a mask leaves, if it is a band."""
        lower, upper = self.spec.mask.diagonals(self.len_q, self.len_kv)
        return self.all_heads * max(0, self._keys_before(upper + 1) - self._keys_before(lower))

    def _keys_before(self, diagonal: int) -> int:
        """Over all queries q of a head, how many keys lie before ``q + diagonal``."""

        def keys(end: int) -> int:
            ramp = min(max(end, 0), self.len_kv)
            return ramp * (ramp + 1) // 2 + max(0, end - self.len_kv) * self.len_kv

        return keys(diagonal + self.len_q - 1) - keys(diagonal - 1)

    @property
    def q(self) -> int:
        """Bytes of Q; dQ has as many."""
        return self.rows * self.spec.head_dim * self.item

    @property
    def o(self) -> int:
        """Bytes of O; dO has as many."""
        return self.rows * self.spec.head_dim_v * self.spec.out_element.bytes

    @property
    def k(self) -> int:
        """Bytes of K; dK has as many."""
        return self.batch * self.heads_kv * self.len_kv * self.spec.head_dim * self.item

    @property
    def v(self) -> int:
        """Bytes of V; dV has as many."""
        return self.batch * self.heads_kv * self.len_kv * self.spec.head_dim_v * self.item

    @property
    def row_floats(self) -> int:
        """Bytes of one float32 per row of queries, such as LSE or D."""
        return self.rows * FLOAT_BYTES

    def key_walk(self, tile_q: int, tile_kv: int) -> Walk:
        """How each tile of queries walks over keys."""
        queries, keys = Side("q", self.len_q, tile_q), Side("k", self.len_kv, tile_kv)
        return walk(self.spec.mask, self.batch, self.heads, queries, keys)

    def query_walk(self, tile_q: int, tile_kv: int) -> Walk:
        """How each tile of keys walks over queries."""
        queries, keys = Side("q", self.len_q, tile_q), Side("k", self.len_kv, tile_kv)
        return walk(self.spec.mask, self.batch, self.heads, keys, queries)


def tile_of(kernel: KernelPlan) -> tuple[int, int]:
    """Rows of a tile of queries and of keys."""
    return int(kernel.constant("tile_q")), int(kernel.constant("tile_kv"))
