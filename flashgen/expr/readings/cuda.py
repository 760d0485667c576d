"""The second reading: trees as CUDA C++, shared parts as statements, each root as one expression."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count

from flashgen.common.literal import float_literal, rounded_to_float
from flashgen.expr.tree.build import MIN_INT
from flashgen.expr.tree.nodes import USES, Binary, Const, Load, Node, Select, Unary
from flashgen.expr.tree.text import ATOM, COMPARISON, PRECEDENCE, PRODUCT, SIGN, SUM, name_of
from flashgen.expr.tree.tile_nodes import Range, Search, Wide
from flashgen.expr.tree.visit import postorder, uses_of

#: The C++ text of a leaf or tensor by its name in the language; what is missing keeps its name.
#: Texts stand for themselves wherever they are put: names, members, calls, or anything in parentheses.
NameMap = Mapping[str, str]

C_TYPES = {"bool": "bool", "int": "i32", "float": "float"}
_FUNCTIONS = {
    "abs": "magnitude",
    "exp": "exponential",
    "log": "logarithm",
    "sqrt": "square_root",
    "sin": "sine",
    "cos": "cosine",
    "tan": "tangent",
    "tanh": "hyperbolic_tangent",
    "sigmoid": "logistic",
    "min": "smaller",
    "max": "larger",
    "<<": "shift_left",
    ">>": "shift_right",
}
_PER_PAIR = USES["q"] | USES["k"] | USES["s"]
_SMALLEST_NORMAL = 2.0**-126


@dataclass(frozen=True, slots=True)
class Statement:
    """``const i32 t3 = ...;``, the value of a part that is needed more than once."""

    name: str
    node: Node
    value: str

    def __str__(self) -> str:
        return f"const {C_TYPES[self.node.type]} {self.name} = {self.value};"


@dataclass(frozen=True, slots=True)
class CudaText:
    """Statements in dependency order, and an expression for every root."""

    statements: tuple[Statement, ...]
    expressions: Mapping[str, str]


def print_cuda(roots: Mapping[str, Node], names: NameMap | None = None, *, prefix: str = "t") -> CudaText:
    """C++ for the roots; it needs ``flashgen/expression.cuh``.

    ``names`` may also answer ranges over whole tiles: its entry under ``range_name(node)`` is then called with the
    ends of the range and the indices that do not vary, and gives extremes; and searches: that under
    ``search_name(node)`` is called with the value before these. A name for a function of the language is called in
    its place.
    """
    return _Printer(roots, names or {}, prefix).printed()


def arguments_near_zero(root: Node) -> tuple[Node, ...]:
    """The per-pair arguments of functions that are cheaper near zero."""
    calls = (node for node in postorder(root) if isinstance(node, Unary) and node.op == "tanh")
    return tuple(dict.fromkeys(call.operand for call in calls if call.operand.uses & _PER_PAIR))


def range_name(node: Range) -> str:
    """The key of ``names`` for a range over a whole tile, such as ``range ids q``."""
    return f"range {node.tensor.name} {node.whole}"


def search_name(node: Search) -> str:
    """The key of ``names`` for a search along a dimension, such as ``first ids 1``."""
    return f"{node.kind} {node.tensor.name} {node.axis}"


class _Printer:
    def __init__(self, roots: Mapping[str, Node], names: NameMap, prefix: str) -> None:
        self._roots = roots
        self._names = names
        self._order = postorder(*roots.values())
        self._uses = uses_of(*roots.values())
        self._done: dict[Node, str] = {}
        taken = {*names.values(), *(name_of(node) for node in self._order)}
        self._fresh = (name for number in count(1) if (name := f"{prefix}{number}") not in taken)

    def printed(self) -> CudaText:
        statements = []
        for node in self._order:
            if node.children and self._uses[node] > 1:
                statement = Statement(next(self._fresh), node, self._write(node)[0])
                self._done[node] = statement.name
                statements.append(statement)
        return CudaText(tuple(statements), {name: self._within(root, 0) for name, root in self._roots.items()})

    def _within(self, node: Node, at_least: int) -> str:
        if node in self._done:
            return self._done[node]
        body, precedence = self._write(node)
        return body if precedence >= at_least else f"({body})"

    def _write(self, node: Node) -> tuple[str, int]:
        if isinstance(node, Const):
            body = constant(node)
            return body, SIGN if body.startswith("-") else ATOM
        if isinstance(node, Unary):
            return self._unary(node)
        if isinstance(node, Binary):
            return self._binary(node)
        if isinstance(node, Select):
            # `a & b` of bools is an int in C++.
            return self._call("select<bool>" if node.type == "bool" else "select", *node.children), ATOM
        if isinstance(node, Load):
            body = self._call("load", *node.indices, first=self._name(node))
            return (f"{body} != 0", COMPARISON) if node.type == "bool" else (body, ATOM)
        if isinstance(node, Range):
            return self._range(node), ATOM
        if isinstance(node, Search):
            return self._search(node), ATOM
        if isinstance(node, Wide):
            return self._wide(node), ATOM
        return self._name(node), ATOM

    def _name(self, node: Node) -> str:
        return self._names.get(name_of(node), name_of(node))

    def _call(self, function: str, *operands: Node, first: str = "") -> str:
        return f"{function}({', '.join([*([first] if first else []), *(self._within(x, 0) for x in operands)])})"

    def _unary(self, node: Unary) -> tuple[str, int]:
        if node.op in ("-", "~"):
            return {"-": "-", "~": "!"}[node.op] + self._within(node.operand, SIGN), SIGN
        if node.op == "float":
            return self._call("static_cast<float>", node.operand), ATOM
        return self._call(self._names.get(node.op, _FUNCTIONS[node.op]), node.operand), ATOM

    def _binary(self, node: Binary) -> tuple[str, int]:
        if node.op in ("min", "max", "<<", ">>"):
            return self._call(_FUNCTIONS[node.op], *node.children), ATOM
        if node.op in ("//", "%"):
            return self._integer_division("floor_div" if node.op == "//" else "floor_mod", node), ATOM
        if node.op == "/":
            return self._division(node)
        precedence = PRECEDENCE.get(node.op, COMPARISON)
        # In C++ comparisons bind tighter than &, ^ and |, unlike in Python.
        least = (SUM, SUM) if precedence == COMPARISON else (precedence, precedence + 1)
        left, right = (self._within(x, p) for x, p in zip(node.children, least, strict=True))
        return f"{left} {node.op} {right}", precedence

    def _integer_division(self, function: str, node: Binary) -> str:
        if isinstance(node.right, Const) and node.right.value > 0:
            return self._call(f"{function}<{node.right.value}>", node.left)
        return self._call(function, *node.children)

    def _division(self, node: Binary) -> tuple[str, int]:
        """Replaces division by a value that is the same for all pairs with multiplication by its reciprocal."""
        left = self._within(node.left, PRODUCT)
        if isinstance(node.right, Const) and node.right.value:
            factor = rounded_to_float(1 / float(node.right.value))
            if _SMALLEST_NORMAL <= abs(factor) < math.inf:
                return f"{left} * {float_literal(factor)}", PRODUCT
        if not node.right.uses & _PER_PAIR:
            return f"{left} * {self._call('reciprocal', node.right)}", PRODUCT
        return f"{left} / {self._within(node.right, PRODUCT + 1)}", PRODUCT

    def _range(self, node: Range) -> str:
        answer = self._names.get(range_name(node)) if node.whole else None
        if answer is not None:
            spans = list(zip(node.low, node.high, strict=True))
            ends = next(span for span in spans if span[0] is not span[1])
            fixed = [low for low, high in spans if low is high]
            return f"{self._call(answer, *ends, *fixed)}.{'smallest' if node.kind == 'min' else 'largest'}()"
        function = {"min": "smallest_in", "max": "largest_in"}[node.kind]
        low, high = (", ".join(self._within(x, 0) for x in bounds) for bounds in (node.low, node.high))
        return f"{function}({self._name(node)}, {{{low}}}, {{{high}}})"

    def _search(self, node: Search) -> str:
        answer = self._names.get(search_name(node))
        if answer is not None:
            return self._call(answer, node.value, *node.others)
        function = {"first": "first_at_least", "last": "last_at_most"}[node.kind]
        return self._call(f"{function}<{node.axis}>", node.value, *node.others, first=self._name(node))

    def _wide(self, node: Wide) -> str:
        if node.op == "*":
            a, b = node.terms
            return f"clamped(static_cast<i64>({self._within(a, 0)}) * {self._within(b, SIGN)})"
        body = ""
        for factor, term in zip(node.factors, node.terms, strict=True):
            sign = " - " if factor < 0 else " + "
            scaled = "" if abs(factor) == 1 else f"{abs(factor)} * "
            body += f"{sign}{scaled}static_cast<i64>({self._within(term, 0)})"
        return f"clamped({body.removeprefix(' + ').removeprefix(' ')})"


def constant(node: Const) -> str:
    """A constant as a C++ literal."""
    value = node.value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        # C++ has no negative literals, and 2147483648 is no int.
        return str(value) if value != MIN_INT else "(-2147483647 - 1)"
    rounded = rounded_to_float(value)
    if math.isinf(rounded):
        return "kInfinity" if rounded > 0 else "-kInfinity"
    return float_literal(rounded)
