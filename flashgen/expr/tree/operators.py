"""What Python's operators and functions do to traced values: build trees, or say what to write instead."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Any, NoReturn

from flashgen.expr.tree.blame import FUNCTIONS, OURS, PARENTHESES, called_name, construct_in_question, fail, is_tracing
from flashgen.expr.tree.methods import Methods

if TYPE_CHECKING:
    from flashgen.expr.tree.nodes import Node

#: NumPy scalars reach nodes through these when they stand on the left.
_UFUNCS = {
    "add": "+",
    "subtract": "-",
    "multiply": "*",
    "divide": "/",
    "true_divide": "/",
    "floor_divide": "//",
    "remainder": "%",
    "less": "<",
    "less_equal": "<=",
    "greater": ">",
    "greater_equal": ">=",
    "equal": "==",
    "not_equal": "!=",
    "bitwise_and": "&",
    "bitwise_or": "|",
    "bitwise_xor": "^",
    "left_shift": "<<",
    "right_shift": ">>",
}


def _binary(op: str, left: object, right: object) -> Any:
    from flashgen.expr.tree.build import binary, can_be_node

    if op in ("==", "!=") and not is_tracing() and not (can_be_node(left) and can_be_node(right)):
        return NotImplemented
    return binary(op, left, right)


def _unary(op: str, operand: object) -> Any:
    from flashgen.expr.tree.build import unary

    return unary(op, operand)


class Operators(Methods):
    """Python's operators as tree builders; everything that needs a number now is an error with a remedy."""

    __slots__ = ()

    @property
    def advice(self) -> str:
        """What to do with an operand that is no node."""
        return f"{type(self).__name__} has no meaning here; use numbers, b, h, q, k, and captured numbers and tensors"

    def __add__(self, other: object) -> Node:
        return _binary("+", self, other)  # type: ignore[no-any-return]

    def __radd__(self, other: object) -> Node:
        return _binary("+", other, self)  # type: ignore[no-any-return]

    def __sub__(self, other: object) -> Node:
        return _binary("-", self, other)  # type: ignore[no-any-return]

    def __rsub__(self, other: object) -> Node:
        return _binary("-", other, self)  # type: ignore[no-any-return]

    def __mul__(self, other: object) -> Node:
        return _binary("*", self, other)  # type: ignore[no-any-return]

    def __rmul__(self, other: object) -> Node:
        return _binary("*", other, self)  # type: ignore[no-any-return]

    def __truediv__(self, other: object) -> Node:
        return _binary("/", self, other)  # type: ignore[no-any-return]

    def __rtruediv__(self, other: object) -> Node:
        return _binary("/", other, self)  # type: ignore[no-any-return]

    def __floordiv__(self, other: object) -> Node:
        return _binary("//", self, other)  # type: ignore[no-any-return]

    def __rfloordiv__(self, other: object) -> Node:
        return _binary("//", other, self)  # type: ignore[no-any-return]

    def __mod__(self, other: object) -> Node:
        return _binary("%", self, other)  # type: ignore[no-any-return]

    def __rmod__(self, other: object) -> Node:
        return _binary("%", other, self)  # type: ignore[no-any-return]

    def __and__(self, other: object) -> Node:
        return _binary("&", self, other)  # type: ignore[no-any-return]

    def __rand__(self, other: object) -> Node:
        return _binary("&", other, self)  # type: ignore[no-any-return]

    def __or__(self, other: object) -> Node:
        return _binary("|", self, other)  # type: ignore[no-any-return]

    def __ror__(self, other: object) -> Node:
        return _binary("|", other, self)  # type: ignore[no-any-return]

    def __xor__(self, other: object) -> Node:
        return _binary("^", self, other)  # type: ignore[no-any-return]

    def __rxor__(self, other: object) -> Node:
        return _binary("^", other, self)  # type: ignore[no-any-return]

    def __lshift__(self, other: object) -> Node:
        return _binary("<<", self, other)  # type: ignore[no-any-return]

    def __rlshift__(self, other: object) -> Node:
        return _binary("<<", other, self)  # type: ignore[no-any-return]

    def __rshift__(self, other: object) -> Node:
        return _binary(">>", self, other)  # type: ignore[no-any-return]

    def __rrshift__(self, other: object) -> Node:
        return _binary(">>", other, self)  # type: ignore[no-any-return]

    def __lt__(self, other: object) -> Node:
        return _binary("<", self, other)  # type: ignore[no-any-return]

    def __le__(self, other: object) -> Node:
        return _binary("<=", self, other)  # type: ignore[no-any-return]

    def __gt__(self, other: object) -> Node:
        return _binary(">", self, other)  # type: ignore[no-any-return]

    def __ge__(self, other: object) -> Node:
        return _binary(">=", self, other)  # type: ignore[no-any-return]

    def __eq__(self, other: object) -> Node:  # type: ignore[override]
        return _binary("==", self, other)  # type: ignore[no-any-return]

    def __ne__(self, other: object) -> Node:  # type: ignore[override]
        return _binary("!=", self, other)  # type: ignore[no-any-return]

    __hash__ = object.__hash__

    def __neg__(self) -> Node:
        return _unary("-", self)  # type: ignore[no-any-return]

    def __pos__(self) -> Operators:
        return self

    def __invert__(self) -> Node:
        return _unary("~", self)  # type: ignore[no-any-return]

    def __abs__(self) -> Node:
        return _unary("abs", self)  # type: ignore[no-any-return]

    def __pow__(self, exponent: object) -> Node:
        from flashgen.expr.tree.functions import power

        return power(self, exponent)

    def __rpow__(self, base: object) -> NoReturn:
        fail("a power with a traced exponent is not in the language; write fg.exp(y * fg.log(x)) for x ** y")

    def __bool__(self) -> bool:
        from flashgen.expr.tree.build import same_node

        if not is_tracing():
            answer = same_node(self)
            if answer is not None:
                return answer
        fail(_advice_for_truth(construct_in_question()))

    def __iter__(self) -> NoReturn:
        fail("a traced value cannot be looped over or unpacked; index the captured tensor itself: table[h]")

    def __getitem__(self, indices: object) -> NoReturn:
        fail("a traced value is one number and takes no index; index the captured tensor itself: table[h, k]")

    def __index__(self) -> NoReturn:
        fail(_advice_for_number("a whole number"))

    def __int__(self) -> NoReturn:
        fail(_advice_for_number("a whole number"))

    def __float__(self) -> NoReturn:
        fail(_advice_for_number("a number"))

    def __array__(self, *args: object, **options: object) -> NoReturn:
        fail(_advice_for_number("an array"))

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        if method == "__call__" and ufunc.__name__ in _UFUNCS and len(inputs) == 2 and not options:
            # NumPy hands over its own scalars as arrays without dimensions.
            numbers = [x.item() if getattr(x, "ndim", None) == 0 and hasattr(x, "item") else x for x in inputs]
            return _binary(_UFUNCS[ufunc.__name__], *numbers)
        fail(advice_for_call(f"np.{ufunc.__name__}"))

    def __array_function__(self, function: Any, *rest: object) -> NoReturn:
        fail(advice_for_call(f"np.{function.__name__}"))

    @classmethod
    def __torch_function__(cls, function: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        fail(advice_for_call(called_name() or f"torch.{getattr(function, '__name__', 'function')}"))


def advice_for_call(name: str) -> str:
    """What to write instead of a call that does not know traced values."""
    ours = OURS.get(name.split(".")[-1])
    instead = f"write {ours} instead" if ours else f"use arithmetic, {FUNCTIONS}"
    return f"{name}() cannot take a traced value; {instead}"


def _advice_for_number(wanted: str) -> str:
    name = called_name()
    if name is not None and name not in ("range", "int", "float"):
        return advice_for_call(name)
    if name == "range":
        return (
            "range() of a traced or captured value: how often code runs must be known when it is traced; "
            "write the number itself there"
        )
    return (
        f"a traced value is not {wanted} yet, so it cannot index a list or an array that was not captured by "
        "name, nor be converted; bind the array to a variable of its own next to the function "
        "(table = self.table) and index that: table[h]"
    )


def _advice_for_truth(node: ast.AST | None) -> str:
    if isinstance(node, ast.BoolOp):
        word, sign = ("and", "&") if isinstance(node.op, ast.And) else ("or", "|")
        return f"`{word}` cannot combine traced values; write `{sign}`, with each side in parentheses"
    if isinstance(node, ast.UnaryOp):
        return "`not` cannot negate a traced value; write `~` and put the condition in parentheses"
    if isinstance(node, ast.Compare) and isinstance(node.ops[0], (ast.In, ast.NotIn)):
        return "`in` cannot look for a traced value; write (x == 1) | (x == 2) for x in (1, 2)"
    if isinstance(node, ast.Compare) and any(map(is_bitwise, (node.left, *node.comparators))):
        return f"`&` and `|` bind tighter than comparisons; {PARENTHESES}"
    if isinstance(node, ast.Compare):
        return "a chain of comparisons needs `and`; write (a < b) & (b < c) for a < b < c"
    if isinstance(node, ast.Call) and ast.unparse(node.func) != "bool":
        return advice_for_call(ast.unparse(node.func))
    if isinstance(node, (ast.If, ast.IfExp, ast.While, ast.Assert)):
        word = {"IfExp": "if"}.get(type(node).__name__, type(node).__name__.lower())
        return (
            f"`{word}` cannot decide by a traced value, which stands for every query and key at once; "
            "write fg.where(condition, a, b)"
        )
    return (
        "a traced value is not true or false yet; write fg.where(condition, a, b) for `if`, `&` for `and`, "
        "`|` for `or`, `~` for `not`, and (a < b) & (b < c) for a < b < c"
    )


def is_bitwise(node: ast.AST) -> bool:
    """Whether Python code combines two values with ``&``, ``|`` or ``^``."""
    return isinstance(node, ast.BinOp) and isinstance(node.op, (ast.BitAnd, ast.BitOr, ast.BitXor))
