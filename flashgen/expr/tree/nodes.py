"""The tree of a mask or a score: immutable nodes that exist once each.

Two nodes of the same structure are the same object, so comparing and hashing them costs nothing, and a
tree is a graph in which every shared part is one node. Python's operators on nodes build trees, ``==``
included; ``build`` says how. Outside of tracing, the truth of ``a == b`` is whether both are the same node.
"""

# ruff: noqa: D102 (a node is made by __new__, and the class says what of)
from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TypeVar
from weakref import WeakValueDictionary

# Importers of the classes of nodes find their base and the names of types here as well.
from flashgen.expr.tree.operators import Node as Node
from flashgen.expr.tree.operators import Type as Type

N = TypeVar("N", bound="Node")

#: What a node's value depends on, as bits of ``Node.uses``.
USES = {"b": 1, "h": 2, "q": 4, "k": 8, "s": 16}
INDICES = ("b", "h", "q", "k")
LENGTHS = ("q_len", "k_len")
TILE_VARIABLES = ("q_lo", "q_hi", "k_lo", "k_hi")
ORDERS = ("<", "<=", ">", ">=")
COMPARISONS = (*ORDERS, "==", "!=")
#: Functions that take and give floats.
FLOAT_FUNCTIONS = ("exp", "log", "sqrt", "sin", "cos", "tan", "tanh", "sigmoid")
FUNCTIONS = ("where", "minimum", "maximum", "abs", *FLOAT_FUNCTIONS, "float")
#: Names that a captured value cannot have.
RESERVED = frozenset({*USES, *LENGTHS, *TILE_VARIABLES, *FUNCTIONS, "inf"})

#: Every node there is, by what makes it itself.
nodes: WeakValueDictionary[tuple[object, ...], Node] = WeakValueDictionary()
_lock = threading.Lock()


def make(
    cls: type[N], key: tuple[object, ...], type_: Type, children: tuple[Node, ...], uses: int, **fields: object
) -> N:
    """A new node under its key, unless another thread was faster."""
    node = object.__new__(cls)
    put = object.__setattr__
    for name, value in fields.items():
        put(node, name, value)
    depth = 0
    for child in children:
        uses |= child.uses
        depth = max(depth, child.depth)
    put(node, "type", type_)
    put(node, "children", children)
    put(node, "depth", depth + 1)
    put(node, "uses", uses)
    with _lock:
        found = nodes.get(key)
        if found is not None:
            return found  # type: ignore[return-value]
        nodes[key] = node
        return node


def key_of(cls: type[Node], *fields: object) -> tuple[object, ...]:
    """What makes a node the same as another. Nodes in it go by their address: the node keeps its operands, and
    the entry goes when the node does, so no address in it is used again."""
    return (
        cls,
        *(tuple(id(v) for v in f) if isinstance(f, tuple) and f and isinstance(f[0], Node) else f for f in fields),
    )


class Const(Node):
    """A number written in the code."""

    __slots__ = ("value",)
    _fields = ("value",)
    value: bool | int | float

    def __new__(cls, value: bool | int | float) -> Const:
        type_: Type = "bool" if isinstance(value, bool) else "int" if isinstance(value, int) else "float"
        # 1 differs from 1.0 and True, and 0.0 from -0.0.
        key = (cls, type_, value.hex() if isinstance(value, float) else value)
        found = nodes.get(key)
        if found is not None:
            return found  # type: ignore[return-value]
        return make(cls, key, type_, (), 0, value=value)

    def _truth(self) -> bool | None:
        return bool(self.value) if self.type == "bool" else None


class Index(Node):
    """Which batch ``b``, query head ``h``, query ``q`` or key ``k``."""

    __slots__ = ("name",)
    _fields = ("name",)
    name: str

    def __new__(cls, name: str) -> Index:
        key = (cls, name)
        found = nodes.get(key)
        if found is not None:
            return found  # type: ignore[return-value]
        return make(cls, key, "int", (), USES[name], name=name)


class Length(Node):
    """The number of queries ``q_len`` or of keys ``k_len`` of the sequence."""

    __slots__ = ("name",)
    _fields = ("name",)
    name: str

    def __new__(cls, name: str) -> Length:
        key = (cls, name)
        found = nodes.get(key)
        if found is not None:
            return found  # type: ignore[return-value]
        return make(cls, key, "int", (), 0, name=name)


class Score(Node):
    """The logit ``s`` of a pair, scaled."""

    __slots__ = ()

    def __new__(cls) -> Score:
        key = (cls,)
        found = nodes.get(key)
        if found is not None:
            return found  # type: ignore[return-value]
        return make(cls, key, "float", (), USES["s"])


class Scalar(Node):
    """A captured number: part of the call, not of the code."""

    __slots__ = ("name",)
    _fields = ("name", "type")
    name: str

    def __new__(cls, name: str, type: Type) -> Scalar:
        key = (cls, name, type)
        found = nodes.get(key)
        if found is not None:
            return found  # type: ignore[return-value]
        return make(cls, key, type, (), 0, name=name)


@dataclass(frozen=True, slots=True)
class Tensor:
    """A captured tensor as trees speak of it: a name, the type of its elements, how many indices it takes."""

    name: str
    type: Type
    rank: int


class Load(Node):
    """An element of a captured tensor."""

    __slots__ = ("indices", "tensor")
    _fields = ("tensor", "indices")
    tensor: Tensor
    indices: tuple[Node, ...]

    def __new__(cls, tensor: Tensor, indices: tuple[Node, ...]) -> Load:
        key = key_of(cls, tensor, indices)
        found = nodes.get(key)
        if found is not None:
            return found  # type: ignore[return-value]
        return make(cls, key, tensor.type, indices, 0, tensor=tensor, indices=indices)


class Unary(Node):
    """``-`` ``~`` ``abs``, one of ``FLOAT_FUNCTIONS``, or ``float``: an int as a float."""

    __slots__ = ("op", "operand")
    _fields = ("op", "operand")
    op: str
    operand: Node

    def __new__(cls, op: str, operand: Node) -> Unary:
        key = (cls, op, id(operand))
        found = nodes.get(key)
        if found is not None:
            return found  # type: ignore[return-value]
        type_ = operand.type if op in ("-", "~", "abs") else "float"
        return make(cls, key, type_, (operand,), 0, op=op, operand=operand)


class Binary(Node):
    """``+ - * / // % min max``, a comparison, ``& |`` of bools, or ``& | ^ << >>`` of ints; both of one type."""

    __slots__ = ("left", "op", "right")
    _fields = ("op", "left", "right")
    op: str
    left: Node
    right: Node

    def __new__(cls, op: str, left: Node, right: Node) -> Binary:
        key = (cls, op, id(left), id(right))
        found = nodes.get(key)
        if found is not None:
            return found  # type: ignore[return-value]
        type_: Type = "bool" if op in COMPARISONS else left.type
        return make(cls, key, type_, (left, right), 0, op=op, left=left, right=right)

    def _truth(self) -> bool | None:
        return (self.left is self.right) == (self.op == "==") if self.op in ("==", "!=") else None


class Select(Node):
    """``then`` where ``condition`` holds, else ``other``."""

    __slots__ = ("condition", "other", "then")
    _fields = ("condition", "then", "other")
    condition: Node
    then: Node
    other: Node

    def __new__(cls, condition: Node, then: Node, other: Node) -> Select:
        key = (cls, id(condition), id(then), id(other))
        found = nodes.get(key)
        if found is not None:
            return found  # type: ignore[return-value]
        parts = (condition, then, other)
        return make(cls, key, then.type, parts, 0, condition=condition, then=then, other=other)
