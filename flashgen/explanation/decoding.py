"""What the decode kernel reads for a key/value head, and how far it can split that."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from flashgen.explanation.drawing import labelled
from flashgen.explanation.kinds import EMPTY

if TYPE_CHECKING:
    from flashgen.explanation.model import Explanation

#: Rows of one product by tensor cores.
_ROW_BLOCK = 16


def decode_numbers(found: Explanation) -> dict[str, int]:
    """Bytes of keys and values, tiles of keys, and the most blocks; nothing for other kernels."""
    kernel = found.forward_kernel
    if kernel is None or kernel.role != "decode":
        return {}
    visited = (found.kinds != EMPTY).any(axis=0)
    tiles = int(visited.sum())
    keys = sum(min(found.tile_kv, found.len_kv - i * found.tile_kv) for i in visited.nonzero()[0].tolist())
    least = int(kernel.constant("least_tiles")) * -(-min(found.len_q, found.tile_q) // _ROW_BLOCK)
    size = (found.spec.head_dim + found.spec.head_dim_v) * found.spec.element.bytes
    return {"kv_bytes": keys * size, "kv_tiles": tiles, "most_blocks": max(1, tiles // max(1, least))}


def decode_lines(found: Explanation) -> Iterator[str]:
    """The same in words."""
    numbers = decode_numbers(found)
    if not numbers:
        return
    size = f"at most {numbers['kv_bytes']} bytes of keys and values of a sequence, for each key/value head"
    yield labelled("reads", size)
    yield labelled("", "each key once, for all query heads that share it")
    blocks = numbers["most_blocks"]
    one = "one block takes them all" if blocks == 1 else f"up to {blocks} blocks share them, and the last one merges"
    yield labelled("split", f"{numbers['kv_tiles']} tiles of keys: {one}")
