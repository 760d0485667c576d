"""Scores that add to their logit, counted in products: logits that are not yet multiplied by the scale.

A softmax multiplies what it exponentiates by a constant anyway, and the scale may go along with that. Then what is
added to a logit is to be divided by the scale, which costs nothing where it has a factor that is the same for all
pairs, such as a slope, or is the same itself.
"""

from __future__ import annotations

from collections.abc import Iterator

from flashgen.expr.tree.build import binary
from flashgen.expr.tree.nodes import USES, Binary, Node, Scalar, Score, Unary
from flashgen.expr.tree.rebuild import substitute

_PER_PAIR = USES["q"] | USES["k"] | USES["s"]
#: How many products a logit is, and the opposite; no captured value can have these names.
PRODUCTS, SCALE = Scalar("products.of_logit", "float"), Scalar("logits.of_product", "float")


def of_product(score: Node) -> Node:
    """The score as a function of Q K^T before the scale."""
    return substitute(score, {Score(): binary("*", Score(), SCALE)})


def in_products(score: Node) -> Node | None:
    """The score divided by the scale, as a function of unscaled Q K^T; None if impossible or more expensive."""
    terms = list(_terms(score))
    logits = [number for number, (_, term) in enumerate(terms) if term.uses & USES["s"]]
    if len(logits) != 1:
        return None
    positive, logit = terms.pop(logits[0])
    if not positive or logit is not Score():
        return None
    total: Node = Score()
    for positive, term in terms:
        scaled = _scaled(term)
        if scaled is None:
            return None
        total = binary("+" if positive else "-", total, scaled)
    return total


def _terms(node: Node, positive: bool = True) -> Iterator[tuple[bool, Node]]:
    """The terms that are added or subtracted."""
    if isinstance(node, Unary) and node.op == "-":
        yield from _terms(node.operand, not positive)
    elif isinstance(node, Binary) and node.op in ("+", "-"):
        yield from _terms(node.left, positive)
        yield from _terms(node.right, positive == (node.op == "+"))
    else:
        yield positive, node


def _scaled(term: Node) -> Node | None:
    """The term divided by the scale, if the division applies to a factor that is the same for all pairs."""
    if not term.uses & _PER_PAIR:
        return binary("*", PRODUCTS, term)
    if isinstance(term, Binary) and term.op == "*":
        for factor, rest in (term.children, term.children[::-1]):
            if (scaled := _scaled(factor)) is not None:
                return binary("*", scaled, rest)
    return None
