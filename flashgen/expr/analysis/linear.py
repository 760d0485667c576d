"""Ints as linear forms: a * q + b * k + constant + opaque terms."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from flashgen.expr.analysis.bounds import MAX_FACTOR
from flashgen.expr.tree.nodes import USES, Binary, Const, Index, Node, Unary

VARYING = USES["q"] | USES["k"]


@dataclass(frozen=True, slots=True)
class Linear:
    """``q * query + k * key + constant`` plus each other term times its factor."""

    q: int
    k: int
    constant: int
    others: tuple[tuple[int, Node], ...]

    def __neg__(self) -> Linear:
        return self.scaled(-1)

    def __add__(self, other: Linear) -> Linear:
        factors: dict[Node, int] = {}
        for factor, node in (*self.others, *other.others):
            factors[node] = factors.get(node, 0) + factor
        others = tuple((factor, node) for node, factor in factors.items() if factor)
        return Linear(self.q + other.q, self.k + other.k, self.constant + other.constant, others)

    def plus(self, constant: int) -> Linear:
        """The same with something added."""
        return Linear(self.q, self.k, self.constant + constant, self.others)

    def scaled(self, factor: int) -> Linear:
        """The same times a factor."""
        others = tuple((factor * f, node) for f, node in self.others)
        return Linear(factor * self.q, factor * self.k, factor * self.constant, others)

    def without(self, node: Node) -> Linear:
        """The same without one of the other terms."""
        return Linear(self.q, self.k, self.constant, tuple(o for o in self.others if o[1] is not node))

    def is_only(self, node: Node) -> bool:
        """Whether the form consists of this node alone."""
        alone = not self.q and not self.k and not self.constant and len(self.others) == 1
        return alone and self.others[0][0] == 1 and self.others[0][1] is node

    @property
    def varying(self) -> list[tuple[int, Node]]:
        """The other terms that depend on q or k."""
        return [(factor, node) for factor, node in self.others if node.uses & VARYING]

    @property
    def fits(self) -> bool:
        """Whether the factors are small enough for the analysis."""
        return all(abs(f) <= MAX_FACTOR for f in (self.q, self.k, *(f for f, _ in self.others)))


def linear(node: Node) -> Linear:
    """A tree as a sum; a term with neither q nor k stays whole, apart from a constant added to it."""
    found = _sum(node)
    return found if found is not None and found.fits else Linear(0, 0, 0, ((1, node),))


def _sum(node: Node) -> Linear | None:
    if isinstance(node, Const):
        return Linear(0, 0, int(node.value), ())
    if isinstance(node, Index) and node.name in "qk":
        return Linear(int(node.name == "q"), int(node.name == "k"), 0, ())
    if isinstance(node, Unary) and node.op == "-":
        return -linear(node.operand)
    if isinstance(node, Binary):
        if node.op in ("+", "-") and _opens(node):
            right = linear(node.right)
            return linear(node.left) + (right if node.op == "+" else -right)
        if node.op == "*" and node.uses & VARYING:
            for factor, rest in ((node.left, node.right), (node.right, node.left)):
                if isinstance(factor, Const):
                    return linear(rest).scaled(int(factor.value))
    return None


def _opens(node: Binary) -> bool:
    return bool(node.uses & VARYING) or any(isinstance(child, Const) for child in node.children)


def forms(node: Binary) -> Iterator[Linear]:
    """A comparison of ints as sums that must all be zero or less; ``!=`` has none."""
    difference = linear(node.left) + -linear(node.right)
    if node.op in ("<", "<=", "=="):
        yield difference.plus(int(node.op == "<"))
    if node.op in (">", ">=", "=="):
        yield (-difference).plus(int(node.op == ">"))
