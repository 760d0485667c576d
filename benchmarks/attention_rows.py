"""Which problems the benchmark of attention knows, and what it shows of them. Needs neither torch nor a GPU."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

OURS = "flashgen"
#: No peer, but what the same GPU gives a plain product of large matrices in the same rounds.
PRODUCT = "product"
#: Rows and columns of these.
PRODUCT_SIZE = 8192


@dataclass(frozen=True)
class Problem:
    """One line of the table."""

    direction: str
    head_dim: int
    queries: int
    keys: int
    batch: int
    heads: int
    kv_heads: int
    causal: bool = False
    #: Keys before a query's own that it sees, under a causal mask.
    window: int | None = None
    softcap: float | None = None
    dtype: str = "bf16"

    @property
    def pairs(self) -> float:
        """Pairs of a query and a key that count, by the papers' convention: half of them under a causal mask."""
        whole = float(self.queries) * self.keys
        if self.window is not None:
            # Where a window is cut off by the sequence's beginning it is a triangle.
            return self.queries * self.window - self.window**2 / 2
        # The last query sees the last key.
        return whole - self.queries**2 / 2 if self.causal else whole

    @property
    def flops(self) -> float:
        """Floating-point operations by the papers' convention."""
        forward = 4.0 * self.pairs * self.head_dim * self.heads * self.batch
        return forward * (2.5 if self.direction == "backward" else 1.0)

    @property
    def mask(self) -> str:
        """In a word or two."""
        words = "causal" if self.causal else "full"
        if self.window is not None:
            words = f"window {self.window}"
        return words if self.softcap is None else f"{words}, softcap {self.softcap:g}"

    @property
    def shape(self) -> str:
        """Lengths, and what else is not as in the grid."""
        words = str(self.keys) if self.queries == self.keys else f"{self.queries} x {self.keys}"
        if self.heads != self.kv_heads:
            words += f", heads {self.heads}/{self.kv_heads}"
        return words if self.dtype == "bf16" else f"{words}, {self.dtype}"

    def __str__(self) -> str:
        return f"{self.direction}, D={self.head_dim}, {self.mask}, S={self.shape}"


@dataclass
class Row:
    """A problem's figures in TFLOP/s by implementation, and why some have none."""

    problem: Problem
    tflops: dict[str, float] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)

    @property
    def best_peer(self) -> float | None:
        """The highest figure of others."""
        return max((x for name, x in self.tflops.items() if name not in (OURS, PRODUCT)), default=None)

    @property
    def ratio(self) -> float | None:
        """How many times as fast as the best peer."""
        return self.tflops[OURS] / self.best_peer if self.best_peer and OURS in self.tflops else None


def grid(
    directions: Sequence[str], head_dims: Sequence[int], lengths: Sequence[int], tokens: int, hidden: int, dtype: str
) -> Iterator[Problem]:
    """A fixed number of tokens and a fixed hidden size, full and causal."""
    for direction in directions:
        for head_dim in head_dims:
            for causal in (False, True):
                for length in lengths:
                    batch, heads = max(1, tokens // length), hidden // head_dim
                    yield Problem(direction, head_dim, length, length, batch, heads, heads, causal, dtype=dtype)


def others(
    directions: Sequence[str], head_dims: Sequence[int], tokens: int, hidden: int, dtype: str
) -> Iterator[Problem]:
    """What models ask for besides the grid: shared heads, few queries, an odd length, a window, a softcap."""
    for direction in directions:
        for head_dim in head_dims:
            heads = hidden // head_dim
            for causal in (False, True):
                length = tokens // 4
                yield Problem(direction, head_dim, length, length, 1, 64, 8, causal, dtype=dtype)
                yield Problem(direction, head_dim, tokens // 16, tokens, 4, heads, heads, causal, dtype=dtype)
                yield Problem(direction, head_dim, tokens + 1, tokens + 1, 1, heads, heads, causal, dtype=dtype)
            yield Problem(direction, head_dim, tokens, tokens, 1, heads, heads, True, 1024, dtype=dtype)
            yield Problem(direction, head_dim, tokens, tokens, 1, heads, heads, True, softcap=30.0, dtype=dtype)


def mean(ratios: Sequence[float]) -> float:
    """The geometric one."""
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def table(rows: Sequence[Row], peers: Sequence[str]) -> str:
    """The figures as Markdown, with geometric means below and every cell that is behind."""
    names = [*peers, *([PRODUCT] if any(PRODUCT in row.tflops for row in rows) else []), OURS]
    lines = [f"| pass | D | mask | S | {' | '.join(names)} | vs the best |", "|" + " --- |" * (5 + len(names))]
    for row in rows:
        shown = [f"{row.tflops[n]:.0f}" if n in row.tflops else "-" for n in names]
        shown.append(f"{row.ratio:.2f}" if row.ratio else "-")
        problem = row.problem
        lines.append(
            f"| {problem.direction} | {problem.head_dim} | {problem.mask} | {problem.shape} | {' | '.join(shown)} |"
        )
    for direction in dict.fromkeys(row.problem.direction for row in rows):
        lines += ["", summary(direction, [row for row in rows if row.problem.direction == direction], peers)]
    notes = [f"- {row.problem}, {name}: {note}" for row in rows for name, note in row.notes.items()]
    return "\n".join([*lines, *([""] if notes else []), *notes])


def summary(direction: str, rows: Sequence[Row], peers: Sequence[str]) -> str:
    """One pass in a sentence or two."""
    compared = [(row, row.ratio) for row in rows if row.ratio is not None]
    if not compared:
        return f"{direction}: nothing to compare with."
    by_width = {
        row.problem.head_dim: [r for other, r in compared if other.problem.head_dim == row.problem.head_dim]
        for row, _ in compared
    }
    widths = ", ".join(f"D={d} {mean(ratios):.3f}" for d, ratios in by_width.items())
    against = [
        (name, [row.tflops[OURS] / row.tflops[name] for row, _ in compared if name in row.tflops]) for name in peers
    ]
    each = ", ".join(f"{name} {mean(ratios):.2f}" for name, ratios in against if ratios)
    behind = [f"{row.problem} ({ratio:.3f})" for row, ratio in compared if ratio < 1]
    overall = mean([ratio for _, ratio in compared])
    return (
        f"{direction}: geometric mean over the best peer of each cell {overall:.3f} ({widths}); over {each}. "
        f"{len(behind)} of {len(compared)} cells are behind{': ' if behind else ''}{'; '.join(behind)}."
    )


def save(machine: str, rows: Sequence[Row], path: Path) -> None:
    """Writes all figures; whoever is interrupted keeps what was there before."""
    partial = path.with_suffix(path.suffix + ".part")
    partial.write_text(json.dumps({"machine": machine, "rows": [asdict(row) for row in rows]}, indent=1) + "\n")
    os.replace(partial, path)


def load(path: Path) -> tuple[str, list[Row]]:
    """What ``save`` wrote."""
    data: Mapping[str, object] = json.loads(path.read_text())
    rows = data["rows"]
    assert isinstance(rows, list)
    return str(data["machine"]), [Row(**{**row, "problem": Problem(**row["problem"])}) for row in rows]
