"""Text back to a tree: Python's syntax, a short list of names, and never a call of ``eval``."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping

from flashgen.errors import TraceError
from flashgen.expr.tree.advice import is_bitwise
from flashgen.expr.tree.blame import PARENTHESES
from flashgen.expr.tree.build import as_node, binary, select, to_float, unary
from flashgen.expr.tree.captured import load
from flashgen.expr.tree.nodes import (
    FLOAT_FUNCTIONS,
    FUNCTIONS,
    INDICES,
    LENGTHS,
    Const,
    Index,
    Length,
    Node,
    Scalar,
    Score,
    Tensor,
)
from flashgen.expr.tree.operators import METHODS

_BINARY: dict[type[ast.operator], str] = {
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.Div: "/",
    ast.FloorDiv: "//",
    ast.Mod: "%",
    ast.BitAnd: "&",
    ast.BitOr: "|",
    ast.BitXor: "^",
    ast.LShift: "<<",
    ast.RShift: ">>",
}
_COMPARE: dict[type[ast.cmpop], str] = {
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.Eq: "==",
    ast.NotEq: "!=",
}
_UNARY = ("abs", *FLOAT_FUNCTIONS)
_FUNCTIONS = {**dict.fromkeys((*_UNARY, "float"), 1), "minimum": 2, "maximum": 2, "where": 3}
#: Whose functions are not methods of a value.
_MODULES = ("fg", "flashgen", "math", "np", "numpy", "torch")
_DEEPEST = 200
_LONGEST = 100_000
_INSTEAD: dict[type[ast.AST], str] = {
    ast.BoolOp: "write `&` for `and` and `|` for `or`, with each side in parentheses",
    ast.Not: "write `~` for `not`",
    ast.IfExp: "write where(condition, a, b) for `a if condition else b`",
    ast.Slice: "index with one number per dimension; slices are not in the language",
    ast.Attribute: f"write names without dots: {', '.join(FUNCTIONS)}",
    ast.Pow: "write x * x for x ** 2, and sqrt(x) for x ** 0.5",
}

Captured = Mapping[str, Scalar | Tensor]
#: What to write instead of a name that is not in the language; None where there is nothing to say.
Remedy = Callable[[str], str | None]


def parse(
    source: str, captured: Captured | None = None, *, score: bool = False, remedy: Remedy = lambda name: None
) -> Node:
    """The tree of a text; ``captured`` gives the type of each name that is not of the language.

    ``s`` is known with ``score=True``. TraceError shows the place of what is not understood, and for unknown names
    ``remedy``.
    """
    if len(source) > _LONGEST:
        raise TraceError(f"the expression has {len(source)} characters; at most {_LONGEST} are read")
    try:
        body = ast.parse(source.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        reason = error.msg if isinstance(error, SyntaxError) else str(error)
        raise TraceError(
            f"{_short(source)!r} is not an expression ({reason}); write one like (q >= k) & (q - k < 64)"
        ) from None
    return _Reader(source.strip(), captured or {}, remedy, score=score).read(body, 0)


def _short(source: str) -> str:
    return source if len(source) <= 80 else source[:77] + "..."


class _Reader:
    def __init__(self, source: str, captured: Captured, remedy: Remedy, *, score: bool) -> None:
        self._source = source
        self._captured = captured
        self._remedy = remedy
        self._bound: dict[str, Node] = {}
        self._score = score

    def read(self, node: ast.AST, depth: int) -> Node:
        if depth > _DEEPEST:
            raise self._error(node, f"is nested more than {_DEEPEST} deep; split the expression")
        try:
            return self._read(node, depth + 1)
        except TraceError as error:
            if error.violations[0].startswith("in "):
                raise
            raise TraceError(f"in {_short(self._segment(node))!r}: {error}") from None

    def _read(self, node: ast.AST, depth: int) -> Node:
        if isinstance(node, ast.Constant):
            if not isinstance(node.value, (bool, int, float)):
                raise self._error(node, "is not a number")
            return as_node(node.value)
        if isinstance(node, ast.Name):
            return self._name(node)
        if isinstance(node, ast.UnaryOp):
            return self._unary(node, depth)
        if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
            return binary(_BINARY[type(node.op)], self.read(node.left, depth), self.read(node.right, depth))
        if isinstance(node, ast.Compare):
            return self._compare(node, depth)
        if isinstance(node, ast.Call):
            return self._call(node, depth)
        if isinstance(node, ast.Subscript):
            return self._subscript(node, depth)
        if isinstance(node, ast.NamedExpr):
            value = self.read(node.value, depth)
            self._bound[node.target.id] = value
            return value
        culprit: ast.AST = node.op if isinstance(node, ast.BinOp) else node
        raise self._error(
            node,
            f"is not in the language; {_INSTEAD.get(type(culprit), 'use numbers, names, operators and functions')}",
        )

    def _name(self, node: ast.Name) -> Node:
        name = node.id
        if name in self._bound:
            return self._bound[name]
        if name in INDICES:
            return Index(name)
        if name in LENGTHS:
            return Length(name)
        if name == "s" and self._score:
            return Score()
        if name == "inf":
            return Const(float("inf"))
        value = self._captured.get(name)
        if isinstance(value, Scalar):
            return value
        if isinstance(value, Tensor):
            if value.rank == 0:
                return load(value, ())
            raise self._error(node, f"is a tensor of {value.rank} dimensions and has to be indexed")
        known = ", ".join([*(["s"] if self._score else []), *INDICES, *LENGTHS, *self._captured])
        instead = self._remedy(name)
        more = f"; for the function of that name {instead}" if instead else ""
        raise self._error(node, f"is not a known name; known are {known}{more}")

    def _unary(self, node: ast.UnaryOp, depth: int) -> Node:
        if isinstance(node.op, ast.Not):
            raise self._error(node, f"is not in the language; {_INSTEAD[ast.Not]}")
        # The smallest integer exists only with its sign.
        if isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant) and type(node.operand.value) is int:
            return as_node(-node.operand.value)
        operand = self.read(node.operand, depth)
        return (
            operand if isinstance(node.op, ast.UAdd) else unary("-" if isinstance(node.op, ast.USub) else "~", operand)
        )

    def _compare(self, node: ast.Compare, depth: int) -> Node:
        if len(node.ops) > 1 and any(map(is_bitwise, (node.left, *node.comparators))):
            raise self._error(node, f"compares what `&` or `|` gives; {PARENTHESES}")
        if len(node.ops) > 1:
            raise self._error(node, "is a chain; write (a < b) & (b < c) for a < b < c")
        if type(node.ops[0]) not in _COMPARE:
            raise self._error(node, "is not in the language; compare with < <= > >= == !=")
        left = self.read(node.left, depth)
        return binary(_COMPARE[type(node.ops[0])], left, self.read(node.comparators[0], depth))

    def _call(self, node: ast.Call, depth: int) -> Node:
        if isinstance(node.func, ast.Attribute) and self._is_method(node.func):
            return self._method(node, node.func, depth)
        name = node.func.id if isinstance(node.func, ast.Name) else ast.unparse(node.func)
        if name not in _FUNCTIONS or node.keywords:
            instead = self._remedy(name.rpartition(".")[2]) or f"functions are {', '.join(_FUNCTIONS)}"
            raise self._error(node, f"calls {name}, which is not in the language; {instead}")
        if len(node.args) != _FUNCTIONS[name]:
            raise self._error(node, f"gives {name} {len(node.args)} arguments; it takes {_FUNCTIONS[name]}")
        operands = [self.read(argument, depth) for argument in node.args]
        if name == "where":
            return select(*operands)
        if name in ("minimum", "maximum"):
            return binary(name[:3], *operands)
        return to_float(operands[0]) if name == "float" else unary(name, *operands)

    def _is_method(self, function: ast.Attribute) -> bool:
        """Whether it is a method of a value, and no function of a module."""
        of_module = isinstance(function.value, ast.Name) and function.value.id in _MODULES
        return function.attr in METHODS and not of_module

    def _method(self, node: ast.Call, function: ast.Attribute, depth: int) -> Node:
        operand = self.read(function.value, depth)
        arguments = [self.read(argument, depth) for argument in node.args]
        keywords = {word.arg: self.read(word.value, depth) for word in node.keywords if word.arg}
        try:
            return METHODS[function.attr](operand, *arguments, **keywords)  # type: ignore[no-any-return]
        except TypeError:
            raise self._error(node, f"gives {function.attr}() arguments that it does not take") from None

    def _subscript(self, node: ast.Subscript, depth: int) -> Node:
        # As many as there are brackets behind one another: bias[b][q] is bias[b, q].
        indices: list[ast.expr] = []
        value: ast.expr = node
        while isinstance(value, ast.Subscript):
            indices = [*(value.slice.elts if isinstance(value.slice, ast.Tuple) else [value.slice]), *indices]
            value = value.value
        tensor = self._captured.get(value.id) if isinstance(value, ast.Name) else None
        if not isinstance(tensor, Tensor):
            raise self._error(value, "is not a captured tensor, so it cannot be indexed")
        return load(tensor, tuple(self.read(index, depth) for index in indices))

    def _segment(self, node: ast.AST) -> str:
        return ast.get_source_segment(self._source, node) or self._source

    def _error(self, node: ast.AST, message: str) -> TraceError:
        return TraceError(f"in {_short(self._source)!r}: {_short(self._segment(node))} {message}")
