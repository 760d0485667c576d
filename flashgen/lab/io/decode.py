"""The decode kernel: how it splits the keys of a call, where all sequences have as many, and what that moves."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from flashgen.lab.io.sizes import FLOAT_BYTES, Sizes
from flashgen.lab.io.traffic import KernelIO
from flashgen.lab.io.visits import Side, walk
from flashgen.plan.cached_calls import CachedCall, attending_kernel
from flashgen.plan.decode.parts import min_units, row_tiles, team_size
from flashgen.plan.model.plans import AttentionPlan, KernelPlan, Role

#: Rows of one product by tensor cores.
_ROW_BLOCK = 16
#: Bytes of a row's reference maximum and sum.
_TOTAL_BYTES = 8
#: Lanes of a warp that merge the same row of parts. Each reads its maxima and sums.
_LANES_PER_ROW = 4


@dataclass(frozen=True, slots=True)
class Split:
    """How the keys of a call are shared out to blocks."""

    #: Tiles of rows of all key/value heads and sequences, and tiles of keys of each.
    items: int
    tiles: int
    #: Blocks that share the work, and the most tiles of keys that one gets. Few tiles leave some blocks without any.
    blocks: int
    max_tiles: int
    #: What blocks compute one after another: of each item at least one part.
    parts: int
    #: Of these, parts of items that several blocks share. They go through memory.
    shared_parts: int

    def describe(self) -> str:
        """In a sentence."""
        each = "each" if self.items > 1 else ""
        text = f"{self.items * self.tiles} tiles of keys ({self.items} x {self.tiles}) are shared out to {self.blocks}"
        text += f" blocks, {self.max_tiles} to {each or 'a block'} at most"
        merged = "no result is merged" if not self.shared_parts else f"{self.shared_parts} parts are merged"
        return f"{text}; {merged}"


def attending_role(sizes: Sizes, attention: AttentionPlan) -> Role:
    """The kernel that a call of these sizes runs, from a contiguous cache or one in pages of whole boxes."""
    return attending_kernel(attention, sizes.problem, CachedCall()).role


def split_of(sizes: Sizes, kernel: KernelPlan) -> Split:
    """The shares of a call's blocks, as the kernel's scheduler computes them from the lengths."""
    tiles = max(1, _key_tiles(sizes, kernel))
    max_blocks = min(kernel.grid(sizes.problem)[0], sizes.multiprocessors * kernel.min_blocks, kernel.counters)
    # An item counts as some tiles more than it has.
    extra = int(kernel.constant("item_tiles"))
    each = extra + tiles
    team, of_head = team_size(kernel, sizes.problem, max_blocks), row_tiles(kernel, sizes.problem)
    rounds = [min(team, of_head - first) for first in range(0, of_head, team)]
    # The tiles of rows that teams compute at the same time, over all heads and sequences.
    members = rounds * (sizes.batch * sizes.heads_kv)
    units = len(members) * each
    teams = max(1, min(units // min_units(kernel, tiles, _rows(sizes)), max_blocks // team))

    def owner(unit: int) -> int:
        return ((unit + 1) * teams - 1) // units

    counts = [(owner((i + 1) * each - 1) - owner(i * each + extra) + 1, size) for i, size in enumerate(members)]
    parts, shared = (sum(n * size for n, size in counts if n > fewer) for fewer in (0, 1))
    starts = [_tiles_before(i * units // teams, tiles, extra) for i in range(teams + 1)]
    max_tiles = max(end - begin for begin, end in pairwise(starts))
    return Split(sum(members), tiles, teams * team, max_tiles, parts, shared)


def _tiles_before(unit: int, tiles: int, extra: int) -> int:
    """How many tiles come before a unit: an item counts ``extra`` units, and then its tiles."""
    items, rest = divmod(unit, extra + tiles)
    return items * tiles + max(0, rest - extra)


def forward(sizes: Sizes, attention: AttentionPlan, kernel: KernelPlan) -> KernelIO:
    """Each key and value moves once for all rows of a tile; parts of a row go through memory where blocks share it."""
    spec, split = sizes.spec, split_of(sizes, kernel)
    keys = row_tiles(kernel, sizes.problem) * _keys(sizes, kernel)
    # All rows of a tile are loaded, whether they exist or not.
    queries = split.parts * int(kernel.constant("tile_q"))
    rows = split.shared_parts * part_rows(sizes, kernel)
    columns = -(-spec.head_dim_v // _ROW_BLOCK) * _ROW_BLOCK
    totals = _TOTAL_BYTES * _LANES_PER_ROW * int(kernel.constant("warps"))
    reads = {
        "Q": queries * spec.head_dim * sizes.item,
        "K": keys * spec.head_dim * spec.cache_element.bytes,
        "V": keys * spec.head_dim_v * spec.cache_element.bytes,
    }
    if spec.qv:
        reads["Qv"] = queries * spec.head_dim_v * sizes.item
    writes = {"O": sizes.o, "LSE": sizes.row_floats}
    if rows:
        reads |= {"O partials": rows * columns * FLOAT_BYTES, "sums": rows * totals}
        writes |= {"O partials": rows * columns * FLOAT_BYTES, "sums": rows * _TOTAL_BYTES}
    return KernelIO(kernel.role, reads, writes)


def part_rows(sizes: Sizes, kernel: KernelPlan) -> int:
    """Rows of a part in the workspace."""
    return min(int(kernel.constant("tile_q")), _rows(sizes))


def _rows(sizes: Sizes) -> int:
    """Rows of a key/value head: the new tokens times the query heads that share it."""
    return sizes.len_q * (sizes.heads // sizes.heads_kv)


def _key_tiles(sizes: Sizes, kernel: KernelPlan) -> int:
    """Tiles of keys between the first and the last key that some query may attend to."""
    tile = int(kernel.constant("tile_kv"))
    if sizes.spec.mask.rule.keys_exact:
        queries = Side("q", sizes.len_q, max(sizes.len_q, 1))
        return int(walk(sizes.spec.mask, 1, 1, queries, Side("k", sizes.len_kv, tile)).steps.sum())
    return -(-sizes.len_kv // tile)


def _keys(sizes: Sizes, kernel: KernelPlan) -> int:
    """Keys of all key/value heads that some query may attend to; where tiles are tested, all keys of those that hold
    any; where boxes of pages are copied, whole tiles."""
    # The boxes of TMA have whole tiles, of which pages hold all rows.
    whole = bool(kernel.boxes) and sizes.spec.cache == "paged"
    tile = 1 if sizes.spec.mask.rule.keys_exact and not whole else int(kernel.constant("tile_kv"))
    queries = Side("q", sizes.len_q, max(sizes.len_q, 1))
    found = walk(sizes.spec.mask, sizes.batch, sizes.heads_kv, queries, Side("k", sizes.len_kv, tile))
    return int(found.steps.sum()) * tile if whole else int(found.rows.sum())
