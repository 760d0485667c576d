"""The fifth reading: a tree as Python text that reads well and parses back to the same tree."""

from __future__ import annotations

from itertools import count

from flashgen.expr.tree.nodes import (
    FLOAT_FUNCTIONS,
    Binary,
    Const,
    Index,
    Length,
    Load,
    Node,
    Scalar,
    Score,
    Select,
    Unary,
)
from flashgen.expr.tree.operators import BUILDER
from flashgen.expr.tree.pair_nodes import Start, Step
from flashgen.expr.tree.tile_nodes import Range, Search, TileVar, Wide
from flashgen.expr.tree.visit import postorder, uses_of

#: Python's precedence; a higher number binds tighter.
COMPARISON, OR, XOR, AND, SHIFT, SUM, PRODUCT, SIGN, ATOM = range(1, 10)
_BITS = {"|": OR, "^": XOR, "&": AND, "<<": SHIFT, ">>": SHIFT}
PRECEDENCE = {**_BITS, "+": SUM, "-": SUM, "*": PRODUCT, "/": PRODUCT, "//": PRODUCT, "%": PRODUCT}
NAMES = {"min": "minimum", "max": "maximum"}
#: Above this many characters, parts that occur more than once get names of their own.
_LONGEST = 2000


def text(root: Node) -> str:
    """The tree in one line, such as ``(q >= k) & (q - k < window)``."""
    length = _lengths(root)
    return _Printer(root, share=length > _LONGEST).top()


def _lengths(root: Node) -> int:
    """About how long the text gets when shared parts are written out; huge for trees that share a lot."""
    size: dict[Node, int] = {}
    for node in postorder(root):
        size[node] = 4 + sum(size[child] for child in node.children)
    return size[root]


class _Printer:
    """Writes one tree; with ``share``, a repeated part is named where it first occurs: ``(t1 := q - k)``."""

    def __init__(self, root: Node, *, share: bool) -> None:
        self._root = root
        uses = uses_of(root) if share else {}
        self._shared = {node for node, times in uses.items() if times > 1 and node.children and node is not root}
        self._bound: dict[Node, str] = {}
        taken = {name_of(node) for node in postorder(root)} if share else set()
        self._names = (name for number in count(1) if (name := f"t{number}") not in taken)

    def top(self) -> str:
        body, _ = self._write(self._root)
        return body

    def _within(self, node: Node, at_least: int) -> str:
        """As an operand of something that binds as tightly as ``at_least``."""
        if node in self._bound:
            return self._bound[node]
        if node in self._shared:
            body, _ = self._write(node)
            name = self._bound[node] = next(self._names)
            return f"({name} := {body})"
        body, precedence = self._write(node)
        return body if precedence >= at_least else f"({body})"

    def _write(self, node: Node) -> tuple[str, int]:
        if isinstance(node, Const):
            return constant(node), ATOM if not constant(node).startswith("-") else SIGN
        if isinstance(node, Score):
            return "s", ATOM
        if isinstance(node, Load):
            indices = f"[{self._list(node.indices)}]" if node.indices else ""
            return node.tensor.name + indices, ATOM
        if isinstance(node, Unary):
            return self._unary(node)
        if isinstance(node, Binary):
            return self._binary(node)
        if isinstance(node, Select):
            return f"where({self._list(self._operands(node))})", ATOM
        if isinstance(node, Range):
            spans = ", ".join(
                self._within(a, OR) if a is b else f"{self._within(a, OR)}:{self._within(b, OR)}"
                for a, b in zip(node.low, node.high, strict=True)
            )
            return f"{node.kind}({node.tensor.name}[{spans}])", ATOM
        if isinstance(node, Search):
            return self._search(node), ATOM
        if isinstance(node, Wide):
            return self._wide(node)
        return name_of(node), ATOM

    def _search(self, node: Search) -> str:
        indices = [self._within(index, OR) for index in node.others]
        indices.insert(node.axis, ":")
        order = ">=" if node.kind == "first" else "<="
        return f"{node.kind}({node.tensor.name}[{', '.join(indices)}] {order} {self._within(node.value, OR)})"

    def _unary(self, node: Unary) -> tuple[str, int]:
        if node.op in ("-", "~"):
            return node.op + self._within(node.operand, SIGN), SIGN
        operand = node.operand
        if node.op in FLOAT_FUNCTIONS and _is_cast(operand):
            operand = operand.children[0]
        return f"{node.op}({self._within(operand, COMPARISON)})", ATOM

    def _binary(self, node: Binary) -> tuple[str, int]:
        left, right = self._operands(node)
        if node.op in NAMES:
            return f"{NAMES[node.op]}({self._list((left, right))})", ATOM
        precedence = PRECEDENCE.get(node.op, COMPARISON)
        # A comparison inside of a comparison would read as a chain, and `&` beside one as C++.
        least = (SHIFT, SHIFT) if precedence == COMPARISON else (precedence, precedence + 1)
        if node.op in _BITS and node.type == "int":  # few know by heart which of these binds tighter
            least = (SIGN, SIGN)
        first, second = (self._within(x, p) for x, p in zip((left, right), least, strict=True))
        return f"{first} {node.op} {second}", precedence

    def _operands(self, node: Binary | Select) -> tuple[Node, ...]:
        """Without the conversions to float that reading the text makes by itself."""
        *before, a, b = node.children
        if isinstance(node, Binary) and node.op == "/":
            return (_uncast(a), _uncast(b))
        if a.type == "float" and not _is_cast(a):
            return (*before, a, _uncast(b))
        if b.type == "float" and not _is_cast(b):
            return (*before, _uncast(a), b)
        return (*before, a, b)

    def _wide(self, node: Wide) -> tuple[str, int]:
        if node.op == "*":
            return " * ".join(self._within(term, PRODUCT + 1) for term in node.terms), PRODUCT
        body = ""
        for factor, term in zip(node.factors, node.terms, strict=True):
            scale = "" if abs(factor) == 1 else f"{abs(factor)} * "
            body += f" {'-' if factor < 0 else '+'} {scale}{self._within(term, PRODUCT + 1)}"
        return body.removeprefix(" + ").strip(), SUM

    def _list(self, nodes: tuple[Node, ...]) -> str:
        return ", ".join(self._within(node, COMPARISON) for node in nodes)


def constant(node: Const) -> str:
    """A constant as Python writes it; infinity is ``inf``."""
    return repr(node.value)


def name_of(node: Node) -> str:
    """The name of a leaf, a load's tensor's, or nothing."""
    if isinstance(node, (Index, Length, Scalar, Start, Step, TileVar)):
        return node.name
    return node.tensor.name if isinstance(node, (Load, Range, Search)) else "s" if isinstance(node, Score) else ""


def _is_cast(node: Node) -> bool:
    return isinstance(node, Unary) and node.op == "float"


def _uncast(node: Node) -> Node:
    return node.children[0] if _is_cast(node) else node


BUILDER.text = text
