"""The scales of 8-bit queries, keys and values: what each row is multiplied by before anything else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypedDict

import numpy as np

from flashgen.errors import ArgumentError
from flashgen.oracle.problem import Array, Problem, array_of
from flashgen.spec import AttentionSpec


class Scales(TypedDict, total=False):
    """The scales of a call. A scale that is left out, or None, is 1."""

    q_scale: Any
    k_scale: Any
    v_scale: Any


def scaled(spec: AttentionSpec, problem: Problem, scales: Scales) -> Problem:
    """The same call with its rows multiplied by their scales, in the dtype of its arrays."""
    given = {name: value for name, value in scales.items() if value is not None}
    if not given:
        return problem
    if not spec.element.is_eight_bit:
        raise ArgumentError(f"{', '.join(given)} is for dtype='e4m3', and dtype={spec.dtype!r}; leave it out")
    rows = {name: getattr(problem, name[0]) for name in given}
    with np.errstate(all="ignore"):
        changed = {name[0]: rows[name] * _of_rows(spec, name, given[name], rows[name]) for name in given}
    return replace(problem, **changed)


def _of_rows(spec: AttentionSpec, name: str, value: Any, rows: Array) -> Array:
    """The scale of each row, (batch, length, heads, 1), as a float32 number in the dtype of the rows."""
    batch, length, heads, _ = rows.shape
    scale: Array = array_of(name, value).astype(np.float32).astype(rows.dtype)
    if scale.ndim == 0:
        return scale
    if spec.scale_block is not None:
        blocks = (batch, heads, -(-length // spec.scale_block))
        if scale.shape != blocks:
            raise ArgumentError(f"{name} has shape {scale.shape}; for blocks of {spec.scale_block} rows pass {blocks}")
        of_rows = np.repeat(scale, spec.scale_block, axis=2)[:, :, :length]
        rows_first: Array = of_rows.transpose(0, 2, 1)[..., None]
        return rows_first
    if scale.shape not in ((1,), (heads,), (batch, heads)):
        raise ArgumentError(f"{name} has shape {scale.shape}; pass (), (1,), {(heads,)} or {(batch, heads)}")
    return np.broadcast_to(scale, (batch, heads))[:, None, :, None]
