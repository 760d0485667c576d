"""Nodes that only tile rules have: bounds of a rectangle, tensors' extremes over it, searches, sums that never wrap."""

# ruff: noqa: D102 (a node is made by __new__, and the class says what of)
from __future__ import annotations

from typing import Literal

from flashgen.expr.tree.nodes import Node, Tensor, key_of, make, nodes


class TileVar(Node):
    """A bound of the rectangle that a tile rule speaks of: ``q_lo``, ``q_hi``, ``k_lo`` or ``k_hi``, inclusive."""

    __slots__ = ("name",)
    _fields = ("name",)
    name: str

    def __new__(cls, name: str) -> TileVar:
        key = (cls, name)
        found = nodes.get(key)
        if found is not None:
            return found  # type: ignore[return-value]
        return make(cls, key, "int", (), 0, name=name)


class Range(Node):
    """The smallest (``min``) or largest (``max``) element of a tensor over a rectangle of indices, as an int.

    A bool counts as 0 or 1. ``whole`` is ``q`` or ``k`` when the only index that varies is exactly that one,
    over the tile's rows or columns: a table of the minima and maxima per tile then has the answer. Over no
    element at all the result is the largest or smallest integer of 32 bits.
    """

    __slots__ = ("high", "kind", "low", "tensor", "whole")
    _fields = ("kind", "tensor", "low", "high", "whole")
    kind: Literal["min", "max"]
    tensor: Tensor
    low: tuple[Node, ...]
    high: tuple[Node, ...]
    whole: Literal["", "q", "k"]

    def __new__(
        cls,
        kind: Literal["min", "max"],
        tensor: Tensor,
        low: tuple[Node, ...],
        high: tuple[Node, ...],
        whole: Literal["", "q", "k"] = "",
    ) -> Range:
        key = key_of(cls, kind, tensor, low, high, whole)
        found = nodes.get(key)
        if found is not None:
            return found  # type: ignore[return-value]
        bounds = (*low, *high)
        return make(cls, key, "int", bounds, 0, kind=kind, tensor=tensor, low=low, high=high, whole=whole)


class Search(Node):
    """Where the elements of a tensor along one dimension first reach a value, or are last within it, as an int.

    ``first``: the index of the first element that is not less than ``value``; the dimension's size if there is none.
    ``last``: that of the last one that is not more; -1 if there is none. Every element that is not less (not more)
    lies from there on (up to there), in whatever order they are. ``others`` are the indices of the other dimensions.
    A table of the largest elements so far, or of the smallest from there on, has the answer by bisection, with the
    begin (end) of the entry that the element lies in.
    """

    __slots__ = ("axis", "kind", "others", "tensor", "value")
    _fields = ("kind", "tensor", "axis", "others", "value")
    kind: Literal["first", "last"]
    tensor: Tensor
    axis: int
    others: tuple[Node, ...]
    value: Node

    def __new__(
        cls, kind: Literal["first", "last"], tensor: Tensor, axis: int, others: tuple[Node, ...], value: Node
    ) -> Search:
        key = (*key_of(cls, kind, tensor, axis, others), id(value))
        found = nodes.get(key)
        if found is not None:
            return found  # type: ignore[return-value]
        operands = (*others, value)
        return make(cls, key, "int", operands, 0, kind=kind, tensor=tensor, axis=axis, others=others, value=value)


class Wide(Node):
    """A sum (``+``, each term with its factor) or a product (``*``) that does not wrap: exact, then clamped to 32 bits.

    Only tile rules need it: what the user writes stays within 32 bits, but a bound made from it may not.
    """

    __slots__ = ("factors", "op", "terms")
    _fields = ("op", "factors", "terms")
    op: Literal["+", "*"]
    factors: tuple[int, ...]
    terms: tuple[Node, ...]

    def __new__(cls, op: Literal["+", "*"], factors: tuple[int, ...], terms: tuple[Node, ...]) -> Wide:
        key = key_of(cls, op, factors, terms)
        found = nodes.get(key)
        if found is not None:
            return found  # type: ignore[return-value]
        return make(cls, key, "int", terms, 0, op=op, factors=factors, terms=terms)
