"""What is the same for all pairs of a tile, in scores: found out once for it, and all factors of that kind as one.

Compilers find such things, too, but forget them where a warp votes in between; and they never take factors together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from flashgen.expr.tree.build import binary
from flashgen.expr.tree.nodes import FLOAT_FUNCTIONS, USES, Binary, Const, Load, Node, Scalar, Unary
from flashgen.expr.tree.rebuild import rebuilt
from flashgen.expr.tree.visit import postorder

_PER_PAIR = USES["q"] | USES["k"] | USES["s"]


@dataclass(frozen=True, slots=True)
class WithConstants:
    """Trees in which captured numbers named ``first.<name>`` stand for constants, and the constants by that name."""

    roots: Mapping[str, Node]
    constants: Mapping[str, Node]


def with_constants(roots: Mapping[str, Node]) -> WithConstants:
    """The trees with expensive terms that are the same for all pairs replaced by constants."""
    gathered = _gathered(roots)
    names: dict[Node, Scalar] = {}
    done: dict[Node, Node] = {}
    for root in gathered.values():
        _take_out(root, names, done)
    constants = {scalar.name: node for node, scalar in names.items()}
    return WithConstants({name: done[root] for name, root in gathered.items()}, constants)


def _gathered(roots: Mapping[str, Node]) -> dict[str, Node]:
    """The trees with the constant factors of each product combined into one."""
    done: dict[Node, Node] = {}
    parts: dict[Node, tuple[Node, Node]] = {}
    for node in postorder(*roots.values()):
        made = rebuilt(node, [done[child] for child in node.children])
        if (found := _parted(made, parts)) is not None:
            made = binary("*", *found)
            parts[made] = found
        done[node] = made
    return {name: done[root] for name, root in roots.items()}


def _parted(node: Node, parts: Mapping[Node, tuple[Node, Node]]) -> tuple[Node, Node] | None:
    """The factor that differs from pair to pair, and the constant factor."""
    if not isinstance(node, Binary) or node.op not in ("*", "/") or node.type != "float" or not node.uses & _PER_PAIR:
        return None
    left, right = node.children
    if node.op == "*" and not left.uses & _PER_PAIR:
        left, right = right, left
    if right.uses & _PER_PAIR:
        return None
    # A quotient of constants that is written in the code is a factor where it is printed.
    if node.op == "/" and isinstance(right, Const):
        return None
    factor = right if node.op == "*" else binary("/", 1.0, right)
    core, other = parts.get(left, (left, None))
    return core, factor if other is None else binary("*", other, factor)


def _take_out(node: Node, names: dict[Node, Scalar], done: dict[Node, Node]) -> None:
    if node in done:
        return
    if node.type == "float" and not node.uses & _PER_PAIR and any(map(_is_costly, postorder(node))):
        number = len(names) + 1
        done[node] = names[node] = Scalar(f"first.constant{number if number > 1 else ''}", "float")
        return
    for child in node.children:
        _take_out(child, names, done)
    done[node] = rebuilt(node, [done[child] for child in node.children])


def _is_costly(node: Node) -> bool:
    if isinstance(node, Unary):
        return node.op in (*FLOAT_FUNCTIONS, "float")
    return isinstance(node, Load) or (isinstance(node, Binary) and node.op in ("*", "/"))
