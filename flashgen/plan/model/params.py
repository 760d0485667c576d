"""The parameter tables: which fields each kernel's struct has, in which order."""

from __future__ import annotations

from flashgen.plan.model.parts import Param, ParamTable

_NOTES = {
    "lse": "log-sum-exp, (batch, heads_q, len_q)",
    "dsum": "D = rowsum(dO * O) - dlse, (batch, heads_q, len_q)",
    "dlse": "gradient of lse, (batch, heads_q, len_q); null where it is zero",
    "dq_accum": "workspace that dQ is summed in",
    "head_counts": "tiles of dQ given out to be finished; of each head, tiles of keys done; tiles of dQ finished",
    "sum_heads": "heads that dq_accum has room for",
    "whole_tiles": "tiles of keys that are not cut into parts",
    "tile_parts": "parts of each of the others",
    "part_sums": "of how many of these the place of a group's dQ has room for dK and dV",
    "part_heads": "heads that are counted besides those that there are, for such places",
    "part_counts": "words of dq_accum behind sums: how many parts of tiles that are cut have been added",
    "o_partial": "of each split O of its keys alone, (splits, batch, heads_q, len_q, head_dim_v)",
    "lse_partial": "and its log-sum-exp, (splits, batch, heads_q, len_q)",
    "len_new": "keys that are put into the cache",
    "group": "query heads per key/value head",
    "band_lower": "key k is allowed for query q when band_lower <= k - q <= band_upper",
    "scale_log2": "scale * log2(e)",
    "counter": "tiles given out, then blocks that are done; 0 between launches",
    "q_tiles": "tiles of queries of one head",
    "tiles": "tiles of all heads of all sequences",
    "kv_tiles": "tiles of keys of one head",
    "turns": "of each tile of queries one more than the last tile of keys that has added to its dQ",
    "row_stats": "of each tile of queries what its rows subtract from their logits, then their D, negated",
}
_SIZES = ("heads_q", "heads_kv", "len_q", "len_kv", "group", "band_lower", "band_upper")


def _table(
    reads: tuple[str, ...],
    writes: tuple[str, ...],
    *,
    row_reads: tuple[str, ...] = (),
    row_writes: tuple[str, ...] = (),
    sizes: tuple[str, ...] = _SIZES,
    scales: tuple[str, ...] = ("scale_log2",),
    maps: tuple[str, ...] = (),
    counts: tuple[str, ...] = (),
) -> ParamTable:
    """Maps, pointers, strides, sizes, scales: widest first, so the struct has no holes."""
    boxes = [Param(f"{t}_map", "map", "TensorMap", "for TMA" if i == 0 else "") for i, t in enumerate(maps)]
    pointers = [Param(t, "void*", "const element_t*") for t in reads]
    pointers += [Param(t, "void*", "element_t*") for t in writes]
    pointers += [Param(t, "void*", "const float*", _NOTES.get(t, "")) for t in row_reads]
    pointers += [Param(t, "void*", "float*", _NOTES.get(t, "")) for t in row_writes]
    pointers += [Param(t, "void*", "u32*", _NOTES.get(t, "")) for t in counts]
    strides = [
        Param(f"{t}_{axis}", "int64", "i64", "strides are in elements" if i == j == 0 else "")
        for i, t in enumerate((*reads, *writes))
        for j, axis in enumerate(("batch", "row", "head"))
    ]
    numbers = [Param(name, "int32", "i32", _NOTES.get(name, "")) for name in sizes]
    floats = [Param(name, "float", "float", _NOTES.get(name, "")) for name in scales]
    return ParamTable((*boxes, *pointers, *strides, *numbers, *floats))


FORWARD = _table(("q", "k", "v"), ("o",), row_writes=("lse",))
FORWARD_SCORE = _table(("q", "k", "v"), ("o",), row_writes=("lse",), scales=("scale", "scale_log2"))


def _sm90(*scales: str) -> ParamTable:
    """Forward by TMA; v and o themselves are for what it cannot do."""
    return _table(
        ("v",),
        ("o",),
        row_writes=("lse",),
        sizes=(*_SIZES, "q_tiles", "tiles"),
        scales=scales,
        maps=("q", "k", "v", "o"),
        counts=("counter",),
    )


FORWARD_SM90 = _sm90("scale_log2")
FORWARD_SM90_SCORE = _sm90("scale", "scale_log2")


#: Of tiles of keys, the last of which may be cut.
_PARTS = ("whole_tiles", "tile_parts", "part_sums", "part_heads")


def _main_sm90(*reads: str, row_reads: tuple[str, ...] = (), ordered: bool = False, cuts: bool = False) -> ParamTable:
    """Backward by TMA; ``reads`` and ``row_reads`` are for what it cannot do."""
    return _table(
        reads,
        (),
        row_reads=row_reads,
        row_writes=("dq_accum",),
        sizes=(
            *_SIZES,
            "q_tiles",
            "kv_tiles",
            "tiles",
            *(() if ordered else ("sum_heads",)),
            *(_PARTS if cuts else ()),
        ),
        scales=("scale", "scale_log2"),
        maps=("q", "k", "v", "dout", "row_stats", "dk", "dv", *(("dq",) if ordered else ("dq_accum", "dq"))),
        counts=("counter", "turns" if ordered else "head_counts"),
    )


MAIN_SM90 = _main_sm90()
#: Where the last tiles of keys may be cut.
MAIN_SM90_PARTS = _main_sm90(cuts=True)
#: Where a mask cuts tiles.
MAIN_SM90_MASKED = _main_sm90("q", "dout", row_reads=("row_stats",))
#: Where dQ is summed in a fixed order.
MAIN_SM90_ORDERED = _main_sm90(ordered=True)
MAIN_SM90_ORDERED_MASKED = _main_sm90("q", "dout", row_reads=("row_stats",), ordered=True)


def _wide_sm90(reads: tuple[str, ...], writes: tuple[str, ...], tiles: str, **more: tuple[str, ...]) -> ParamTable:
    """Backward by two kernels: results leave from registers."""
    return _table(
        reads,
        writes,
        sizes=(*_SIZES, *tiles.split(), "tiles"),
        scales=("scale", "scale_log2"),
        counts=("counter",),
        **{"maps": ("q", "k", "v", "dout"), **more},
    )


KEYS_SM90 = _wide_sm90((), ("dk", "dv"), "q_tiles kv_tiles", maps=("q", "k", "v", "dout", "row_stats"))
QUERY_SM90 = _wide_sm90((), ("dq",), "q_tiles", row_reads=("row_stats",))
#: Where a mask cuts tiles.
QUERY_SM90_MASKED = _wide_sm90(("k",), ("dq",), "q_tiles", row_reads=("row_stats",))


def _prepare(*writes: str, reads: tuple[str, ...] = ("dlse",), **more: tuple[str, ...]) -> ParamTable:
    """The rows of O and dO, and what becomes of them."""
    fields = {"sizes": ("heads_q", "len_q"), "scales": (), **more}
    return _table(("o", "dout"), (), row_reads=reads, row_writes=writes, **fields)


PREPARE = _prepare("dsum", "dq_accum")
PREPARE_DETERMINISTIC = _prepare("dsum")


def _prepare_sm90(*writes: str, **more: tuple[str, ...]) -> ParamTable:
    """Rows' statistics besides."""
    return _prepare("dsum", "row_stats", *writes, reads=("lse", "dlse"), scales=("scale",), **more)


def _prepare_sums(*sizes: str) -> ParamTable:
    """Where sums of dQ are cleared, and finished in any order."""
    return _prepare_sm90("dq_accum", sizes=(*sizes, "heads_q", "len_q", "sum_heads"), counts=("head_counts",))


PREPARE_SM90 = _prepare_sums()
#: Where dK and dV may be summed in memory, too.
PREPARE_SM90_PARTS = _prepare_sums("part_counts", "batch")
#: dQ is not cleared: the first tile of keys that adds to it stores.
PREPARE_SM90_ORDERED = _prepare_sm90(counts=("turns",))
#: Nor is there anything to add to.
PREPARE_WIDE_SM90 = _prepare_sm90()
MAIN = _table(
    ("q", "k", "v", "dout"),
    ("dk", "dv"),
    row_reads=("lse", "dsum"),
    row_writes=("dq_accum",),
    scales=("scale", "scale_log2"),
)
MAIN_DETERMINISTIC = _table(
    ("q", "k", "v", "dout"), ("dk", "dv"), row_reads=("lse", "dsum"), scales=("scale", "scale_log2")
)
QUERY = _table(("q", "k", "v", "dout"), ("dq",), row_reads=("lse", "dsum"), scales=("scale", "scale_log2"))
FINISH = _table((), ("dq",), row_reads=("dq_accum",), sizes=("heads_q", "len_q"), scales=("scale",))
#: dS of all pairs, for the gradients of captured tensors.
PAIRS = _table(
    ("q", "k", "v", "dout"),
    (),
    row_reads=("lse", "dsum"),
    sizes=("batch", *_SIZES),
    scales=("scale", "scale_log2"),
)
#: O and L of several splits into one.
COMBINE = _table(
    (),
    ("o",),
    row_reads=("o_partial", "lse_partial"),
    row_writes=("lse",),
    sizes=("batch", "heads_q", "len_q", "splits"),
    scales=(),
)
#: New keys and values into a cache, and queries turned on the way.
APPEND = _table(
    ("q", "new_k", "new_v"),
    ("k", "v", "rotated_q"),
    sizes=("heads_q", "heads_kv", "len_q", "len_kv", "len_new"),
    scales=(),
)
SINK = _table((), (), row_reads=("lse", "dsum"), sizes=("heads_q", "len_q", "len_kv"), scales=())
