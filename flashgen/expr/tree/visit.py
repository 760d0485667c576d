"""Walks over trees: each shared part is met once."""

from __future__ import annotations

from collections import Counter

from flashgen.expr.tree.nodes import Node


def postorder(*roots: Node) -> list[Node]:
    """Every distinct node below the roots, operands before what is made of them."""
    order: list[Node] = []
    seen: set[Node] = set()
    stack = [(root, False) for root in reversed(roots)]
    while stack:
        node, ready = stack.pop()
        if ready:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack.extend((child, False) for child in reversed(node.children))
    return order


def uses_of(*roots: Node) -> Counter[Node]:
    """How many nodes take each node as an operand; a root counts as taken once."""
    counts = Counter(child for node in postorder(*roots) for child in node.children)
    counts.update(set(roots))
    return counts
