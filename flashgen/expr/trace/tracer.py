"""From a Python function to a tree: the function is called once, with nodes for b, h, q and k."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from flashgen.common.show import show, show_error
from flashgen.errors import FlashgenError, TraceError
from flashgen.expr.trace.capture import Captures
from flashgen.expr.trace.traced import Traced, check_counts, check_size, with_used
from flashgen.expr.tree.blame import Span, span_of_traceback, tracing, with_line
from flashgen.expr.tree.build import as_node, to_float
from flashgen.expr.tree.captured import Captured
from flashgen.expr.tree.nodes import INDICES, Index, Node, Score
from flashgen.expr.tree.operators import can_be_node

_PAIR = tuple(Index(name) for name in INDICES)


def trace_mask(function: Callable[..., Any]) -> Traced:
    """The tree of ``mask(b, h, q, k)``: a condition, true where query q may attend to key k."""
    return _traced(function, "mask", _PAIR)


def trace_score(function: Callable[..., Any]) -> Traced:
    """The tree of ``score(s, b, h, q, k)``: the logit to use in place of ``s``."""
    return _traced(function, "score", (Score(), *_PAIR))


def _traced(function: Callable[..., Any], what: str, arguments: tuple[Node, ...]) -> Traced:
    names = ", ".join(INDICES if what == "mask" else ("s", *INDICES))
    _check_signature(function, what, names, arguments)
    captures = Captures()
    with tracing():
        try:
            result = captures.callable(function)(*arguments)
        except FlashgenError:
            raise
        except Exception as error:
            raise _foreign(error, what) from error
    try:
        root = checked(result, what)
        check_counts(root, captures.scalars)
    except TraceError as error:
        span = _definition(function)
        raise TraceError(with_line(span, str(error)) if span else str(error)) from None
    return with_used(root, captures.scalars, captures.tensors)


def _check_signature(function: Callable[..., Any], what: str, names: str, arguments: tuple[Node, ...]) -> None:
    if not callable(function):
        raise TraceError(f"{what}={show(function)} is not a function; write lambda {names}: ...")
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError as error:
        span = _definition(function)
        message = f"the {what} function is called with ({names}), but {error}; write lambda {names}: ..."
        raise TraceError(with_line(span, message) if span else message) from None
    except ValueError:  # a builtin without a signature
        pass


def checked(result: object, what: str) -> Node:
    """The result of a mask or score function as a node; TraceError where it is none, or the wrong kind."""
    if result is None:
        raise TraceError(f"the {what} function returned None; does it lack a return?")
    if isinstance(result, Captured) or can_be_node(result):
        root = as_node(result)
    else:
        raise TraceError(
            f"the {what} function returned a {type(result).__name__}, not a traced value; return one value"
        )
    if what == "mask" and root.type != "bool":
        raise TraceError(f"the mask function returned a number, {root!r}; return a condition, such as q >= k")
    if what == "score" and root.type == "bool":
        raise TraceError(
            f"the score function returned a condition, {root!r}; return a number, or use it as the mask instead"
        )
    check_size(root, f"the {what}")
    return root if what == "mask" else to_float(root)


def _foreign(error: Exception, what: str) -> TraceError:
    """An error that Python or another library raised while the function ran."""
    span = span_of_traceback(error.__traceback__)
    message = (
        f"the {what} function failed while it was traced ({show_error(error)}); it is called with traced values, "
        "which know arithmetic, comparisons, & | ~ and flashgen's own functions"
    )
    return TraceError(with_line(span, message) if span else message)


def _definition(function: Callable[..., Any]) -> Span | None:
    """Where the function is defined."""
    while isinstance(function, functools.partial):
        function = function.func
    code = getattr(inspect.unwrap(function), "__code__", None) or getattr(type(function).__call__, "__code__", None)
    return None if code is None else Span(code.co_filename, code.co_firstlineno)
