"""What to write instead of Python that needs the number behind a traced value."""

from __future__ import annotations

import ast

from flashgen.expr.tree.blame import FUNCTIONS, OURS, PARENTHESES, called_name


def advice_for_call(name: str) -> str:
    """What to write instead of a call that does not know traced values."""
    ours = OURS.get(name.split(".")[-1])
    instead = f"write {ours} instead" if ours else f"use arithmetic, {FUNCTIONS}"
    return f"{name}() cannot take a traced value; {instead}"


def advice_for_number(wanted: str) -> str:
    """What to write instead of something that needs a number now."""
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


def advice_for_truth(node: ast.AST | None) -> str:
    """What to write instead of a statement or an expression that needs to know whether a value is true."""
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
