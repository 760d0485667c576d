"""Cases drawn at random, as hostile as cases can be; the same spec, tiles, seed and index give the same one."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import NamedTuple

from flashgen.spec import AttentionSpec, Schedule
from flashgen.verify.cases.case import PLAIN, Case, Layouts
from flashgen.verify.cases.huge_strides import HUGE_STRIDE_AXES
from flashgen.verify.cases.layouts import ORDINARY_LAYOUTS, Layout
from flashgen.verify.cases.values import Fill, NonFiniteValues

#: The longest lengths of most cases: several tiles of most schedules, and still quick to emulate. Keys may be more,
#: where it takes more of them for a ring of tiles to go round.
LONGEST = 200
#: The most pairs of a query and a key, over all heads; what has more gets fewer heads, and then fewer queries.
MOST_PAIRS = 80_000
#: Of so many cases one is long, and one has strides that 32 bits cannot hold.
PERIOD = 12
_LONG, _FAR = 7, 3
#: Lengths of long cases. Many keys are more of their tiles than a word has bits.
LONG_LENGTHS = 257, 2200
_TILES_IN_A_WORD = 32
#: The most pairs of a long case, over all heads.
MOST_LONG_PAIRS = 100_000
#: Half of the cases are laid out plainly.
_LAYOUTS: tuple[Layout, ...] = ("contiguous", *ORDINARY_LAYOUTS)
_FILLS: tuple[Fill, ...] = ("normal", "normal", "normal", "spread", "huge", "large_logits", "flat", "sparse")
_PROBABILITIES: tuple[float, ...] = (0.25, 0.25, 0.1, 0.9, 0.0)
#: Those of cases that are rare: a wrong key, value or pair shows in the results.
_TELLING_FILLS: tuple[Fill, ...] = ("normal", "normal", "normal", "spread")
_TELLING: tuple[float, ...] = (0.25, 0.1)
_NON_FINITE_VALUES: tuple[NonFiniteValues, ...] = (*("nothing",) * 6, "keys", "keys", "queries")


@dataclass(frozen=True, slots=True)
class Tiles:
    """The tile sizes around which lengths are awkward."""

    q: int = 64
    kv: int = 64
    backward_q: int = 64
    backward_kv: int = 64

    @classmethod
    def of(cls, schedule: Schedule) -> Tiles:
        """The tiles of a completed schedule."""
        back = schedule.backward
        sizes = (schedule.tile_q, schedule.tile_kv, back.tile_q, back.tile_kv)
        return cls(*(64 if size is None else size for size in sizes))


class _Sizes(NamedTuple):
    """Lengths, batch, key heads, and query heads per key head."""

    len_q: int
    len_kv: int
    batch: int
    heads_kv: int
    group: int


def draw(spec: AttentionSpec, tiles: Tiles, seed: int, index: int) -> Case:
    """Case number ``index`` of a seed."""
    random = Random(f"{seed} {index}")
    turn, place = divmod(index + seed, PERIOD)
    fills, probabilities = (_TELLING_FILLS, _TELLING) if place in (_LONG, _FAR) else (_FILLS, _PROBABILITIES)
    if place == _LONG:
        sizes = _long_sizes(random, tiles, turn)
        # Unaligned arrays have kernels of their own, and the longest cases are too few to leave it to chance.
        layouts = PLAIN if _is_longer(turn) else _layouts(spec, random)
    elif place == _FAR:
        sizes, layouts = _huge_stride_sizes(random), _huge_stride_layouts(spec, turn)
    else:
        sizes, layouts = _usual_sizes(random, spec, tiles), _layouts(spec, random)
    return Case(
        "drawn",
        sizes.len_q,
        sizes.len_kv,
        batch=sizes.batch,
        heads=sizes.heads_kv * sizes.group,
        heads_kv=sizes.heads_kv,
        fill=random.choice(fills),
        scale=random.choice((None, None, 1.0, 0.01)),
        layouts=layouts,
        # With nothing masked, a key that is not finite reaches everything, and nothing is left to compare.
        non_finite="nothing" if spec.mask.is_full else random.choice(_NON_FINITE_VALUES),
        seed=random.randrange(2**16),
        p=random.choice(probabilities) if spec.dropout else 0.25,
        dlse=spec.needs_backward and random.random() < 0.3,
    )


def _usual_sizes(random: Random, spec: AttentionSpec, tiles: Tiles) -> _Sizes:
    """Short lengths for some sequences and heads."""
    len_q = _length(random, (tiles.q, tiles.backward_q), LONGEST)
    if random.random() < 0.3:
        len_kv = _near_diagonal(random, len_q)
    else:
        len_kv = _length(random, (tiles.kv, tiles.backward_kv), max(LONGEST, 3 * tiles.kv + 5))
    batch = 0 if random.random() < 0.04 else random.choice((2, 3, 4) if spec.has_own_lengths else (1, 1, 1, 2, 3, 4))
    heads_kv = 0 if random.random() < 0.04 else random.choice((1, 1, 2))
    group = random.choice((1, 2, 3))
    pairs = max(len_q * len_kv, 1)
    if batch * heads_kv * group * pairs > MOST_PAIRS:
        batch = min(batch, 1)
    if batch * heads_kv * group * pairs > MOST_PAIRS:
        heads_kv, group = 1, 2
        len_q = min(len_q, MOST_PAIRS // (heads_kv * group * len_kv))
    return _Sizes(len_q, len_kv, batch, heads_kv, group)


def _is_longer(turn: int) -> bool:
    """Whether this case takes its lengths from the upper half of ``LONG_LENGTHS``."""
    return turn // 4 % 2 == 1


def _long_sizes(random: Random, tiles: Tiles, turn: int) -> _Sizes:
    """Cycles through many keys, many queries, many keys, and many of both."""
    kind = turn % 4
    if kind == 3:
        len_q = random.randint(LONG_LENGTHS[0], MOST_LONG_PAIRS // LONG_LENGTHS[0])
        return _Sizes(len_q, random.randint(LONG_LENGTHS[0], MOST_LONG_PAIRS // len_q), 1, 1, 1)
    shortest, longest = LONG_LENGTHS
    middle = (shortest + longest) // 2
    many = random.randint(middle + 1, longest) if _is_longer(turn) else random.randint(shortest, middle)
    if kind != 1:
        tile = max(tiles.kv, tiles.backward_kv)
        many = max(random.choice((many, 1)), _TILES_IN_A_WORD * tile + random.randint(1, tile))
    group = random.choice((1, 1, 2))
    few = random.randint(1, MOST_LONG_PAIRS // (many * group))
    return _Sizes(many, few, 1, 1, group) if kind == 1 else _Sizes(few, many, 1, 1, group)


def _huge_stride_sizes(random: Random) -> _Sizes:
    """Makes every dimension with a huge stride at least 2 long."""
    return _Sizes(random.randint(2, 40), random.randint(2, 40), random.choice((2, 3)), 2, random.choice((1, 2)))


def _huge_stride_layouts(spec: AttentionSpec, turn: int) -> Layouts:
    """Cycles through the strides. Packed sequences have no batch stride."""
    kinds: list[Layout] = [layout for layout in HUGE_STRIDE_AXES if not (spec.varlen and layout == "huge-batch-stride")]
    return (kinds[turn % len(kinds)],) * 4


def _length(random: Random, tiles: tuple[int, int], longest: int) -> int:
    """Zero, one, about a tile, a ring of tiles, or anything."""
    tile = random.choice(tiles)
    edges = (0, 1, tile - 1, tile, tile + 1, 2 * tile + 1, 3 * tile + 5)
    length = random.choice(edges) if random.random() < 0.5 else random.randint(1, 90)
    return min(length, longest)


def _near_diagonal(random: Random, len_q: int) -> int:
    """A number of keys that takes a mask's diagonal past the corners of the warps' blocks, where masks go wrong."""
    return min(max(len_q + 16 * random.randint(-1, 3) + random.randint(-2, 2), 0), LONGEST)


def _layouts(spec: AttentionSpec, random: Random) -> Layouts:
    if random.random() < 0.5:
        return PLAIN
    # Kernels for an 8-bit cache and for values that are keys read whole words, and 8-bit heads have own scales.
    left_out = ("unaligned", "one-head") if spec.cache_dtype else ("unaligned",) if spec.qv else ()
    kinds = [layout for layout in _LAYOUTS if layout not in left_out]
    return random.choice(kinds), random.choice(kinds), random.choice(kinds), random.choice(kinds)
