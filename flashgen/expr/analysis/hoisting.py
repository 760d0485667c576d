"""Trees over two sides, such as a query and a key: what follows from one side alone is found once for it.

A mask asks a captured tensor about a query, and about a key, and then compares. Loads, divisions and functions of one
side are taken out of the tree as *facts* of that side; what is left is cheap enough to be asked of every pair.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import count

from flashgen.common.identifiers import captured
from flashgen.expr.analysis.bounds import apart_at_most_zero
from flashgen.expr.analysis.linear import forms
from flashgen.expr.tree.nodes import FLOAT_FUNCTIONS, ORDERS, USES, Binary, Index, Load, Node, Scalar, Unary
from flashgen.expr.tree.rebuild import substitute
from flashgen.expr.tree.tile_nodes import Range, Search
from flashgen.expr.tree.visit import postorder

_COSTLY_BINARY = ("//", "%", "/")
#: Above so many operations for every pair, code for pair after pair is too much of it.
_FEW = 12


@dataclass(frozen=True, slots=True)
class Split:
    """Trees whose hoisted terms became captured numbers named ``side.fact``, and the terms of each side."""

    roots: Mapping[str, Node]
    facts: Mapping[str, Mapping[str, Node]]


def is_light(tree: Node) -> bool:
    """Whether the work per pair is small enough to unroll."""
    return sum(bool(node.children) for node in postorder(tree)) <= _FEW


def is_quick(tree: Node) -> bool:
    """Whether the work per pair is cheap: no division, function call or load."""
    return not any(_is_costly(node) for node in postorder(tree))


def split(roots: Mapping[str, Node], sides: Mapping[str, Iterable[Node]], taken: Iterable[str] = ()) -> Split:
    """Hoists terms out of some trees. ``sides`` are the leaves of each side; ``taken`` are names in use."""
    names = list(sides)
    leaves = {leaf: 1 << number for number, side in enumerate(sides) for leaf in sides[side]}
    order = postorder(*roots.values())
    touched: dict[Node, int] = {}
    costly: dict[Node, bool] = {}
    for node in order:
        bits = leaves.get(node, 0)
        for child in node.children:
            bits |= touched[child]
        touched[node] = bits
        costly[node] = bits != 0 and (_is_costly(node) or any(costly[child] for child in node.children))
    facts: dict[str, dict[str, Node]] = {side: {} for side in names}
    replacements: dict[Node, Node] = {}
    for node in _largest(roots.values(), lambda n: touched[n].bit_count() == 1 and costly[n]):
        side = names[touched[node].bit_length() - 1]
        name = _name(node, {*taken, *facts[side]})
        facts[side][name] = node
        replacements[node] = Scalar(f"{side}.{name}", node.type)
    return Split({name: substitute(root, replacements) for name, root in roots.items()}, facts)


def with_keys_apart(mask: Node) -> Node:
    """The mask with comparisons of sums that have the key alone on one side, where no sum can overflow: what stands on
    the other side is then the same for a whole row."""
    done: dict[Node, Node] = {
        node: moved
        for node in postorder(mask)
        if isinstance(node, Binary) and node.op in ORDERS and node.left.type == "int" and _uses_both(node)
        if (moved := _key_apart(node)) is not None
    }
    return substitute(mask, done)


def _uses_both(node: Node) -> bool:
    return bool(node.uses & USES["q"] and node.uses & USES["k"])


def _key_apart(node: Binary) -> Node | None:
    x = next(forms(node))
    if not x.q or not x.k or x.varying:
        return None
    return apart_at_most_zero(x.k, Index("k"), [(x.q, Index("q")), *x.others], x.constant)


def _is_costly(node: Node) -> bool:
    if isinstance(node, Unary):
        return node.op in FLOAT_FUNCTIONS
    return isinstance(node, (Load, Range, Search)) or (isinstance(node, Binary) and node.op in _COSTLY_BINARY)


def _largest(roots: Iterable[Node], wanted: Callable[[Node], bool]) -> list[Node]:
    """The outermost of the wanted nodes."""
    found: dict[Node, None] = {}
    seen: set[Node] = set()
    stack = list(roots)[::-1]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if wanted(node):
            found[node] = None
        else:
            stack.extend(reversed(node.children))
    return list(found)


def _name(node: Node, taken: set[str]) -> str:
    """A readable name for the term."""
    base = "fact"
    if isinstance(node, Load):
        base = captured(node.tensor.name)
    elif isinstance(node, Range):
        base = f"{captured(node.tensor.name)}_{node.kind}"
    if base not in taken:
        return base
    return next(name for number in count(2) if (name := f"{base}{number}") not in taken)
