"""Packed sequences (varlen): checked and planned as a batch of one that holds all rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from flashgen.errors import ArgumentError
from flashgen.launch.arrays.array import ArrayInfo
from flashgen.launch.call.packing import Value
from flashgen.launch.call.prepared import Output, make_steps
from flashgen.launch.target import Ready, Step
from flashgen.plan.model.plans import Pass, Problem, Role
from flashgen.plan.varlen import STARTS
from flashgen.spec import Mask

_LAYOUTS = {"q": "(total_q, heads_q, head_dim)", "k": "(total_k, heads_kv, head_dim)", "lse": "(heads_q, total_q)"}
_LAYOUTS |= {"dlse": _LAYOUTS["lse"], "v": "(total_k, heads_kv, head_dim_v)"}
_LAYOUTS |= dict.fromkeys(("out", "do", "qv"), "(total_q, heads_q, head_dim_v)")
#: The arguments with a row for each query.
_QUERIES = ("q", "qv")
#: What each pass writes, by row.
_WRITTEN: Mapping[Pass, tuple[str, ...]] = {"forward": ("o", "lse"), "backward": ("dq", "dk", "dv")}
_VARLEN = "this kernel was built with varlen=True"
#: Farther than any key, with room for a length to be added in 32 bits.
_FAR = 2**30


def as_batch(infos: Sequence[ArrayInfo], because: str = _VARLEN) -> list[ArrayInfo]:
    """The arrays with a batch dimension of one."""
    problems = list(_wrong_ranks(infos, because))
    if problems:
        raise ArgumentError("\n".join(problems))
    return [replace(info, shape=(1, *info.shape), strides=(0, *info.strides)) for info in infos]


def queries_as_batch(infos: Sequence[ArrayInfo]) -> list[ArrayInfo]:
    """The arrays of a call with a cache, whose queries alone are packed."""
    packed = as_batch([info for info in infos if info.name in _QUERIES], "the call has cache.cu_seqlens_q")
    by_name = {info.name: info for info in packed}
    return [by_name.get(info.name, info) for info in infos]


def without_batch(outputs: Sequence[Output]) -> tuple[Output, ...]:
    """The outputs to return; workspaces have no batch dimension."""
    return tuple(o._replace(shape=o.shape[1:]) if len(o.shape) > 1 else o for o in outputs)


def longest(rows: Problem, sequences: int, lengths: tuple[int, int]) -> Problem:
    """The problem size for grids: every sequence counts as the longest."""
    len_q, len_kv = lengths
    return replace(
        rows,
        batch=sequences,
        len_q=min(len_q, rows.len_q),
        len_kv=min(len_kv, rows.len_kv),
        packed_rows=(rows.len_q, rows.len_kv),
    )


def packed_values(mask: Mask, rows: Problem) -> dict[str | None, Value]:
    """The parameters that only packed sequences have."""
    return {"total_q": rows.len_q, "total_kv": rows.len_kv, **band_values(mask)}


def band_values(mask: Mask) -> dict[str | None, Value]:
    """The bands before the lengths of a sequence are known."""
    values: dict[str | None, Value] = {}
    for name, band in (("band", mask.bottom_right), ("corner", mask.top_left)):
        values[f"{name}_lower"] = -_FAR if band.left is None else -min(band.left, _FAR)
        values[f"{name}_upper"] = _FAR if band.right is None else min(band.right, _FAR)
    return values


def clear_gaps_steps(
    kernels: Mapping[Role, Ready],
    pass_: Pass,
    rows: Problem,
    values: Mapping[str | None, Value],
    names: Sequence[str],
) -> tuple[Step, ...]:
    """The launch that clears rows outside every sequence. It comes last: the combine kernel writes them, too."""
    # A backward pass reads O and the log-sum-exp, and must not clear them.
    wanted = {*STARTS, *_WRITTEN[pass_]}
    own = [name if name in wanted else "" for name in names]
    written = rows if pass_ == "backward" else replace(rows, len_kv=0)
    return make_steps(kernels, ("clear_gaps",), written, values, {}, own)


def _wrong_ranks(infos: Sequence[ArrayInfo], because: str) -> Iterator[str]:
    for info in infos:
        if len(info.shape) != _LAYOUTS[info.name].count(",") + 1:
            yield f"{info.name} has shape {info.shape}; {because} and takes {_LAYOUTS[info.name]}"
