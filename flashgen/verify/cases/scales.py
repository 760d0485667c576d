"""The scales of a case with 8-bit queries, keys and values, drawn by its seed."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np

from flashgen.oracle.scales import Scales
from flashgen.spec import AttentionSpec

#: Where heads or tensors share a scale, which of its shapes is drawn.
_SHAPES = ("none", "number", "tensor", "heads", "sequences")


def drawn_scales(spec: AttentionSpec, name: str, seed: int, batch: int, lengths: tuple[int, int], heads: Any) -> Scales:
    """The arguments of a call with a batch of sequences; ``lengths`` and ``heads`` are of queries and of keys."""
    if not spec.element.is_eight_bit:
        return {}
    choice = Random(f"scales {seed} {name}")
    random = np.random.default_rng([seed, *b"scales", *name.encode()])
    kinds = [choice.choice(_SHAPES) for _ in range(3)]
    q, k, v = (_drawn(spec, random, kinds[i], batch, lengths[i > 0], heads[i > 0]) for i in range(3))
    if spec.cache:
        # The cache has its own scales.
        return {"q_scale": q}
    return {"q_scale": q, "k_scale": k, "v_scale": v}


def _drawn(spec: AttentionSpec, random: np.random.Generator, kind: str, batch: int, length: int, heads: int) -> Any:
    if kind == "none":
        return None
    if spec.scale_block is not None:
        # The bits of many blocks differ: a wrong one shows.
        return random.uniform(0.25, 2.0, (batch, heads, -(-length // spec.scale_block))).astype(np.float32)
    shapes = {"tensor": (1,), "heads": (heads,), "sequences": (batch, heads)}
    if kind == "number":
        return float(np.float32(random.uniform(0.25, 2.0)))
    return random.uniform(0.25, 2.0, shapes[kind]).astype(np.float32)
