"""Threads of a block: who they are, shuffles, votes and barriers."""

from __future__ import annotations

import numpy as np

from conformance.case import Array, Case
from conformance.inputs import noise, unwritten, words


def _shuffle(label: str, variant: str, sources: Array) -> Case:
    return Case(
        "shuffle",
        label,
        f"Variant::{variant}",
        inputs={"x": words(64, seed=1), "sources": sources.astype(np.int32)},
        outputs={"out": unwritten((32, 64))},
        threads=64,
    )


def _vote(label: str, variant: str) -> Case:
    # From rounds in which nearly all hold to rounds in which hardly any does, and one with none at all.
    chance = np.linspace(0.5, 0, 40) ** 3
    x = (noise(40 * 96, 2).reshape(40, 96) / 2.0**64 < chance[:, None]).astype(np.uint8)
    return Case("vote", label, f"Variant::{variant}", inputs={"x": x}, outputs={"out": unwritten((40, 96))}, threads=96)


def _sync(label: str, variant: str) -> Case:
    return Case(
        "sync",
        label,
        f"Variant::{variant}",
        inputs={"x": words(128, seed=3)},
        outputs={"out": unwritten((16, 128))},
        threads=128,
        smem_bytes=512,
    )


_ROUND, _LANE = np.mgrid[0:32, 0:32]

CASES = (
    Case(
        "index",
        "all",
        "Variant::kThreadAndBlock",
        outputs={"out": unwritten((12, 64, 8), np.int32)},
        grid=(3, 2, 2),
        threads=64,
        smem_bytes=2048,
    ),
    Case("grid_size", "two-rows", "Variant::kAlongX", outputs={"out": unwritten((10, 32), np.int32)}, grid=(5, 2, 1)),
    _shuffle("float-one-source", "kFloat", _ROUND),
    _shuffle("float-scattered", "kFloat", (_LANE * 7 + _ROUND * 5) % 32),
    _shuffle("float-beyond-the-warp", "kFloat", _LANE + 32 * (_ROUND - 16)),
    _shuffle("integer-scattered", "kInteger", (_LANE * 11 + _ROUND) % 32),
    _shuffle("integer-beyond-the-warp", "kInteger", _ROUND * 37 - 500 - _LANE),
    _shuffle("xor-every-mask", "kXor", _ROUND),
    _vote("warp", "kWarp"),
    _vote("block", "kBlock"),
    _vote("ballot", "kBallot"),
    _vote("lowest-bit", "kLowestBit"),
    _sync("warp", "kWarp"),
    _sync("block", "kBlock"),
    _sync("block-any", "kBlockAny"),
)
