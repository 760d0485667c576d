"""Over which pairs of a query and a key the index of a captured tensor stays the same."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashgen.plan.model.captured_work import Over

if TYPE_CHECKING:
    from flashgen.expr import Node


def over_of(indices: tuple[Node, ...]) -> Over:
    """The largest set of pairs that share an element."""
    from flashgen.expr.tree.nodes import USES

    uses = 0
    for index in indices:
        uses |= index.uses
    varies = uses & (USES["q"] | USES["k"])
    if not varies:
        return "block"
    if varies == USES["q"]:
        return "rows"
    if varies == USES["k"]:
        return "columns"
    return "diagonals" if all(_of_distance(index) for index in indices) else "pairs"


def tile_places(indices: tuple[Node, ...]) -> tuple[str, ...] | None:
    """The index along each dimension, if they are q and k, b and h at most once, and else constants (``""``)."""
    from flashgen.expr import Const, Index

    places = tuple(index.name if isinstance(index, Index) else "" for index in indices)
    named = [place for place in places if place]
    plain = all(place or isinstance(index, Const) for place, index in zip(places, indices, strict=True))
    return places if plain and len(set(named)) == len(named) and {"q", "k"} <= set(named) else None


def _of_distance(node: Node) -> bool:
    """Whether a value depends on q and k through k - q alone."""
    from flashgen.expr.analysis.linear import VARYING, linear

    if not node.uses & VARYING:
        return True
    if node.type == "int":
        parts = linear(node)
        if parts.q or parts.k:
            return parts.q == -parts.k and all(_of_distance(part) for _, part in parts.varying)
        if not parts.is_only(node):
            return all(_of_distance(part) for _, part in parts.varying)
    return bool(node.children) and all(_of_distance(child) for child in node.children)
