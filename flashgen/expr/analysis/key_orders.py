"""Splits masks into comparisons of the key and a rest.

A comparison of the key with a value that is the same for a row gives the bits of many keys at once. The rest is
evaluated pair by pair.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from flashgen.expr.analysis.bounds import every
from flashgen.expr.tree.nodes import ORDERS, USES, Binary, Index, Node, Unary


@dataclass(frozen=True, slots=True)
class Orders:
    """Two conditions whose conjunction is the mask."""

    #: Made of comparisons of the key and conditions without it.
    ordered: Node
    rest: Node


def orders(mask: Node) -> Orders:
    """Splits a mask into comparisons of the key and a remainder."""
    terms = _terms(mask)
    return Orders(*(every(term for term in terms if is_ordered(term) is wanted) for wanted in (True, False)))


def is_ordered(condition: Node) -> bool:
    """Whether it is made of comparisons of the key and conditions without it."""
    if not condition.uses & USES["k"]:
        return True
    if is_comparison_of_key(condition):
        return True
    joins = isinstance(condition, Unary) or (isinstance(condition, Binary) and condition.op in ("&", "|"))
    return joins and all(is_ordered(child) for child in condition.children)


def is_comparison_of_key(condition: Node) -> bool:
    """Whether the key is compared with a value that is the same for a row."""
    if not isinstance(condition, Binary) or condition.op not in ORDERS:
        return False
    return condition.left is Index("k") and not condition.right.uses & USES["k"]


def leaves(ordered: Node) -> Mapping[Node, Node]:
    """Its leaves, in order: values that the key is compared with, and conditions without the key."""
    if is_comparison_of_key(ordered):
        assert isinstance(ordered, Binary), "comparisons have two sides"
        return {ordered: ordered.right}
    if not ordered.uses & USES["k"]:
        return {ordered: ordered}
    found: dict[Node, Node] = {}
    for child in ordered.children:
        found |= leaves(child)
    return found


def _terms(mask: Node) -> list[Node]:
    if isinstance(mask, Binary) and mask.op == "&":
        return [*_terms(mask.left), *_terms(mask.right)]
    return [mask]
