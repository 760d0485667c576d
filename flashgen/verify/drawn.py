"""Cases drawn at random, as hostile as cases can be; the same spec, tiles, seed and index give the same one."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from flashgen.spec import AttentionSpec, Schedule
from flashgen.verify.cases import Case
from flashgen.verify.layouts import LAYOUTS, Layout
from flashgen.verify.values import Fill, Spoil

#: The longest lengths drawn: several tiles of most schedules, and still quick to emulate. Keys may be more, where it
#: takes more of them for a ring of tiles to go round.
LONGEST = 200
#: The most pairs of a query and a key, over all heads; what has more gets fewer heads, and then fewer queries.
MOST_PAIRS = 80_000
#: Half of the cases are laid out plainly.
_LAYOUTS: tuple[Layout, ...] = ("contiguous", *LAYOUTS)
_FILLS: tuple[Fill, ...] = ("normal", "normal", "normal", "spread", "huge", "large_logits", "flat", "sparse")
_PROBABILITIES = (0.25, 0.25, 0.1, 0.9, 0.0)
_SPOILS: tuple[Spoil, ...] = (*("nothing",) * 6, "keys", "keys", "queries")


@dataclass(frozen=True, slots=True)
class Tiles:
    """The tile sizes around which lengths are awkward."""

    q: int = 64
    kv: int = 64
    backward_q: int = 64
    backward_kv: int = 64

    @classmethod
    def of(cls, schedule: Schedule) -> Tiles:
        """Those of a schedule as the plan completed it."""
        back = schedule.backward
        sizes = (schedule.tile_q, schedule.tile_kv, back.tile_q, back.tile_kv)
        return cls(*(64 if size is None else size for size in sizes))


def draw(spec: AttentionSpec, tiles: Tiles, seed: int, index: int) -> Case:
    """Case number ``index`` of a seed."""
    random = Random(f"{seed} {index}")
    len_q = _length(random, (tiles.q, tiles.backward_q), LONGEST)
    if random.random() < 0.3:
        len_kv = _near_diagonal(random, len_q)
    else:
        len_kv = _length(random, (tiles.kv, tiles.backward_kv), max(LONGEST, 3 * tiles.kv + 5))
    batch = 0 if random.random() < 0.04 else random.choice((2, 3, 4) if spec.has_own_lengths else (1, 1, 2))
    heads_kv = 0 if random.random() < 0.04 else random.choice((1, 1, 2))
    group = random.choice((1, 2, 3))
    pairs = max(len_q * len_kv, 1)
    if batch * heads_kv * group * pairs > MOST_PAIRS:
        batch = min(batch, 1)
    if batch * heads_kv * group * pairs > MOST_PAIRS:
        heads_kv, group = 1, 2
        len_q = min(len_q, MOST_PAIRS // (heads_kv * group * len_kv))
    return Case(
        "drawn",
        len_q,
        len_kv,
        batch=batch,
        heads=heads_kv * group,
        heads_kv=heads_kv,
        fill=random.choice(_FILLS),
        scale=random.choice((None, None, 1.0, 0.01)),
        layouts=_layouts(random),
        # With nothing masked, a key that is not finite reaches everything, and nothing is left to compare.
        spoil="nothing" if spec.mask.is_full else random.choice(_SPOILS),
        seed=random.randrange(2**16),
        p=random.choice(_PROBABILITIES) if spec.dropout else 0.25,
    )


def _length(random: Random, tiles: tuple[int, int], longest: int) -> int:
    """Zero, one, about a tile, a ring of tiles, or anything."""
    tile = random.choice(tiles)
    edges = (0, 1, tile - 1, tile, tile + 1, 2 * tile + 1, 3 * tile + 5)
    length = random.choice(edges) if random.random() < 0.5 else random.randint(1, 90)
    return min(length, longest)


def _near_diagonal(random: Random, len_q: int) -> int:
    """A number of keys that takes a mask's diagonal past the corners of the warps' blocks, where masks go wrong."""
    return min(max(len_q + 16 * random.randint(-1, 3) + random.randint(-2, 2), 0), LONGEST)


def _layouts(random: Random) -> tuple[Layout, Layout, Layout, Layout]:
    if random.random() < 0.5:
        return ("contiguous",) * 4
    return random.choice(_LAYOUTS), random.choice(_LAYOUTS), random.choice(_LAYOUTS), random.choice(_LAYOUTS)
