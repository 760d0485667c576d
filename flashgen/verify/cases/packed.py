"""Cases of packed sequences: a batch whose sequences are cut to different lengths, packed for a run and unpacked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashgen.spec import Sequences
from flashgen.verify.cases.layouts import Layout, laid_out


@dataclass(frozen=True, slots=True)
class Packing:
    """Rows of each sequence, and how many of them are used: queries and keys of one after another."""

    rows: tuple[tuple[int, int], ...]
    used: tuple[tuple[int, int], ...]
    #: Whether a call gets the used lengths; it need not where all rows are used.
    says_used: bool
    #: Rows before the first sequence and after the last one, of queries and of keys.
    before: tuple[int, int] = (0, 0)
    after: tuple[int, int] = (0, 0)

    @classmethod
    def drawn(cls, seed: int, batch: int, len_q: int, len_kv: int) -> Packing:
        """The first sequence has all rows, others any number; some do not use all of theirs."""
        random = Random(f"packed {seed} {batch} {len_q} {len_kv}")
        full = (len_q, len_kv)
        rows = tuple(full if b == 0 else _part(random, full) for b in range(batch))
        says_used = random.random() < 0.5
        used = tuple(_part(random, of) for of in rows) if says_used else rows
        before, after = ((random.choice((0, 0, 3, 70)), random.choice((0, 0, 5, 40))) for _ in range(2))
        return cls(rows, used, says_used, before, after)

    @property
    def total_rows(self) -> tuple[int, int]:
        """Rows of packed arrays, of queries and of keys."""
        end = self._starts()[-1]
        return end[0] + self.after[0], end[1] + self.after[1]

    def sequences(self, len_q: int, len_kv: int) -> Sequences:
        """The arguments of a call."""
        starts, used = (np.array(pairs, np.int32).reshape(-1, 2).T.copy() for pairs in (self._starts(), self.used))
        counts = used if self.says_used else (None, None)
        return Sequences(starts[0], starts[1], len_q, len_kv, *counts)

    def pack(self, x: NDArray[Any], side: int, layout: Layout = "contiguous") -> NDArray[Any]:
        """The rows of all sequences of (batch, length, heads, dim); what is not used is NaN."""
        packed = np.full((self.total_rows[side], *x.shape[2:]), np.nan, x.dtype)
        for b, start in enumerate(self._starts()[:-1]):
            packed[start[side] : start[side] + self.used[b][side]] = x[b, : self.used[b][side]]
        laid: NDArray[Any] = laid_out(packed[None], layout, x.dtype)[0]
        return laid

    def pack_lse(self, x: NDArray[Any]) -> NDArray[Any]:
        """The same of (batch, heads, length), a value for each row: (heads, rows), contiguous."""
        rows = self.pack(np.moveaxis(x, 1, 2)[..., None], 0)
        return np.ascontiguousarray(rows[..., 0].T)

    def pack_scales(self, x: Any, side: int, block: int | None) -> Any:
        """The scales of blocks, (batch, heads, blocks), of packed rows; others are as of a batch."""
        if block is None or x is None:
            return x
        packed = np.full((x.shape[1], self.total_rows[side] // block + len(self.rows)), np.nan, x.dtype)
        for b, start in enumerate(self._starts()[:-1]):
            blocks = -(-self.rows[b][side] // block)
            first = start[side] // block + b
            packed[:, first : first + blocks] = x[b, :, :blocks]
        return packed

    def unpack(self, x: NDArray[Any], side: int, length: int, fill: float = 0.0) -> NDArray[Any]:
        """A batch again, with ``fill`` for rows that are not there.

        Rows of no sequence must hold ``fill``, too. Where one does not, the whole batch is NaN.
        """
        starts = self._starts()
        outside = x[: starts[0][side]], x[starts[-1][side] :]
        if not all((rows == fill).all() for rows in outside):
            return np.full((len(self.rows), length, *x.shape[1:]), np.nan, x.dtype)
        batch = np.full((len(self.rows), length, *x.shape[1:]), fill, x.dtype)
        for b, start in enumerate(self._starts()[:-1]):
            batch[b, : self.rows[b][side]] = x[start[side] : start[side] + self.rows[b][side]]
        return batch

    def _starts(self) -> list[tuple[int, int]]:
        starts = [self.before]
        for rows in self.rows:
            starts.append((starts[-1][0] + rows[0], starts[-1][1] + rows[1]))
        return starts


def packed_results(results: Sequence[Any], packing: Packing, len_q: int, len_kv: int) -> list[Any]:
    """(o, lse) or (o, lse, dq, dk, dv) of a packed call as those of a batch."""
    o, lse, *gradients = results
    found = [packing.unpack(o, 0, len_q), np.moveaxis(packing.unpack(np.moveaxis(lse, 0, 1), 0, len_q, -np.inf), 1, 2)]
    sides = ((0, len_q), (1, len_kv), (1, len_kv))
    return found + [packing.unpack(x, *side) for x, side in zip(gradients, sides, strict=False)]


def _part(random: Random, of: tuple[int, int]) -> tuple[int, int]:
    """Each all, none, or any number."""
    q, k = (random.choice((n, 0, random.randint(0, n), random.randint(0, n))) for n in of)
    return q, k
