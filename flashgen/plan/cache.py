"""What a KV cache adds to a spec's forward kernel, and the append and combine kernels."""

from __future__ import annotations

from dataclasses import replace

from flashgen.plan.model.naming import kernel_name
from flashgen.plan.model.params import APPEND, COMBINE
from flashgen.plan.model.plans import Constant, KernelPlan, Param, ParamTable, Role, SmemMap
from flashgen.spec import AttentionSpec, full

#: Workspaces with the partial results of the splits.
PARTIALS = ("o_partial", "lse_partial")
#: Prefix sums over the sequences: of their queries, and of their keys.
PACKED_QUERIES, COUNTED_KEYS = "cu_seqlens_q", "cu_seqlens_k"
#: What the elements of an 8-bit cache are multiplied by.
SCALES = ("k_scale", "v_scale")
#: What elements of 8-bit queries are multiplied by.
Q_SCALE = "q_scale"
#: The role of Hopper's kernel for many new queries: one block for a tile of queries and all of its keys.
PREFILL: Role = "prefill"
#: The role of the kernel for few new queries, which splits the keys by itself.
DECODE: Role = "decode"
#: The kernels of which a call with a cache runs one.
ATTENDING: tuple[Role, ...] = ("forward", PREFILL, DECODE)
_SPLITS = Param("splits", "int32", "i32", "blocks among which the keys of a tile of queries are split")
_SEQUENCES = Param("batch", "int32", "i32", "sequences")
_WARPS = 4
_APPENDED_ROWS = 8
_CORNER_NOTE = "the band of terms aligned top-left; band_... is for those aligned bottom-right"
_SCALE_NOTE = "what elements of the cache are multiplied by; null: 1"
_TABLE_NOTE = "the pages of each sequence; entries beyond its length are ignored"
#: Notes on parameters that mean something else without a cache.
_CHANGED_NOTES = {
    "len_kv": "capacity in keys of each sequence",
    "band_lower": "relative to the diagonal through the last query and the last key",
}
_NOTES = {
    "cache_seqlens": "keys of each sequence, without appended ones; null: the capacity",
    "cache_batch_idx": "row of the cache of each sequence; null: the sequence's index",
    "cache_leftpad": "first keys of each sequence to skip; null: none",
    "block_table": _TABLE_NOTE,
    "cu_seqlens_q": "first query of each packed sequence; null: queries are a batch",
    "cu_seqlens_k": "prefix sums of the sequences' keys, in place of cache_seqlens; null: use that",
}


def cache_arrays(spec: AttentionSpec) -> tuple[str, ...]:
    """The arrays that locate the keys of each sequence, in the order in which a call passes their addresses.

    All are optional except the page table and the scales of pages.
    """
    table = ("block_table",) if spec.cache == "paged" else ()
    scales = SCALES if spec.cache_dtype else ()
    return ("cache_seqlens", "cache_batch_idx", "cache_leftpad", *table, PACKED_QUERIES, COUNTED_KEYS, *scales)


def with_cache(kernel: KernelPlan) -> KernelPlan:
    """A forward kernel that reads keys from the cache; the one with the role ``forward`` handles one split of them."""
    if kernel.role not in ATTENDING:
        return kernel
    spec, splits = kernel.spec, kernel.role == "forward"
    partials = [p for p in COMBINE.params if p.name in PARTIALS] if splits else []
    own = [
        *_location_params(spec),
        *(replace(p, declared="float*") for p in partials),
        *([_SPLITS] if splits else [_SEQUENCES]),
        Param("appended", "int32", "i32", "keys of each sequence after those in cache_seqlens"),
        Param("corner_lower", "int32", "i32", _CORNER_NOTE),
        Param("corner_upper", "int32", "i32"),
        Param("lse_batch", "int64", "i64", "strides between sequences and heads; the first is 0 if queries are packed"),
        Param("lse_head", "int64", "i64"),
        Param("lse_rows", "int64", "i64", "stride between splits"),
    ]
    params = [replace(p, note=_CHANGED_NOTES.get(p.name, p.note)) for p in kernel.params.params]
    return replace(
        kernel,
        params=ParamTable.widest_first((*params, *own)),
        grid_splits=splits,
    )


def plan_cache(forward: KernelPlan) -> tuple[KernelPlan, ...]:
    """The kernels that append new keys and values to the cache, and that combine the results of splits.

    The decode kernel combines them itself. Where it is alone, it is the ``forward`` kernel.
    """
    return (_append(forward),) if forward.role == DECODE else (_append(forward), _combine(forward))


def first_scale_axis(spec: AttentionSpec) -> str:
    """What the first dimension of the scales of a cache counts, as their parameters are called."""
    return "page" if spec.page_scales else "batch"


def scale_params(spec: AttentionSpec) -> tuple[Param, ...]:
    """The parameters of kernels that read or write an 8-bit cache."""
    first = first_scale_axis(spec)
    pointers = (Param(name, "void*", "const float*", _SCALE_NOTE if name == "k_scale" else "") for name in SCALES)
    between = "pages" if spec.page_scales else "sequences"
    note = f"strides between {between} and heads; 0: they share the scale"
    strides = (
        Param(f"{name}_{axis}", "int64", "i64", note if (name, axis) == ("k_scale", first) else "")
        for name in SCALES
        for axis in (first, "head")
    )
    return *pointers, *strides


def query_scale_params() -> tuple[Param, ...]:
    """The parameters of a kernel that reads 8-bit queries with a cache."""
    return (
        Param(Q_SCALE, "void*", "const float*", "what elements of q are multiplied by; null: 1"),
        Param(f"{Q_SCALE}_batch", "int64", "i64", "stride between sequences; 0: they share the scale"),
        Param(f"{Q_SCALE}_group", "int64", "i64", "stride between heads of keys"),
        Param(f"{Q_SCALE}_head", "int64", "i64", "stride between query heads that share keys"),
    )


def with_cache_scales(table: ParamTable, spec: AttentionSpec) -> ParamTable:
    """The parameters of a forward kernel for 8-bit queries with a cache, whose O has another type."""
    own = [replace(p, declared="out_t*") if p.name == "o" else p for p in table.params]
    return ParamTable.widest_first((*own, *scale_params(spec), *query_scale_params()))


def _append(forward: KernelPlan) -> KernelPlan:
    spec = forward.spec
    tables = [
        *(p for p in _location_params(spec) if p.name not in ("cache_leftpad", PACKED_QUERIES, COUNTED_KEYS)),
        Param(
            "rotary_positions", "void*", "const i32*", "position of the first new key and query; null: cache_seqlens"
        ),
        Param("rotary_cos", "void*", "const element_t*", "(positions, rotary_dim / 2)"),
        Param("rotary_sin", "void*", "const element_t*"),
        Param("cos_row", "int64", "i64"),
        Param("sin_row", "int64", "i64"),
        Param("rotary_rows", "int32", "i32", "positions in the tables"),
        Param("rotary_dim", "int32", "i32", "elements of each head that are rotated; 0: none"),
        Param("interleaved", "int32", "i32", "1: adjacent elements form a pair; 0: one of each half"),
        Param("q_advance", "int32", "i32", "difference of the positions of consecutive queries"),
    ]
    return replace(
        _row_kernel(forward, "append", ("head_dim", "head_dim_v")),
        template="append.cu.j2",
        config_type="AppendConfig",
        params=ParamTable.widest_first((*_append_params(spec), *tables)),
        grid_tile=_APPENDED_ROWS,
    )


def _append_params(spec: AttentionSpec) -> tuple[Param, ...]:
    if spec.cache_dtype is None:
        return APPEND.params
    of_cache = (replace(p, declared="cache_t*") if p.name in ("k", "v") else p for p in APPEND.params)
    return *of_cache, *scale_params(spec)


def _combine(forward: KernelPlan) -> KernelPlan:
    return replace(
        _row_kernel(forward, "combine", ("head_dim_v",)),
        template="combine.cu.j2",
        config_type="CombineConfig",
        params=COMBINE,
        grid_tile=_WARPS,
    )


def _row_kernel(forward: KernelPlan, role: str, dims: tuple[str, ...]) -> KernelPlan:
    """A kernel that moves rows of elements. Neither the kernel nor its name depends on the mask or the score."""
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
        boxes=(),
        product_columns=(),
        overlaps_predecessor=False,
        grid_over="q",
        grid_heads="q",
        is_persistent=False,
        counters=2,
    )


def _location_params(spec: AttentionSpec) -> list[Param]:
    """The parameters that locate the keys of a sequence."""
    names = [name for name in cache_arrays(spec) if name not in SCALES]
    pointers = [Param(name, "void*", "const i32*", _NOTES[name]) for name in names]
    if spec.cache != "paged":
        return pointers
    return [
        *pointers,
        Param("table_row", "int64", "i64", "stride between rows of the table"),
        Param("page_size", "int32", "i32", "keys per page"),
    ]
