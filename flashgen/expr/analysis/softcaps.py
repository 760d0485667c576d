"""Softcaps: scores of the form ``amplitude * tanh(slope * logit)``, however they are written."""

from __future__ import annotations

from flashgen.expr.tree.nodes import USES, Binary, Node, Score, Unary

_PER_PAIR = USES["q"] | USES["k"] | USES["s"]


def is_softcap(score: Node) -> bool:
    """Whether a score is the hyperbolic tangent of a logit, up to factors that are the same for all pairs."""
    tangent = _without_factors(score)
    return isinstance(tangent, Unary) and tangent.op == "tanh" and _without_factors(tangent.operand) is Score()


def _without_factors(node: Node) -> Node:
    """The factor that differs from pair to pair."""
    if isinstance(node, Unary) and node.op == "-":
        return _without_factors(node.operand)
    if isinstance(node, Binary) and node.op in ("*", "/"):
        left, right = node.children
        if node.op == "*" and not left.uses & _PER_PAIR:
            left, right = right, left
        if not right.uses & _PER_PAIR:
            return _without_factors(left)
    return node
