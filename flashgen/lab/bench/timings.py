"""The results of a bench: rows that print as tables and are written as JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashgen.common.columns import columns
from flashgen.lab.bench.case import Case
from flashgen.lab.timing.rounds import Timing

SCHEMA = 1
_DECODE_COLUMNS = ("keys", "algorithm", "ms", "spread", "GB/s", "memory", "of best peer")
_COLUMNS = ("length", "algorithm", "ms", "spread", "TFLOP/s", "memory", "of best peer")


@dataclass(frozen=True, slots=True)
class Row:
    """What a candidate took for a case."""

    algorithm: str
    case: Case
    timing: Timing
    #: Peak device memory of the call, arguments included; 0 if unknown.
    bytes: int
    peer: bool

    @property
    def tflops(self) -> float:
        """By the FlashAttention papers' count of operations."""
        return self.case.flops / self.timing.ms / 1e9

    @property
    def gbps(self) -> float:
        """Bytes that are read of keys and values by the time, in GB/s: what bounds a step that generates."""
        return (self.case.kv_bytes if self.peer else self.case.cache_bytes) / self.timing.ms / 1e6

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as for JSON."""
        c = self.case
        return {
            "algorithm": self.algorithm,
            "pass": "decode" if c.is_decode else c.pass_,
            "dtype": c.dtype,
            "head_dim": c.head_dim,
            "causal": c.causal,
            "len": c.len,
            "batch": c.batch,
            "heads": c.heads,
            "heads_kv": c.kv_heads,
            "new_tokens": c.new_tokens,
            "cache_dtype": c.cache_dtype,
            "page_size": c.page_size if c.is_decode else None,
            "page_scales": c.page_scales,
            "window": c.window,
            "ragged": c.ragged,
            "gbps": self.gbps,
            "ms": self.timing.ms,
            "tflops": self.tflops,
            "bytes": self.bytes,
            "peer": self.peer,
            "spread": self.timing.spread,
        }


@dataclass(frozen=True, slots=True)
class Skipped:
    """A candidate that was not timed for a case."""

    algorithm: str
    case: Case
    reason: str
    #: Whether it computed something else than attention.
    is_wrong: bool = False


@dataclass(frozen=True, slots=True)
class Timings:
    """All that a bench found on a device; ``str()`` draws tables."""

    device: str
    rows: tuple[Row, ...] = ()
    skipped: tuple[Skipped, ...] = ()

    @property
    def wrong(self) -> tuple[Skipped, ...]:
        """Flashgen's and others' results that failed the check."""
        return tuple(skipped for skipped in self.skipped if skipped.is_wrong)

    def best_peer(self, case: Case) -> Row | None:
        """The fastest of other libraries."""
        peers = [row for row in self.rows if row.peer and row.case == case]
        return min(peers, key=lambda row: row.timing.ms, default=None)

    def ratio(self, row: Row) -> float | None:
        """The speed relative to the best peer; None without peers."""
        best = self.best_peer(row.case)
        return None if best is None else best.timing.ms / row.timing.ms

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as for JSON."""
        skipped = [{"algorithm": s.algorithm, "case": str(s.case), "reason": s.reason} for s in self.skipped]
        rows = [row.as_dict() for row in self.rows]
        return {"schema": SCHEMA, "device": self.device, "rows": rows, "skipped": skipped}

    def __str__(self) -> str:
        titles = dict.fromkeys(row.case.title for row in self.rows)
        tables = ["\n".join((title, *columns(self._cells(title)))) for title in titles]
        notes = "\n".join(reasons(self.skipped))
        return "\n\n".join([self.device, *tables, *([notes] if notes else [])])

    def _cells(self, title: str) -> Iterator[tuple[str, ...]]:
        rows = [row for row in self.rows if row.case.title == title]
        yield _DECODE_COLUMNS if rows[0].case.is_decode else _COLUMNS
        for row in sorted(rows, key=lambda row: (row.case.len, row.case.batch, row.timing.ms)):
            ratio = self.ratio(row)
            yield (
                str(row.case.len),
                row.algorithm,
                f"{row.timing.ms:.4g}",
                f"{100 * row.timing.spread:.1f}%" if row.timing.rounds > 1 else "once",
                f"{row.gbps if row.case.is_decode else row.tflops:.4g}",
                f"{row.bytes / 2**20:.1f} MiB" if row.bytes else "-",
                "-" if ratio is None else "best peer" if row is self.best_peer(row.case) else f"{ratio:.2f}x",
            )


def reasons(skipped: Iterable[Skipped]) -> Iterator[str]:
    """A line for each candidate and reason, with the cases they are about."""
    cases: dict[tuple[str, str], list[Case]] = {}
    for s in skipped:
        cases.setdefault((s.algorithm, s.reason), []).append(s.case)
    for (algorithm, reason), found in cases.items():
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        yield f"not timed: {algorithm} ({found[0]}{more}): {reason}"


def write_json(value: dict[str, Any], path: Path) -> None:
    """Writes a file so that a reader finds the old one or the whole new one; makes its directory."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    partial.write_text(json.dumps(value, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    os.replace(partial, path)
