"""mbarriers and named barriers, of a block and of a cluster."""

from __future__ import annotations

import numpy as np

from conformance.case import Case
from conformance.inputs import unwritten

_THREADS, _ROUNDS = 128, 6


def _barrier(label: str, variant: str, cluster: int = 0) -> Case:
    blocks = max(1, 2 * cluster)
    return Case(
        "barrier",
        label,
        f"Variant::{variant}",
        inputs={"x": np.arange(1, blocks * _THREADS + 1, dtype=np.uint32)},
        outputs={"out": unwritten((blocks, _ROUNDS, _THREADS))},
        grid=(blocks, 1, 1),
        threads=_THREADS,
        smem_bytes=16 + 4 * _THREADS,
        cluster=cluster,
    )


CASES = (
    _barrier("phases", "kPhases"),
    _barrier("answers", "kAnswers"),
    _barrier("answers-of-cluster", "kAnswersOfCluster"),
    _barrier("answers-at-once", "kAnswersAtOnce"),
    _barrier("again", "kAgain"),
    _barrier("named-sync", "kNamedSync"),
    _barrier("named-arrive", "kNamedArrive"),
    _barrier("named-any", "kNamedAny"),
    *(_barrier(f"remote-of-{size}", "kRemote", size) for size in (2, 4)),
)
