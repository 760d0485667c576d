"""The inputs of one attention call: checked against each other and the spec, converted once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashgen.common.checks import as_float
from flashgen.common.show import show
from flashgen.errors import ArgumentError
from flashgen.expr import is_masked
from flashgen.spec import AttentionSpec

Array = NDArray[Any]
#: NumPy dtype kinds that hold no real numbers (ml_dtypes are of kind "V", so the list says what is refused).
_NOT_REAL = "bcOSUMm"


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """Arrays of one attention call in a working dtype, with their sizes by name."""

    q: Array
    k: Array
    v: Array
    do: Array | None
    scale: float

    @property
    def batch(self) -> int:
        """How many sequences."""
        return int(self.q.shape[0])

    @property
    def len_q(self) -> int:
        """Queries per sequence."""
        return int(self.q.shape[1])

    @property
    def len_kv(self) -> int:
        """Keys per sequence."""
        return int(self.k.shape[1])

    @property
    def heads(self) -> int:
        """Query heads."""
        return int(self.q.shape[2])

    @property
    def group(self) -> int:
        """Query heads that share one key/value head."""
        heads_kv = int(self.k.shape[2])
        return self.heads // heads_kv if heads_kv else 1


def read_problem(
    spec: AttentionSpec,
    q: Any,
    k: Any,
    v: Any,
    do: Any = None,
    *,
    scale: float | None = None,
    dtype: Any = np.float64,
    qv: Any = None,
) -> Problem:
    """Check every shape (one ``ArgumentError`` lists all that is wrong) and convert to ``dtype``.

    Values that are keys as well (``qv``) become columns of these: ``Q K^T + Qv V^T = [Q Qv] [K V]^T``.
    """
    given = {"q": q, "k": k, "v": v} | ({} if do is None else {"do": do}) | ({} if qv is None else {"qv": qv})
    if (qv is not None) != spec.qv:
        raise ArgumentError(f"qv={show(qv)} and a spec with qv={spec.qv} do not go together; pass qv where it is True")
    arrays = {name: array_of(name, value) for name, value in given.items()}
    problems = [
        f"{name} has dtype {a.dtype}; pass real numbers (fp16, bf16, fp32 or fp64)"
        for name, a in arrays.items()
        if a.dtype.kind in _NOT_REAL
    ]
    problems += [
        f"{name} has shape {a.shape}; pass four dimensions: (batch, length, heads, head_dim)"
        for name, a in arrays.items()
        if a.ndim != 4
    ]
    factor = as_float(spec.default_scale if scale is None else scale)
    if factor is None or not math.isfinite(factor):
        problems.append(f"scale={show(scale)} is not a finite number; leave it out for 1 / sqrt(head_dim)")
    if not problems:
        problems = _shape_violations(spec, {name: a.shape for name, a in arrays.items()})
    if problems or factor is None:
        raise ArgumentError("\n".join(problems))
    with np.errstate(all="ignore"):
        converted = {name: a.astype(dtype) for name, a in arrays.items()}
    queries, keys = converted["q"], converted["k"]
    if qv is not None:
        queries, keys = (np.concatenate([queries, converted["qv"]], -1), np.concatenate([keys, converted["v"]], -1))
    return Problem(queries, keys, converted["v"], converted.get("do"), factor)


def array_of(name: str, value: Any) -> Array:
    """The argument as an array; ArgumentError for one whose mask would be lost."""
    refuse_masked(name, value)
    return np.asarray(value)


def refuse_masked(name: str, value: Any) -> None:
    """ArgumentError for a masked array."""
    if is_masked(value):
        raise ArgumentError(f"{name} is a masked array, whose mask has no meaning here; pass {name}.filled(0)")


def gradient_of_lse(problem: Problem, dlse: Any) -> Array:
    """The gradient of the log-sum-exp in float64, (B, H, Sq); zeros for None."""
    shape = (problem.batch, problem.heads, problem.len_q)
    given: Array = np.zeros(shape) if dlse is None else array_of("dlse", dlse)
    if given.shape != shape or given.dtype.kind in _NOT_REAL:
        raise ArgumentError(f"dlse has shape {given.shape} and dtype {given.dtype}; it must be real numbers, {shape}")
    return given.astype(np.float64)


def _shape_violations(spec: AttentionSpec, shapes: dict[str, tuple[int, ...]]) -> list[str]:
    q, k, v = shapes["q"], shapes["k"], shapes["v"]
    problems = []
    for name, shape, wanted, field in (
        ("q", q, spec.head_dim, "head_dim"),
        ("k", k, spec.head_dim, "head_dim"),
        ("v", v, spec.head_dim_v, "head_dim_v"),
    ):
        if shape[3] != wanted:
            problems.append(f"{name} has shape {shape}; its last dimension must be the spec's {field}={wanted}")
    for name, shape in (("k", k), ("v", v)):
        if shape[0] != q[0]:
            problems.append(f"{name} has batch {shape[0]}, q has {q[0]}; make them equal")
    if k[1] != v[1]:
        problems.append(f"k has {k[1]} keys and v has {v[1]}; make the lengths equal")
    if k[2] != v[2]:
        problems.append(f"k has {k[2]} heads and v has {v[2]}; make the numbers of heads equal")
    if q[2] % k[2] if k[2] else q[2]:
        problems.append(f"q has {q[2]} heads and k has {k[2]}; q's must be a multiple of k's")
    if "do" in shapes and shapes["do"] != (*q[:3], spec.head_dim_v):
        problems.append(f"do has shape {shapes['do']}; it must match the output, {(*q[:3], spec.head_dim_v)}")
    if "qv" in shapes and shapes["qv"] != (*q[:3], spec.head_dim_v):
        problems.append(f"qv has shape {shapes['qv']}; with this q it must be {(*q[:3], spec.head_dim_v)}")
    return problems
