"""The formulas of the named masks and scores: what a text says in place of a call such as ``softcap(30.0)``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from flashgen.expr import Traced, text
from flashgen.spec import score
from flashgen.spec.masks import named as masks
from flashgen.spec.masks.mask import Mask
from flashgen.spec.score import Score


@dataclass(frozen=True, slots=True)
class Formula:
    """The field of a spec file that it belongs to, its text, and what the text captures."""

    field: str
    text: str
    captured: Mapping[str, Any]


#: Masks that are bands have words of their own in files.
BANDS = {
    "full": "leave the mask out",
    "causal": "write mask='causal'",
    "window": "write mask={left = 512, right = 0}",
    "sliding_window": "write mask={left = 512, right = 0}",
}


def _zeros(dtype: str, *shape: int) -> Any:
    return np.zeros(shape, dtype)


#: One example of each. The formula is read off the mask or score itself, so it cannot differ from it.
_EXAMPLES: dict[str, Callable[[], Mask | Score]] = {
    "prefix_lm": lambda: masks.prefix_lm(128),
    "document": lambda: masks.document(_zeros("int32", 2, 2)),
    "dilated": lambda: masks.dilated(4),
    "global_tokens": lambda: masks.global_tokens(16),
    "chunked": lambda: masks.chunked(1024),
    "block_sparse": lambda: masks.block_sparse(_zeros("bool", 2, 2), 64),
    "key_padding": lambda: masks.key_padding(_zeros("int32", 2)),
    "softcap": lambda: score.softcap(30.0),
    "alibi": lambda: score.alibi(_zeros("float32", 2)),
    "bias": lambda: score.bias(_zeros("float32", 2, 2, 2, 2)),
    "relative_bias": lambda: score.relative_bias(_zeros("float32", 2, 65)),
    "sink": lambda: score.sink(_zeros("float32", 2)),
}


def formula(name: str) -> Formula | None:
    """An example of the mask or score of that name; None for other names and for ``BANDS``."""
    if name not in _EXAMPLES:
        return None
    example = _EXAMPLES[name]()
    if isinstance(example, Mask):
        return _formula("mask.where", example.traced)
    return _formula("sink", example.sink) if example.sink else _formula("score", example.traced)


def _formula(field: str, traced: Traced) -> Formula:
    return Formula(field, text(traced.root), {**traced.scalars, **traced.tensors})
