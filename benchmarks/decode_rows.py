"""Which problems the benchmark of decoding knows, and what it shows of them. Needs neither torch nor a GPU."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import fmean

import numpy as np

#: Each kind of flashgen's that is compared, and its peers.
RIVALS = {
    "paged": ("fa3", "cudnn"),
    "portable": ("fa3", "cudnn"),
    "e4m3": ("fa3-e4m3",),
    "e4m3-queries": ("fa3-e4m3",),
    "latent": ("latent-fa3",),
}
PEERS = tuple(dict.fromkeys(name for names in RIVALS.values() for name in names))


@dataclass(frozen=True)
class Problem:
    """One line of the table. ``keys`` are a sequence's, or the longest and the shortest of ragged ones."""

    batch: int
    heads: int
    heads_kv: int
    head_dim: int
    keys: int
    page: int
    shortest: int = 0
    new: int = 1
    #: New tokens are the nodes of a tree of guesses, and attend to those above them; otherwise they are in a row.
    tree: bool = False
    #: Columns of values that are part of the keys; 0 where values are others.
    latent: int = 0

    def lengths(self) -> list[int]:
        """Keys of each sequence: equal, or spread evenly on a logarithmic scale."""
        if not self.shortest:
            return [self.keys] * self.batch
        steps = max(1, self.batch - 1)
        return [round(self.shortest * (self.keys / self.shortest) ** (i / steps)) for i in range(self.batch)]

    def bytes(self, of_element: int) -> int:
        """Keys and values read once."""
        columns = self.head_dim + (self.latent or self.head_dim)
        return sum(self.lengths()) * self.heads_kv * columns * of_element

    def flops(self) -> int:
        """Those of both products for all pairs of queries and keys."""
        values = self.latent or self.head_dim
        return 2 * sum(self.lengths()) * self.new * self.heads * (self.head_dim + self.latent + values)

    def __str__(self) -> str:
        words = [f"{self.batch}, {self.heads}/{self.heads_kv}, {self.head_dim}, {self.keys}, {self.page}"]
        words += [f"from {self.shortest} keys"] * bool(self.shortest)
        words += [f"{self.new} tokens{' in a tree' if self.tree else ''}"] * (self.new > 1)
        return ", ".join(words)


ROWS = (
    Problem(1, 32, 8, 128, 8192, 64),
    Problem(1, 32, 8, 128, 131072, 64),
    Problem(8, 32, 8, 128, 8192, 16),
    Problem(64, 32, 8, 128, 8192, 16),
    Problem(128, 32, 8, 128, 2048, 16),
    Problem(64, 64, 8, 128, 8192, 64),
    Problem(16, 128, 1, 128, 16384, 64),
    Problem(64, 32, 32, 128, 4096, 64),
    Problem(64, 16, 8, 256, 4096, 64),
    Problem(64, 32, 8, 64, 8192, 64),
    Problem(64, 32, 8, 128, 8192, 1),
    Problem(64, 32, 8, 128, 32768, 16, shortest=100),
    Problem(64, 32, 8, 128, 8192, 16, new=4),
    Problem(64, 32, 8, 128, 8192, 16, new=8),
    Problem(64, 32, 8, 128, 8192, 16, new=8, tree=True),
)

LATENT_ROWS = (
    *(Problem(128, heads, 1, 64, keys, 64, latent=512) for heads in (128, 64, 16) for keys in (4096, 8192)),
    *(Problem(32, heads, 1, 64, 32768, 64, latent=512) for heads in (128, 64, 16)),
    Problem(1, 128, 1, 64, 32768, 64, latent=512),
    Problem(128, 128, 1, 64, 32768, 64, shortest=100, latent=512),
    Problem(128, 128, 1, 64, 4096, 64, new=2, latent=512),
)


def ancestors(nodes: int) -> np.ndarray:
    """Whether node q of a binary tree lies below node k or is k; node i hangs from node (i - 1) // 2."""
    seen = np.eye(nodes, dtype=bool)
    for node in range(1, nodes):
        seen[node] |= seen[(node - 1) // 2]
    return seen


@dataclass
class Row:
    """A problem's figures in GB/s and microseconds by kind, and why some have none."""

    problem: Problem
    rates: dict[str, float] = field(default_factory=dict)
    times: dict[str, float] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)

    def ratio(self, kind: str) -> float | None:
        """The rate of one of flashgen's kinds over that of its better peer."""
        peers = [self.rates[name] for name in RIVALS[kind] if name in self.rates]
        return self.rates[kind] / max(peers) if peers and kind in self.rates else None

    def rate(self, kind: str) -> str:
        """GB/s, and TFLOP/s where products are wide."""
        if kind not in self.rates:
            return "-"
        products = f" ({self.problem.flops() / self.times[kind] / 1e6:.0f} TFLOP/s)" if self.problem.latent else ""
        return f"{self.rates[kind]:.0f}{products}"

    def line(self, kinds: Sequence[str]) -> str:
        """This row of the table."""
        ratios = [self.ratio(kind) for kind in _compared(kinds)]
        shown = [f"{ratio:.2f}" if ratio else "-" for ratio in ratios]
        return f"| {' | '.join([str(self.problem), *map(self.rate, kinds), *shown])} |"


def head(kinds: Sequence[str]) -> str:
    """The first lines of the table."""
    names = ["B, heads, D, keys, page", *kinds, *(f"{kind} vs the better peer" for kind in _compared(kinds))]
    return f"| {' | '.join(names)} |\n|{' --- |' * len(names)}"


def means(rows: Sequence[Row], kinds: Sequence[str]) -> Iterator[str]:
    """Geometric means of ratios, of rows that have one."""
    for kind in _compared(kinds):
        if ratios := [ratio for row in rows if (ratio := row.ratio(kind))]:
            mean = math.exp(fmean(map(math.log, ratios)))
            yield f"{kind}: geometric mean over the better peer {mean:.3f}; lowest {min(ratios):.2f}."


def _compared(kinds: Sequence[str]) -> list[str]:
    """The kinds with a ratio to some other one of these."""
    return [kind for kind in kinds if set(RIVALS.get(kind, ())) & set(kinds)]
