"""Which calls use the decode kernel, how their keys are cut into parts, and the workspace that parts take."""

from __future__ import annotations

from itertools import count

from flashgen.errors import ArgumentError
from flashgen.plan.model.plans import KernelPlan, Problem

#: From so many queries on, the rows of one head fill a tile of the forward kernels. With fewer, the decode kernel never
#: reads keys more often than those, because its tiles hold the rows of all heads of a group.
PROMPT_QUERIES = 64
#: The parameter of kernels whose blocks form teams, the largest team, and the share of its blocks that have rows.
TEAM = "team"
_LARGEST_TEAM, _MIN_USED = 4, 0.8
#: Kernels count tiles in 32 bits.
_MAX_UNITS = 2**31 - 1
#: Keys of a part with ``batch_invariant=True``: enough to hide the merge of parts.
_PART_KEYS = 4096
#: Fixed cost of an item (loading Q, storing or merging results), as bytes that reach a multiprocessor meanwhile.
ITEM_BYTES = 128 * 1024
#: Bytes that reach a multiprocessor of an H200 in a nanosecond: keys from device memory, and parts in L2.
_READ_RATE, _MERGE_RATE = 36, 64
#: Rows that the lanes of a warp merge at a time, and bytes of a number in a part.
_MERGED_ROWS, _PART_BYTES = 8, 4


def prefers_decode(decode: KernelPlan, problem: Problem, *, batch_invariant: bool) -> bool:
    """Whether a call uses the decode kernel, where a plan has others.

    The number of queries of the longest sequence decides. Batch-invariant calls always use this kernel, so that a
    sequence has the same one in any batch.
    """
    few = problem.len_q < PROMPT_QUERIES or batch_invariant
    return few and problem.len_kv > 0 and _units(decode, problem) <= _MAX_UNITS


def item_tiles(item_bytes: int, tile_bytes: int, blocks: int = 1) -> int:
    """The fixed cost of an item, in tiles of keys and values, where so many blocks share a multiprocessor."""
    return -(-item_bytes // (tile_bytes * blocks))


def read_time(tile_bytes: int, blocks: int = 1) -> float:
    """Nanoseconds for a tile of keys and values to arrive, where so many blocks share a multiprocessor."""
    return tile_bytes * blocks / _READ_RATE


def merged_parts(tile_time: float, columns: int) -> int:
    """How many parts of eight rows and so many columns a block merges in the time of a tile, in nanoseconds."""
    return max(1, round(tile_time * _MERGE_RATE / (_MERGED_ROWS * columns * _PART_BYTES)))


def min_units(decode: KernelPlan, tiles: int, rows: int) -> int:
    """How many units a block gets at least, where an item has ``rows`` rows and ``tiles`` tiles of keys.

    min_units() in scheduler.cuh computes the same.

    Parts of n tiles take n to compute side by side, and tiles / n parts are merged one after another. The sum is least
    where both take equally long. If an item cut so takes no less than a whole one, it stays whole.
    """
    merged, fixed = (int(decode.constant(name)) for name in ("merged_parts", "item_tiles"))
    row_groups = -(-min(rows, int(decode.constant("tile_q"))) // _MERGED_ROWS)
    part = next(n for n in count(1) if n * n * merged >= tiles * row_groups)
    merge = tiles * row_groups // (part * merged)
    return part if part + merge + fixed < tiles else max(tiles, 1) + fixed


def check_units(decode: KernelPlan, problem: Problem) -> None:
    """Raises ArgumentError for a call of more tiles than this kernel counts."""
    units = _units(decode, problem)
    if units > _MAX_UNITS:
        raise ArgumentError(
            f"q has batch {problem.batch} and length {problem.len_q}, and a sequence has room for {problem.len_kv} "
            f"keys: {units} tiles, of at most {_MAX_UNITS}; split the batch or the queries"
        )


def part_tiles(decode: KernelPlan, problem: Problem, splits: int, *, batch_invariant: bool) -> int:
    """Tiles of keys of a part; 0 if blocks share all tiles equally.

    The parts of a batch-invariant call do not depend on the room in the cache, which may grow with the batch.
    """
    if batch_invariant:
        return _PART_KEYS // decode.grid_tile
    return -(-_key_tiles(decode, problem) // splits) if splits else 0


def partial_count(decode: KernelPlan, problem: Problem, tiles_of_part: int, blocks: int) -> int:
    """How many parts the workspace holds. With 0 ``tiles_of_part`` the grid's ``blocks`` share all tiles equally."""
    if not tiles_of_part:
        return 2 * blocks
    team = team_size(decode, problem, blocks)
    items = problem.batch * problem.heads_kv * team * -(-row_tiles(decode, problem) // team)
    return items * -(-_key_tiles(decode, problem) // tiles_of_part)


def team_size(decode: KernelPlan, problem: Problem, blocks: int) -> int:
    """How many of the grid's blocks go over the same keys at the same time, each for different tiles of rows.

    It is the largest size with which enough of a team's blocks have rows.
    """
    if TEAM not in decode.params.names:
        return 1
    tiles = row_tiles(decode, problem)
    sizes = (size for size in range(min(_LARGEST_TEAM, tiles, blocks), 1, -1) if _used(tiles, size) >= _MIN_USED)
    return next(sizes, 1)


def _used(tiles: int, team: int) -> float:
    """The share of a team's blocks that have rows, over all rounds."""
    return tiles / (team * -(-tiles // team))


def partial_rows(decode: KernelPlan, problem: Problem) -> int:
    """Rows of a part."""
    return min(int(decode.constant("tile_q")), _rows(problem))


def _rows(problem: Problem) -> int:
    return problem.len_q * problem.heads_q // max(problem.heads_kv, 1)


def row_tiles(decode: KernelPlan, problem: Problem) -> int:
    """Tiles of rows of a key/value head of the longest sequence."""
    return -(-_rows(problem) // int(decode.constant("tile_q")))


def _items(decode: KernelPlan, problem: Problem) -> int:
    """Tiles of rows of all key/value heads and sequences, at most."""
    return problem.batch * problem.heads_kv * row_tiles(decode, problem)


def _units(decode: KernelPlan, problem: Problem) -> int:
    """What all items count as, at most."""
    return (_key_tiles(decode, problem) + int(decode.constant("item_tiles"))) * _items(decode, problem)


def _key_tiles(decode: KernelPlan, problem: Problem) -> int:
    return -(-problem.len_kv // decode.grid_tile)
