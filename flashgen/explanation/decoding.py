"""What the decode kernel reads for a key/value head, and how far it can split that."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from flashgen.explanation.drawing import labeled
from flashgen.explanation.kinds import EMPTY
from flashgen.plan.decode.parts import min_units

if TYPE_CHECKING:
    from flashgen.plan.model.plans import KernelPlan


def decode_numbers(kernel: KernelPlan | None, kinds: Any, len_q: int, len_kv: int, tile_kv: int) -> dict[str, int]:
    """Bytes of keys and values, tiles of keys, and the most blocks, by kinds of tiles; nothing for other kernels."""
    if kernel is None or kernel.role != "decode":
        return {}
    spec = kernel.spec
    visited = (kinds != EMPTY).any(axis=0)
    tiles = int(visited.sum())
    keys = sum(min(tile_kv, len_kv - i * tile_kv) for i in visited.nonzero()[0].tolist())
    size = (spec.head_dim + spec.head_dim_v) * spec.cache_element.bytes
    return {"kv_bytes": keys * size, "kv_tiles": tiles, "most_blocks": _max_blocks(kernel, tiles, len_q)}


def _max_blocks(kernel: KernelPlan, tiles: int, rows: int) -> int:
    """The most blocks that share these tiles of one head of one sequence, on a GPU with enough multiprocessors."""
    units = tiles + int(kernel.constant("item_tiles"))
    return max(1, min(units // min_units(kernel, tiles, rows), tiles, kernel.counters))


def decode_lines(numbers: dict[str, int]) -> Iterator[str]:
    """The same in words."""
    if not numbers:
        return
    size = f"at most {numbers['kv_bytes']} bytes of keys and values of a sequence, for each key/value head"
    yield labeled("reads", size)
    yield labeled("", "each key once for a tile of rows: new tokens times the query heads that share it")
    blocks = numbers["most_blocks"]
    one = "one block takes them all"
    if blocks > 1:
        one = f"up to {blocks} blocks share them if so many run at once, and the last one merges"
    yield labeled("split", f"{numbers['kv_tiles']} tiles of keys: {one}")
