"""Forward calls with a KV cache: their sizes, splits and parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from flashgen.launch.arrays.array import ArrayInfo
from flashgen.launch.call.packed import band_values
from flashgen.launch.call.packing import Value
from flashgen.launch.call.prepared import Output, make_steps
from flashgen.launch.kvcache.cache_arrays import capacity, is_packed
from flashgen.launch.kvcache.scales import query_scale_values, scale_values
from flashgen.launch.target import Ready, Step
from flashgen.plan.model.plans import Problem, Role
from flashgen.spec import AttentionSpec


def cached_problem(rows: Problem, sequences: int, longest: int, arrays: Sequence[ArrayInfo], k: ArrayInfo) -> Problem:
    """The problem that sizes the forward kernel's grid: each sequence has as many keys as it has room for.

    ``longest`` is the number of queries of the longest packed sequence, or 0 if queries are a batch.
    """
    len_q = min(longest, rows.len_q) if longest else rows.len_q
    return replace(rows, batch=sequences, len_q=len_q, len_kv=capacity(arrays, k))


def cached_values(
    spec: AttentionSpec, rows: Problem, arrays: Sequence[ArrayInfo], q: ArrayInfo, k: ArrayInfo, splits: int
) -> dict[str | None, Value]:
    """The parameters that only calls with a cache have, except addresses; ``rows`` are those of the results."""
    table_row = next((a.strides[0] for a in arrays if a.name == "block_table"), 0)
    values: dict[str | None, Value] = {"splits": splits, "page_size": k.shape[1], "table_row": table_row}
    values |= {"lse_batch": rows.heads_q * rows.len_q, "lse_head": rows.len_q}
    values["lse_rows"] = rows.batch * rows.heads_q * rows.len_q
    if is_packed(a.name for a in arrays):
        # The results are a batch of one, with the rows of all sequences.
        values |= {"lse_batch": 0, "o_batch": 0, "total_q": rows.len_q, "total_kv": 0}
    values |= query_scale_values(spec, arrays, q, k)
    return values | band_values(spec.mask) | scale_values(spec, arrays)


def combine_steps(
    kernels: Mapping[Role, Ready],
    rows: Problem,
    splits: int,
    values: Mapping[str | None, Value],
    names: Sequence[str],
) -> tuple[Step, ...]:
    """The step that combines the results of splits. It treats the rows of all sequences alike."""
    if splits == 1:
        return ()
    own = {**values, "batch": rows.batch, "len_q": rows.len_q, "o_batch": rows.len_q * int(values["o_row"])}
    return make_steps(kernels, ("combine",), rows, own, {}, names)


def partial_outputs(rows: Problem, splits: int, head_dim_v: int) -> tuple[Output, ...]:
    """The workspaces for the results of splits; empty without splits."""
    count = 0 if splits == 1 else splits * rows.batch * rows.heads_q * rows.len_q
    return Output("o_partial", (count * head_dim_v,), "fp32"), Output("lse_partial", (count,), "fp32")
