"""The third reading: which tiles a mask leaves empty, which it fills, and where a loop may begin and end.

A tile is a rectangle of queries ``q_lo`` to ``q_hi`` and keys ``k_lo`` to ``k_hi``, inclusive and within the
sequences. The rules are trees over those bounds, b, h, the lengths and captured values; NumPy evaluates and
CUDA prints them as any other tree. They are sound for every mask, and exact for bounds on q, k and k - q.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from flashgen.expr.analysis.bounds import at_most_zero, every, greatest, least, opposite, ordered, some, total, where
from flashgen.expr.analysis.intervals import Region, divisors
from flashgen.expr.analysis.logic import alternatives
from flashgen.expr.analysis.zone import Span, Zone
from flashgen.expr.tree.nodes import USES, Binary, Const, Length, Load, Node
from flashgen.expr.tree.tile_nodes import Search, TileVar
from flashgen.expr.tree.visit import postorder

_QUERIES: Span = (TileVar("q_lo"), TileVar("q_hi"))
_KEYS: Span = (TileVar("k_lo"), TileVar("k_hi"))
_LENGTHS = {"q": Length("q_len"), "k": Length("k_len")}


@dataclass(frozen=True, slots=True)
class Band:
    """The mask is exactly ``lower <= k - q <= upper``; None is without limit, and neither uses b, h, q or k."""

    lower: Node | None
    upper: Node | None


@dataclass(frozen=True, slots=True)
class TileRule:
    """What is known of a mask over tiles.

    ``may`` is false only for a tile without an allowed pair, ``full`` true only for one without a forbidden pair.
    Keys from ``key_begin`` to before ``key_end`` hold all that some query of ``q_lo`` to ``q_hi`` may attend to,
    and queries from ``query_begin`` to before ``query_end`` all that may attend to some key of ``k_lo`` to
    ``k_hi``; nothing is to be visited when the begin is not before the end. ``keys_exact``: a tile of keys holds
    an allowed pair exactly when it meets that interval, so a loop over it needs no ``may``.
    """

    may: Node
    full: Node
    key_begin: Node
    key_end: Node
    query_begin: Node
    query_end: Node
    keys_exact: bool
    queries_exact: bool
    band: Band | None

    @property
    def hull_exact(self) -> bool:
        """Whether both loops need no test per tile."""
        return self.keys_exact and self.queries_exact


def tile_rule(mask: Node) -> TileRule:
    """The rule of a mask."""
    zones = [Zone.of(literals) for literals in alternatives(mask)]
    forbidden = [Zone.of(literals) for literals in alternatives(mask, positive=False)]
    # A divisor that is not positive makes no mask that anyone would want: every tile is then visited.
    usual = every(ordered(Const(1), divisor) for divisor in divisors(mask))
    keys, queries = _hull(zones, "k"), _hull(zones, "q")
    return TileRule(
        may=some([opposite(usual), *(zone.may_hold(_QUERIES, _KEYS) for zone in zones)]),
        full=every([usual, *(opposite(zone.may_hold(_QUERIES, _KEYS)) for zone in forbidden)]),
        key_begin=where(usual, keys.begin, 0),
        key_end=where(usual, keys.end, _LENGTHS["k"]),
        query_begin=where(usual, queries.begin, 0),
        query_end=where(usual, queries.end, _LENGTHS["q"]),
        keys_exact=keys.exact and usual is Const(True),
        queries_exact=queries.exact and usual is Const(True),
        band=_band(zones),
    )


class _Hull(NamedTuple):
    begin: Node
    end: Node
    exact: bool


class _Part(NamedTuple):
    """The interval of one zone, empty unless ``holds``."""

    begin: Node
    end: Node
    holds: Node


def _hull(zones: list[Zone], axis: Literal["q", "k"]) -> _Hull:
    """The interval of one index over all of its sequence."""
    length = _LENGTHS[axis]
    parts = _parts(zones, axis)
    if not parts:
        return _Hull(Const(0), Const(0), True)
    same_begin, same_end = len({p.begin for p in parts}) == 1, len({p.end for p in parts}) == 1
    # Intervals that begin or end together have no gaps between them.
    exact = all(zone.is_pure for zone in zones) and (same_begin or same_end)
    begins, ends = [], []
    for begin, end, holds in parts:
        # One that is empty must not pull the other bound towards it.
        begins.append(begin if same_begin else where(_visible(holds, begin, end, parts), begin, length))
        ends.append(where(holds if same_begin else _visible(holds, begin, end, parts), end, 0))
    return _Hull(least(*begins), greatest(*ends), exact)


def _parts(zones: list[Zone], axis: Literal["q", "k"]) -> list[_Part]:
    """The intervals of the zones that may hold. They begin (end) where a search says if all of them do: beside one that
    begins with the sequence, no search of another could tell anything."""
    found = [(_part(zone, axis, searches=True), _part(zone, axis, searches=False)) for zone in zones]
    found = [(searched, plain) for searched, plain in found if plain.holds is not Const(False)]
    begins = all(_searches(searched.begin) for searched, _ in found)
    ends = all(_searches(searched.end) for searched, _ in found)
    return [_Part((s if begins else p).begin, (s if ends else p).end, p.holds) for s, p in found]


def _searches(end: Node) -> bool:
    return any(isinstance(node, Search) for node in postorder(end))


def _visible(holds: Node, begin: Node, end: Node, parts: list[_Part]) -> Node:
    return holds if len(parts) == 1 else holds & at_most_zero([(1, begin), (-1, end)], 1)


def _part(zone: Zone, axis: Literal["q", "k"], *, searches: bool) -> _Part:
    """The keys (or queries) that the zone allows for the tile's queries (or keys)."""
    length = _LENGTHS[axis]
    everything: Span = (Const(0), total([(1, length)], -1))
    q, k = (_QUERIES, everything) if axis == "k" else (everything, _KEYS)
    zone = zone.loosened(q, k, axis, searches=searches)
    region = zone.region(q, k, axis)
    low, high = region.k if axis == "k" else region.q
    return _Part(low, _after(high), every(_other_conditions(zone, region, axis)))


def _after(last: Node) -> Node:
    """The end that comes after a last one."""
    if isinstance(last, Binary) and last.op == "min":
        return least(_after(last.left), _after(last.right))
    return total([(1, last)], 1)


def _other_conditions(zone: Zone, region: Region, axis: Literal["q", "k"]) -> list[Node]:
    """Conditions without which the zone is empty, although the ends of the interval do not cross."""
    conditions = list(zone.fixed)
    bounds, span = (zone.q, _QUERIES) if axis == "k" else (zone.k, _KEYS)
    conditions += [ordered(span[0], upper) for upper in bounds.upper]
    conditions += [ordered(lower, upper) for lower in bounds.lower for upper in (span[1], *bounds.upper)]
    conditions += [ordered(a, b) for a in zone.difference.lower for b in zone.difference.upper]
    conditions += [region.may_hold(literal) for literal in zone.rest if not literal.uses & USES[axis]]
    return conditions


def _band(zones: list[Zone]) -> Band | None:
    if len(zones) != 1 or zones[0].fixed or zones[0].rest or zones[0].q.stated or zones[0].k.stated:
        return None
    lower, upper = zones[0].difference.tightest()
    if any(_is_per_head(end) for end in (lower, upper) if end is not None):
        return None
    return Band(lower, upper)


def _is_per_head(end: Node) -> bool:
    return bool(end.uses) or any(isinstance(node, Load) for node in postorder(end))
