"""Softcaps: scores of the form ``amplitude * tanh(slope * logit)``, however they are written."""

from __future__ import annotations

from dataclasses import dataclass

from flashgen.expr.analysis.unscaled_logits import SCALE
from flashgen.expr.tree.build import as_node, binary, unary
from flashgen.expr.tree.nodes import USES, Binary, Node, Score, Unary

_PER_PAIR = USES["q"] | USES["k"] | USES["s"]


@dataclass(frozen=True, slots=True)
class Cap:
    """The score ``amplitude * tanh(slope * product)``; both are the same for all pairs."""

    amplitude: Node
    slope: Node


def cap_of(score: Node) -> Cap | None:
    """A score as a softcap of Q K^T before the scale; None if it is no softcap."""
    tangent, amplitude = _with_factor(score)
    if not isinstance(tangent, Unary) or tangent.op != "tanh":
        return None
    logit, slope = _with_factor(tangent.operand)
    return Cap(amplitude, binary("*", SCALE, slope)) if logit is Score() else None


def _with_factor(node: Node) -> tuple[Node, Node]:
    """The factor that differs from pair to pair, and the constant factor."""
    if isinstance(node, Unary) and node.op == "-":
        core, factor = _with_factor(node.operand)
        return core, unary("-", factor)
    if isinstance(node, Binary) and node.op in ("*", "/"):
        left, right = node.children
        if node.op == "*" and not left.uses & _PER_PAIR:
            left, right = right, left
        if not right.uses & _PER_PAIR:
            core, factor = _with_factor(left)
            return core, binary(node.op, factor, right)
    return node, as_node(1.0)
