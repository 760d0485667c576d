"""What a cache of keys and values adds to the forward kernel of a spec that has one, and the kernels beside it."""

from __future__ import annotations

from dataclasses import replace

from flashgen.plan.model.naming import kernel_name
from flashgen.plan.model.params import APPEND, COMBINE
from flashgen.plan.model.plans import Constant, KernelPlan, Param, ParamTable, SmemMap
from flashgen.spec import AttentionSpec, full

#: Where the splits of a call leave their results.
PARTIALS = ("o_partial", "lse_partial")
#: Say where the queries of each sequence begin, and how many keys all before it have.
PACKED_QUERIES, COUNTED_KEYS = "cu_seqlens_q", "cu_seqlens_k"
_WARPS = 4
_APPENDED_ROWS = 8
_CORNER_NOTE = "the band of what is aligned at the top left; band_...: at the bottom right"
_TABLE_NOTE = "the pages of each sequence; beyond its length it says nothing"
#: What a parameter of any forward kernel means here.
_NOTED = {"len_kv": "room for keys in each sequence", "band_lower": "from where the last query and the last key meet"}
_NOTES = {
    "cache_seqlens": "how many keys each sequence has, and had before some were appended; null: as many as fit",
    "cache_batch_idx": "its row; null: its own number",
    "cache_leftpad": "how many of its first keys are not there; null: none",
    "block_table": _TABLE_NOTE,
    "cu_seqlens_q": "where its queries begin among those of all; null: they have a batch of their own",
    "cu_seqlens_k": "how many keys all before it have, instead of cache_seqlens; null: that says it",
}


def cache_arrays(spec: AttentionSpec) -> tuple[str, ...]:
    """The arrays that say where the keys of each sequence lie, in the order in which a call hands over their addresses.

    Any but the table of pages may be left out.
    """
    table = ("block_table",) if spec.cache == "paged" else ()
    return ("cache_seqlens", "cache_batch_idx", "cache_leftpad", *table, PACKED_QUERIES, COUNTED_KEYS)


def with_cache(kernel: KernelPlan) -> KernelPlan:
    """The forward kernel, finding keys in the cache, and going over one split of them."""
    if kernel.role != "forward":
        return kernel
    spec = kernel.spec
    partials = [p for p in COMBINE.params if p.name in PARTIALS]
    own = [
        *_places(spec),
        *(replace(p, declared="float*") for p in partials),
        Param("splits", "int32", "i32", "blocks that share the keys of a tile of queries"),
        Param("appended", "int32", "i32", "keys that were put behind those that cache_seqlens counts"),
        Param("corner_lower", "int32", "i32", _CORNER_NOTE),
        Param("corner_upper", "int32", "i32"),
        Param("lse_batch", "int64", "i64", "rows of results from one sequence to the next; 0 where queries are packed"),
        Param("lse_head", "int64", "i64"),
        Param("lse_rows", "int64", "i64", "and from one split to the next"),
    ]
    params = [replace(p, note=_NOTED.get(p.name, p.note)) for p in kernel.params.params]
    return replace(
        kernel,
        params=ParamTable.widest_first((*params, *own)),
        switches=kernel.switches | {"cached"} | ({"paged"} if spec.cache == "paged" else set()),
        grid_splits=True,
    )


def plan_cache(forward: KernelPlan) -> tuple[KernelPlan, ...]:
    """The kernels that put new keys and values into the cache, and that combine the results of splits."""
    return _append(forward), _combine(forward)


def _append(forward: KernelPlan) -> KernelPlan:
    spec = forward.spec
    tables = [
        *(p for p in _places(spec) if p.name not in ("cache_leftpad", PACKED_QUERIES, COUNTED_KEYS)),
        Param("rotary_positions", "void*", "const i32*", "of the first new key and query; null: cache_seqlens"),
        Param("rotary_cos", "void*", "const element_t*", "(positions, rotary_dim / 2)"),
        Param("rotary_sin", "void*", "const element_t*"),
        Param("cos_row", "int64", "i64"),
        Param("sin_row", "int64", "i64"),
        Param("rotary_rows", "int32", "i32", "positions of the table"),
        Param("rotary_dim", "int32", "i32", "elements of each head that are turned; 0: none"),
        Param("interleaved", "int32", "i32", "whether neighbours are turned together, or one of each half"),
        Param("q_advance", "int32", "i32", "how far the position of a query is from that of the one before"),
    ]
    return replace(
        _beside(forward, "append", ("head_dim", "head_dim_v")),
        template="append.cu.j2",
        config_type="AppendConfig",
        params=ParamTable.widest_first((*APPEND.params, *tables)),
        grid_tile=_APPENDED_ROWS,
        switches=frozenset({"paged"} if spec.cache == "paged" else ()),
    )


def _combine(forward: KernelPlan) -> KernelPlan:
    return replace(
        _beside(forward, "combine", ("head_dim_v",)),
        template="combine.cu.j2",
        config_type="CombineConfig",
        params=COMBINE,
        grid_tile=_WARPS,
    )


def _beside(forward: KernelPlan, role: str, dims: tuple[str, ...]) -> KernelPlan:
    """A kernel that moves rows of elements: the same for every mask and score, and so is its name."""
    bare = replace(forward.spec, mask=full(), score=None)
    config = [Constant(name, forward.constant(name)) for name in dims]
    return replace(
        forward,
        name=kernel_name(bare, role, forward.arch),
        role=role,
        threads=_WARPS * 32,
        config=(*config, Constant("rows", _APPENDED_ROWS if role == "append" else _WARPS), Constant("warps", _WARPS)),
        smem=SmemMap(),
        reasons=(),
        switches=frozenset(),
        expressions=None,
        min_blocks=1,
    )


def _places(spec: AttentionSpec) -> list[Param]:
    """The parameters that say where the keys of a sequence lie."""
    pointers = [Param(name, "void*", "const i32*", _NOTES[name]) for name in cache_arrays(spec)]
    if spec.cache != "paged":
        return pointers
    return [
        *pointers,
        Param("table_row", "int64", "i64", "how far one row of the table lies behind the one before"),
        Param("page_size", "int32", "i32", "keys of a page"),
    ]
