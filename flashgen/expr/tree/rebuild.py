"""Trees made again with other operands."""

from __future__ import annotations

from collections.abc import Mapping

from flashgen.expr.tree.build import binary, select, unary
from flashgen.expr.tree.captured import load
from flashgen.expr.tree.nodes import Binary, Load, Node, Select, Unary
from flashgen.expr.tree.tile_nodes import Range, Search, Wide
from flashgen.expr.tree.visit import postorder


def substitute(root: Node, replacements: Mapping[Node, Node]) -> Node:
    """The tree with nodes replaced by others of the same type."""
    done: dict[Node, Node] = {}
    for node in postorder(root):
        done[node] = replacements[node] if node in replacements else rebuilt(node, [done[c] for c in node.children])
    return done[root]


def rebuilt(node: Node, children: list[Node]) -> Node:
    """The same operation on other operands."""
    if not children or all(a is b for a, b in zip(children, node.children, strict=True)):
        return node
    if isinstance(node, Unary):
        return unary(node.op, *children)
    if isinstance(node, Binary):
        return binary(node.op, *children)
    if isinstance(node, Select):
        return select(*children)
    if isinstance(node, Load):
        return load(node.tensor, tuple(children))
    if isinstance(node, Wide):
        return Wide(node.op, node.factors, tuple(children))
    if isinstance(node, Search):
        return Search(node.kind, node.tensor, node.axis, tuple(children[:-1]), children[-1])
    assert isinstance(node, Range), f"{type(node).__name__} has operands"
    rank = node.tensor.rank
    return Range(node.kind, node.tensor, tuple(children[:rank]), tuple(children[rank:]), node.whole)
