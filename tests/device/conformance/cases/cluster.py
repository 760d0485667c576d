"""Blocks together: clusters, grids that wait for all their blocks, and grids that follow each other."""

from __future__ import annotations

from typing import Any

import numpy as np

from conformance.case import Case
from conformance.inputs import integers, unwritten

_WORDS = 256
_BLOCKS, _THREADS = 8, 64


def _cluster(label: str, variant: str, size: int) -> Case:
    blocks = 2 * size
    return Case(
        "cluster",
        f"{label}-of-{size}",
        f"Variant::{variant}",
        # Every word is another one; the record of counted ones is short.
        inputs={"x": np.arange(1, blocks * _WORDS + 1, dtype=np.uint32).reshape(blocks, _WORDS)},
        outputs={"out": unwritten((blocks, _WORDS))},
        grid=(blocks, 1, 1),
        threads=_THREADS,
        smem_bytes=4 * _WORDS,
        cluster=size,
    )


def _grid(label: str, variant: str, *outputs: str, **options: Any) -> Case:
    before = {
        "sums": np.array([5], np.int32),
        "total": np.array([100], np.float32),
        "counter": np.zeros(1, np.uint32),
        "out": np.zeros((_BLOCKS, _THREADS), np.uint32),
    }
    return Case(
        "grid",
        label,
        f"Variant::{variant}",
        inputs={"blocks": _BLOCKS, "x": integers((_BLOCKS, _THREADS), -1000, 1000, seed=51).astype(np.int32)},
        outputs={name: before[name] for name in outputs},
        grid=(_BLOCKS, 1, 1),
        threads=_THREADS,
        **options,
    )


CASES = (
    *(
        _cluster(label, variant, size)
        for label, variant in (
            ("rank", "kRank"),
            ("load", "kLoad"),
            ("load-four", "kLoadFour"),
            ("store", "kStore"),
            ("store-four", "kStoreFour"),
            ("relaxed", "kRelaxed"),
        )
        for size in (2, 3, 8)
    ),
    _cluster("load", "kLoad", 1),
    _grid("tickets", "kTickets", "counter", "out"),
    _grid("last", "kLast", "counter", "out", "sums"),
    _grid("sums", "kSums", "sums", "total"),
    _grid("bits", "kBits", "counter"),
    _grid("barrier", "kBarrier", "counter", "out", cooperative=True),
    _grid("flags", "kFlags", "counter", "out", cooperative=True),
    _grid("dependent", "kDependent", "out", launches=3),
)
