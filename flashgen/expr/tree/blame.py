"""Errors of expressions, shown at the line of the user's code that caused them."""

from __future__ import annotations

import ast
import itertools
import linecache
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import NamedTuple, NoReturn

from flashgen.errors import TraceError

_tracing: ContextVar[bool] = ContextVar("flashgen_tracing", default=False)
#: Frames of these packages stand between the user's line and the place where the error shows.
_PASSED_THROUGH = ("flashgen.expr", "numpy", "torch", "cupy", "jax")

#: What to write instead of a function that wants numbers.
OURS = {
    "min": "fg.minimum",
    "max": "fg.maximum",
    "amin": "fg.minimum",
    "amax": "fg.maximum",
    "fmin": "fg.minimum",
    "fmax": "fg.maximum",
    "minimum": "fg.minimum",
    "maximum": "fg.maximum",
    "abs": "abs",
    "fabs": "abs",
    "absolute": "abs",
    "where": "fg.where",
    "select": "fg.where",
    "exp": "fg.exp",
    "log": "fg.log",
    "sqrt": "fg.sqrt",
    "sin": "fg.sin",
    "cos": "fg.cos",
    "tan": "fg.tan",
    "tanh": "fg.tanh",
    "sigmoid": "fg.sigmoid",
    "expit": "fg.sigmoid",
    "floor": "//",
    "floor_divide": "//",
    "remainder": "%",
    "fmod": "%",
    "mod": "%",
    "logical_and": "&",
    "logical_or": "|",
    "logical_not": "~",
    "all": "&",
    "any": "|",
    "clip": "x.clamp(low, high)",
    "clamp": "x.clamp(low, high)",
    "pow": "a product, or fg.exp(y * fg.log(x))",
}
_CONSTRUCTS = (ast.BoolOp, ast.IfExp, ast.If, ast.While, ast.Assert, ast.UnaryOp, ast.Compare, ast.Call)
FUNCTIONS = (
    "fg.where, fg.minimum, fg.maximum, fg.exp, fg.log, fg.sqrt, fg.sin, fg.cos, fg.tan, fg.tanh, fg.sigmoid and abs"
)
PARENTHESES = "put each comparison in parentheses: (q >= k) & (q - k < n)"


class Span(NamedTuple):
    """A place in a file; columns are known from Python 3.11 on, otherwise -1."""

    file: str
    line: int
    column: int = -1
    end: int = -1

    @property
    def text(self) -> str:
        """The line itself, as it is in the file."""
        return linecache.getline(self.file, self.line).rstrip()


@contextmanager
def tracing() -> Iterator[None]:
    """Wraps the call of user code: errors name its lines, and traced values have no truth value."""
    token = _tracing.set(True)
    try:
        yield
    finally:
        _tracing.reset(token)


def is_tracing() -> bool:
    """Whether user code is being traced."""
    return _tracing.get()


def fail(message: str) -> NoReturn:
    """Raise TraceError; during tracing it begins with the user's line."""
    span = _user_span() if is_tracing() else None
    raise TraceError(message if span is None else with_line(span, message))


def with_line(span: Span, message: str) -> str:
    """``file:line: message`` and, where the source is at hand, the line with the place marked."""
    lines = [f"{Path(span.file).name}:{span.line}: {message}"]
    if text := span.text:
        indent = len(text) - len(text.lstrip())
        lines.append("    " + text.lstrip())
        if span.column >= indent and span.end > span.column:
            lines.append("    " + " " * (span.column - indent) + "^" * (span.end - span.column))
    return "\n".join(lines)


def span_of_traceback(traceback: TracebackType | None) -> Span | None:
    """The innermost line of user code that an exception passed through."""
    found = None
    while traceback is not None:
        if not _is_passed_through(traceback.tb_frame):
            found = _span(traceback.tb_frame.f_code, traceback.tb_lineno, traceback.tb_lasti)
        traceback = traceback.tb_next
    return found


def construct_in_question() -> ast.AST | None:
    """The statement or expression of the user's code that needs the value of a traced node."""
    span = _user_span()
    if span is None:
        return None
    here = [node for node in _nodes_of(span.file) if isinstance(node, _CONSTRUCTS) and _covers(node, span)]
    return min(here, key=_extent, default=None)


def called_name() -> str | None:
    """The dotted name of the function that the user's code calls here, if it calls one."""
    node = construct_in_question()
    return ast.unparse(node.func) if isinstance(node, ast.Call) else None


def _user_span() -> Span | None:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_passed_through(frame):
        frame = frame.f_back
    return None if frame is None else _span(frame.f_code, frame.f_lineno, frame.f_lasti)


def _is_passed_through(frame: FrameType) -> bool:
    name = frame.f_globals.get("__name__", "")
    return any(name == package or name.startswith(package + ".") for package in _PASSED_THROUGH)


def _span(code: CodeType, line: int, instruction: int) -> Span:
    if sys.version_info >= (3, 11):
        place = next(itertools.islice(code.co_positions(), instruction // 2, None), None)
        if place is not None:
            first, last, column, end = place
            if first is not None and first == last and column is not None and end is not None:
                return Span(code.co_filename, first, column, end)
    return Span(code.co_filename, line)


@lru_cache(maxsize=8)
def _parsed(file: str, lines: tuple[str, ...]) -> tuple[ast.AST, ...]:
    try:
        return tuple(ast.walk(ast.parse("".join(lines), file)))
    except (SyntaxError, ValueError):
        return ()


def _nodes_of(file: str) -> tuple[ast.AST, ...]:
    return _parsed(file, tuple(linecache.getlines(file)))


def _covers(node: ast.AST, span: Span) -> bool:
    first, last = getattr(node, "lineno", 0), getattr(node, "end_lineno", 0)
    if not first <= span.line <= last:
        return False
    if isinstance(node, ast.UnaryOp) and not isinstance(node.op, ast.Not):
        return False
    if isinstance(node, ast.Compare) and len(node.ops) < 2 and not isinstance(node.ops[0], (ast.In, ast.NotIn)):
        return False
    if span.column < 0 or first != last:
        return True
    begin, end = getattr(node, "col_offset", 0), getattr(node, "end_col_offset", 0)
    if isinstance(node, ast.Call):
        # A call around the place is not what happens there.
        return bool(begin == span.column and span.end == end)
    return bool(begin <= span.column and span.end <= end)


def _extent(node: ast.AST) -> tuple[int, int]:
    lines = getattr(node, "end_lineno", 0) - getattr(node, "lineno", 0)
    return lines, getattr(node, "end_col_offset", 0) - getattr(node, "col_offset", 0)
