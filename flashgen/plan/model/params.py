"""The parameter tables: which fields each kernel's struct has, in which order."""

from __future__ import annotations

from dataclasses import replace

from flashgen.plan.model.parts import Param, ParamTable

#: What elements of 8-bit q, k and v are multiplied by.
INPUT_SCALES = ("q_scale", "k_scale", "v_scale")
#: What O is multiplied by besides.
V_FACTOR = "v_factor"
_NOTES = {
    "lse": "log-sum-exp, (batch, heads_q, len_q)",
    "dsum": "D = rowsum(dO * O) - dlse, (batch, heads_q, len_q)",
    "dlse": "gradient of lse, (batch, heads_q, len_q); null where it is zero",
    "dq_accum": "workspace that dQ is summed in",
    "head_counts": "tiles of dQ drawn by finishers; per head, tiles of keys added; per head, tiles of dQ finished",
    "sum_heads": "query heads in dq_accum, a ring",
    "o_partial": "O of each split of the keys, (splits, batch, heads_q, len_q, head_dim_v)",
    "lse_partial": "log-sum-exp of each split, (splits, batch, heads_q, len_q)",
    "row_partial": "of each row of a part: the reference maximum, and the sum of exponentials",
    "part_tiles": "tiles of keys of a part; 0: blocks share all tiles equally",
    "partial_rows": "rows of a part in o_partial",
    "team": "blocks that go over the same keys at the same time, each for other rows",
    "o_accum": "O so far, divided by l, (batch, heads_q, len_q, head_dim_v rounded up to 16)",
    "row_sums": "l so far, (batch, heads_q, len_q)",
    "row_maxima": "m so far, (batch, heads_q, len_q)",
    "tile_maxima": "the largest score of each row and tile of keys, (batch, heads_q, kv_tiles, len_q)",
    "tile_sums": "the sums of exponentials of each row and tile of keys",
    "tile_outputs": "P V of each tile of keys, (batch, heads_q, kv_tiles, len_q, head_dim_v)",
    "len_new": "keys to append to the cache",
    "group": "query heads per key/value head",
    "band_lower": "key k is allowed for query q when band_lower <= k - q <= band_upper",
    "scores": "S, (batch, heads_q, len_q, score_pitch)",
    "score_pitch": "elements from one row of S, P or dS to the next, a multiple of 8",
    "probabilities": "P, of the shape of S",
    "dscores": "dS, of the shape of S",
    "scale_log2": "scale * log2(e)",
    "counter": "tiles drawn, then blocks done; 0 between launches",
    "q_tiles": "tiles of queries of one head",
    "tiles": "tiles of all heads of all sequences",
    "kv_tiles": "tiles of keys of one head",
    "dq_semaphore": "per tile of queries: 1 + the last tile of keys that has added to its dQ",
    "failed_tiles": "flags of tiles of dQ, then of dK and dV, that are not finite",
    "query_flags": "how many of these are of dQ",
    "flags": "how many there are",
    "row_stats": "per tile of queries: -L in units of S, then -D",
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
    pair_reads: tuple[str, ...] = (),
    pair_writes: tuple[str, ...] = (),
) -> ParamTable:
    """Maps, pointers, strides, sizes, scales: widest first, so the struct has no holes."""
    boxes = [Param(f"{t}_map", "map", "TensorMap", "for TMA" if i == 0 else "") for i, t in enumerate(maps)]
    pointers = [Param(t, "void*", "const element_t*") for t in reads]
    pointers += [Param(t, "void*", "element_t*") for t in writes]
    pointers += [Param(t, "void*", "const float*", _NOTES.get(t, "")) for t in row_reads]
    pointers += [Param(t, "void*", "float*", _NOTES.get(t, "")) for t in row_writes]
    pointers += [Param(t, "void*", "u32*", _NOTES.get(t, "")) for t in counts]
    pointers += [Param(t, "void*", "const element_t*", _NOTES.get(t, "")) for t in pair_reads]
    pointers += [Param(t, "void*", "element_t*", _NOTES.get(t, "")) for t in pair_writes]
    strides = [
        Param(f"{t}_{axis}", "int64", "i64", "strides are in elements" if i == j == 0 else "")
        for i, t in enumerate((*reads, *writes))
        for j, axis in enumerate(("batch", "row", "head"))
    ]
    numbers = [Param(name, "int32", "i32", _NOTES.get(name, "")) for name in sizes]
    floats = [Param(name, "float", "float", _NOTES.get(name, "")) for name in scales]
    return ParamTable((*boxes, *pointers, *strides, *numbers, *floats))


FORWARD = _table(("q", "k", "v"), ("o",), row_writes=("lse",))
#: Of algorithms that scale each score as soon as it is computed.
FORWARD_SCALED = _table(("q", "k", "v"), ("o",), row_writes=("lse",), scales=("scale",))
FORWARD_FA1 = _table(
    ("q", "k", "v"), ("o",), row_writes=("lse", "o_accum", "row_sums", "row_maxima"), scales=("scale",)
)
_GRID2D_PARTS = ("tile_maxima", "tile_sums", "tile_outputs")
FORWARD_GRID2D = _table(("q", "k", "v"), ("o",), row_writes=("lse", *_GRID2D_PARTS), scales=("scale",))
FORWARD_GRID2D_COOPERATIVE = _table(
    ("q", "k", "v"),
    ("o",),
    row_writes=("lse", *_GRID2D_PARTS),
    sizes=("batch", *_SIZES),
    scales=("scale",),
    counts=("counter",),
)
FORWARD_SCORE = _table(("q", "k", "v"), ("o",), row_writes=("lse",), scales=("scale", "scale_log2"))


def _sm90(*scales: str) -> ParamTable:
    """The forward kernel for Hopper. o is also a pointer, for accesses without TMA."""
    return _table(
        (),
        ("o",),
        row_writes=("lse",),
        sizes=(*_SIZES, "q_tiles", "tiles"),
        scales=scales,
        maps=("q", "k", "v", "o"),
        counts=("counter",),
    )


#: The decode kernel. Blocks that share an item leave their parts in o_partial and row_partial.
DECODE_FORWARD = _table(
    ("q", "k", "v"),
    ("o",),
    row_writes=("lse", "o_partial", "row_partial"),
    sizes=(*_SIZES, "part_tiles", "partial_rows"),
    scales=("scale", "scale_log2"),
    counts=("counter",),
)
#: The same with a second query, for values that are part of the keys.
LATENT_FORWARD = _table(
    ("q", "k", "v", "qv"),
    ("o",),
    row_writes=("lse", "o_partial", "row_partial"),
    sizes=(*_SIZES, "part_tiles", "partial_rows", "team"),
    scales=("scale", "scale_log2"),
    counts=("counter",),
)

#: The same with TMA.
DECODE_SM90 = _table(
    ("q",),
    ("o",),
    row_writes=("lse", "o_partial", "row_partial"),
    sizes=(*_SIZES, "part_tiles", "partial_rows"),
    scales=("scale", "scale_log2"),
    counts=("counter",),
    maps=("k", "v"),
)
LATENT_SM90 = _table(
    ("q", "qv"),
    ("o",),
    row_writes=("lse", "o_partial", "row_partial"),
    sizes=(*_SIZES, "part_tiles", "partial_rows", "team"),
    scales=("scale", "scale_log2"),
    counts=("counter",),
    maps=("k", "v"),
)


def with_input_scales(table: ParamTable) -> ParamTable:
    """The parameters of a forward kernel for 8-bit q, k and v, whose O has another type."""
    pointers = [
        Param(name, "void*", "const float*", "what elements of q are multiplied by; null: 1" if i == 0 else "")
        for i, name in enumerate(INPUT_SCALES)
    ]
    note = "stride between scales; 0: a shared one"
    strides = [
        Param(f"{name}_{axis}", "int64", "i64", note if i == j == 0 else "")
        for i, name in enumerate(INPUT_SCALES)
        for j, axis in enumerate(("batch", "head"))
    ]
    own = [replace(p, declared="out_t*") if p.name == "o" else p for p in table.params]
    factor = Param(V_FACTOR, "float", "float", "what O is multiplied by besides v_scale")
    return ParamTable.widest_first((*own, *pointers, *strides, factor))


FORWARD_SM90 = _sm90("scale_log2")
FORWARD_SM90_SCORE = _sm90("scale", "scale_log2")


#: What kernels whose tiles may be repaired get besides: the flags, and where those of keys begin.
_FLAGS = ("failed_tiles",)
_FLAG_SIZES = ("query_flags",)


def _main_sm90(ordered: bool, masked: bool) -> ParamTable:
    """The fused backward kernel for Hopper."""
    return _table(
        (),
        (),
        row_writes=("dq_accum",),
        sizes=(
            *_SIZES,
            "q_tiles",
            "kv_tiles",
            "tiles",
            *(() if ordered else ("sum_heads",)),
            *(_FLAG_SIZES if masked else ()),
        ),
        scales=("scale", "scale_log2"),
        maps=("q", "k", "v", "dout", "row_stats", "dk", "dv", *(("dq",) if ordered else ("dq_accum", "dq"))),
        counts=("counter", "dq_semaphore" if ordered else "head_counts", *(_FLAGS if masked else ())),
    )


#: Keys: whether dQ is summed in a fixed order, and whether a mask may need repairs.
MAIN_SM90 = {(ordered, masked): _main_sm90(ordered, masked) for ordered in (False, True) for masked in (False, True)}


def _wide_sm90(writes: tuple[str, ...], tiles: str, masked: bool, **more: tuple[str, ...]) -> ParamTable:
    """The two backward kernels for wide heads, which store results from registers."""
    return _table(
        (),
        writes,
        sizes=(*_SIZES, *tiles.split(), "tiles", *(_FLAG_SIZES if masked else ())),
        scales=("scale", "scale_log2"),
        counts=("counter", *(_FLAGS if masked else ())),
        **{"maps": ("q", "k", "v", "dout"), **more},
    )


#: Keys: whether a mask may need repairs.
KEYS_SM90 = {
    masked: _wide_sm90(("dk", "dv"), "q_tiles kv_tiles", masked, maps=("q", "k", "v", "dout", "row_stats"))
    for masked in (False, True)
}
QUERY_SM90 = {masked: _wide_sm90(("dq",), "q_tiles", masked, row_reads=("row_stats",)) for masked in (False, True)}


def _prepare(*writes: str, reads: tuple[str, ...] = ("dlse",), **more: tuple[str, ...]) -> ParamTable:
    """The prepare kernels, which read O and dO."""
    fields = {"sizes": ("heads_q", "len_q"), "scales": (), **more}
    return _table(("o", "dout"), (), row_reads=reads, row_writes=writes, **fields)


PREPARE = _prepare("dsum", "dq_accum")
PREPARE_DETERMINISTIC = _prepare("dsum")


def _prepare_sm90(sums: str, masked: bool) -> ParamTable:
    """prepare for Hopper, which also writes row_stats. ``sums``: how dQ is summed, "ring", "ordered" or "registers".

    An ordered dQ is not cleared, because the first tile of keys that adds to it stores.
    """
    counts = {"ring": ("head_counts",), "ordered": ("dq_semaphore",), "registers": ()}[sums]
    return _prepare(
        "dsum",
        "row_stats",
        *(("dq_accum",) if sums == "ring" else ()),
        reads=("lse", "dlse"),
        sizes=("heads_q", "len_q", *(("sum_heads",) if sums == "ring" else ()), *(("flags",) if masked else ())),
        scales=("scale",),
        counts=(*counts, *(_FLAGS if masked else ())),
    )


#: Keys: how dQ is summed, and whether a mask may need repairs.
PREPARE_SM90 = {
    (sums, masked): _prepare_sm90(sums, masked) for sums in ("ring", "ordered", "registers") for masked in (False, True)
}
#: Tiles of gradients that are computed again, pair by pair.
REPAIR_SM90 = _table(
    ("q", "k", "v", "dout"),
    ("dq", "dk", "dv"),
    row_reads=("lse", "dsum"),
    sizes=(*_SIZES, "query_flags", "flags"),
    scales=("scale", "scale_log2"),
    counts=_FLAGS,
)
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
#: Of standard attention: what each kernel reads and writes of S, P and dS.
_PAIR_SIZES = ("heads_q", "len_q", "len_kv", "score_pitch", "group")
_BAND_SIZES = (*_PAIR_SIZES, "band_lower", "band_upper")
STANDARD_SCORES = _table(("q", "k"), (), row_writes=("scores",), sizes=_PAIR_SIZES, scales=("scale",))
STANDARD_SOFTMAX = _table(
    (), (), row_reads=("scores",), pair_writes=("probabilities",), row_writes=("lse",), sizes=_BAND_SIZES, scales=()
)
STANDARD_FORWARD = _table(("v",), ("o",), pair_reads=("probabilities",), sizes=_BAND_SIZES, scales=())
STANDARD_DS = _table(
    ("v", "dout"),
    (),
    row_reads=("dsum",),
    pair_reads=("probabilities",),
    pair_writes=("dscores",),
    sizes=_BAND_SIZES,
    scales=(),
)
STANDARD_DQ = _table(("k",), ("dq",), pair_reads=("dscores",), sizes=_BAND_SIZES, scales=("scale",))
STANDARD_DV = _table(("dout",), ("dv",), pair_reads=("probabilities",), sizes=_PAIR_SIZES, scales=())
STANDARD_DK = _table(("q",), ("dk",), pair_reads=("dscores",), sizes=_PAIR_SIZES, scales=("scale",))
#: dS of all pairs, for the gradients of captured tensors.
PAIRS = _table(
    ("q", "k", "v", "dout"),
    (),
    row_reads=("lse", "dsum"),
    sizes=("batch", *_SIZES),
    scales=("scale", "scale_log2"),
)
#: Combines O and L of several splits.
COMBINE = _table(
    (),
    ("o",),
    row_reads=("o_partial", "lse_partial"),
    row_writes=("lse",),
    sizes=("batch", "heads_q", "len_q", "splits"),
    scales=(),
)
#: Appends new keys and values to a cache, and applies rotary embedding.
APPEND = _table(
    ("q", "new_k", "new_v"),
    ("k", "v", "rotated_q"),
    sizes=("heads_q", "heads_kv", "len_q", "len_kv", "len_new"),
    scales=(),
)
SINK = _table((), (), row_reads=("lse", "dsum"), sizes=("heads_q", "len_q", "len_kv"), scales=())
