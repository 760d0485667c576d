"""The config that all decode kernels share: DecodeConfig in decode/config.cuh."""

from __future__ import annotations

from flashgen.plan.decode.parts import ITEM_BYTES, item_tiles, merged_parts, read_time
from flashgen.plan.model.plans import Constant
from flashgen.spec import AttentionSpec

#: Counters of a launch: one for each block whose last item others share.
COUNTERS = 1024


def decode_config(
    spec: AttentionSpec,
    *,
    rows: int,
    keys: int,
    stages: int,
    warps: Constant,
    access_bytes: int,
    tile_bytes: int,
    blocks: int = 1,
    item_bytes: int = ITEM_BYTES,
    product_time: float = 0.0,
    columns: int = 0,
    producers: int = 0,
    registers: tuple[int, int] = (0, 0),
    holds_queries: bool = False,
) -> tuple[Constant, ...]:
    """The members in the order in which they are declared.

    ``tile_bytes`` are those of the keys and values of a tile, and ``blocks`` share a multiprocessor. ``item_bytes``
    arrive in the time that an item takes besides its tiles. ``product_time`` is how long the products of a tile take,
    in nanoseconds, if that may be longer than its way from memory. ``columns`` are those of a part, ``head_dim_v`` if
    not given, and ``registers`` those of a thread that copies and of one that computes.
    """
    tile_time = max(read_time(tile_bytes, blocks), product_time)
    merged = merged_parts(tile_time, columns or spec.head_dim_v)
    return (
        Constant("head_dim", spec.head_dim),
        Constant("head_dim_v", spec.head_dim_v),
        Constant("tile_q", rows, "rows of a tile: new tokens times query heads that share a key/value head"),
        Constant("tile_kv", keys, "keys of a tile"),
        Constant("stages", stages),
        warps,
        Constant("producers", producers, "warps that only copy"),
        Constant("producer_registers", registers[0]),
        Constant("consumer_registers", registers[1]),
        Constant("holds_queries", holds_queries, "each warp keeps its rows of Q in registers"),
        Constant("merged_parts", merged, "parts of eight rows that a block merges in the time of a tile"),
        Constant("item_tiles", item_tiles(item_bytes, tile_bytes, blocks), "fixed cost of an item, in tiles"),
        Constant("has_lower", spec.mask.has_lower, "the band has a lower bound on k - q"),
        Constant("has_upper", spec.mask.has_upper, "the band has an upper bound on k - q"),
        Constant("varies_by_head", _varies_by_head(spec), "which tiles hold allowed pairs depends on the head"),
        Constant("access_bytes", access_bytes, "alignment of rows in global memory"),
    )


def _varies_by_head(spec: AttentionSpec) -> bool:
    """Whether the bounds of the mask over tiles depend on the query head."""
    rule = spec.mask.rule
    if spec.mask.rest is None or rule is None:
        return False
    from flashgen.expr.tree.nodes import USES

    return any(bool(node.uses & USES["h"]) for node in (rule.may, rule.key_begin, rule.key_end))
