"""``estimate(...)``: how many tiles a kernel processes, and what tiling saves beside storing all scores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from flashgen.arch import Arch
from flashgen.common.show import show
from flashgen.dtypes import INPUTS
from flashgen.errors import ArgumentError
from flashgen.explanation import Explanation, explain
from flashgen.spec import AttentionSpec, Mask, full


@dataclass(frozen=True, slots=True)
class Estimate:
    """The tiles of one head's score matrix, and the work and memory that follow from them; ``str()`` prints a table.

    A kernel computes whole tiles. So the work also counts pairs that the mask forbids in partial tiles, and rows and
    columns of the last tiles beyond the ends.
    """

    len_q: int
    len_kv: int
    tile_q: int
    tile_kv: int
    head_dim: int
    head_dim_v: int
    dtype: str
    mask: str
    #: Tiles of each kind; a kernel skips empty ones.
    empty: int
    partial: int
    full: int

    @classmethod
    def of(cls, explanation: Explanation, spec: AttentionSpec | None = None) -> Estimate:
        """The estimate for the tile map of an explanation; ``spec`` is that of a map of a mask alone."""
        e = explanation
        spec = e.spec if spec is None else spec
        tiles = e.len_q, e.len_kv, e.tile_q, e.tile_kv
        return cls(*tiles, spec.head_dim, spec.head_dim_v, spec.dtype, e.mask, e.empty, e.partial, e.full)

    @property
    def tiles(self) -> int:
        """All tiles: ``ceil(len_q / tile_q) * ceil(len_kv / tile_kv)``."""
        return self.empty + self.partial + self.full

    @property
    def processed(self) -> int:
        """Tiles that a kernel processes."""
        return self.partial + self.full

    @property
    def naive_scores(self) -> int:
        """Entries of QK^T, all of which standard attention computes."""
        return self.len_q * self.len_kv

    @property
    def tile_scores(self) -> int:
        """Scores that a kernel computes: those of whole tiles."""
        return self.processed * self.tile_q * self.tile_kv

    @property
    def relative_work(self) -> float:
        """Scores of the tiles divided by all scores; above 1 where the last tiles reach far beyond the ends."""
        return self.tile_scores / self.naive_scores if self.naive_scores else 0.0

    @property
    def flops(self) -> int:
        """Floating-point operations of the two products over the tiles."""
        return 2 * (self.head_dim + self.head_dim_v) * self.tile_scores

    @property
    def workspace_saved(self) -> int:
        """Bytes of the score matrix in the spec's dtype, which a kernel never writes to memory."""
        return self.naive_scores * INPUTS[self.dtype].bytes

    @property
    def tile_bytes(self) -> int:
        """Bytes on chip of one tile of each of Q, K and V."""
        elements = (self.tile_q + self.tile_kv) * self.head_dim + self.tile_kv * self.head_dim_v
        return elements * INPUTS[self.dtype].bytes

    def as_dict(self) -> dict[str, Any]:
        """The inputs and the results as plain values."""
        results = ("tiles", "processed", "naive_scores", "tile_scores", "relative_work")
        memory = ("flops", "workspace_saved", "tile_bytes")
        return asdict(self) | {name: getattr(self, name) for name in (*results, *memory)}

    def __str__(self) -> str:
        kinds = f"{self.empty:,} skipped, {self.partial:,} partial, {self.full:,} full"
        rows = (
            ("mask", f"{self.mask}, {self.len_q:,} queries x {self.len_kv:,} keys"),
            ("tiles processed", f"{self.processed:,} of {self.tiles:,} ({kinds})"),
            ("naive scores", f"{self.naive_scores:,}"),
            ("relative work", f"{self.relative_work:.4f} ({self.tile_scores:,} scores)"),
            ("operations", f"{self.flops:,}"),
            ("workspace saved", f"{self.workspace_saved:,} bytes"),
            ("tiles on chip", f"{self.tile_bytes:,} bytes for {self.tile_q} x {self.tile_kv}"),
        )
        return "\n".join(f"{label:<16} {value}" for label, value in rows)


def estimate(
    len_q: int,
    len_kv: int | None = None,
    tile_q: int | None = None,
    tile_kv: int | None = None,
    *,
    mask: Mask | Callable[..., Any] | None = None,
    head_dim: int = 64,
    dtype: str = "bf16",
    arch: str | Arch = "sm_80",
) -> Estimate:
    """The tiles that a kernel processes for one head, and what tiling saves.

    ``len_kv`` is by default ``len_q``, and the tile is that of the plan for ``arch``. The mask decides which tiles
    are skipped, by the rule that kernels follow.
    """
    if (tile_q is None) != (tile_kv is None):
        name, value = ("tile_q", tile_q) if tile_kv is None else ("tile_kv", tile_kv)
        raise ArgumentError(f"{name}={show(value)} comes alone; give both tile_q and tile_kv, or neither")
    spec = AttentionSpec(head_dim, dtype=dtype, mask=full() if mask is None else Mask.of(mask), direction="forward")
    if tile_q is None or tile_kv is None:
        return Estimate.of(explain(spec, len_q, len_kv, arch=arch))
    # Nothing is planned for a tile that is given: there may be no such kernel.
    return Estimate.of(explain(spec.mask, len_q, len_kv, tile=(tile_q, tile_kv), arch=arch), spec)
