"""C++ identifiers for captured values.

A captured value keeps its name in texts and in calls, whatever that name means in C++. Every C++ identifier made from
it starts with the prefix of one of the functions below. No other identifier or macro does, and no prefix starts with
another one, so no two identifiers can be the same.
"""

from __future__ import annotations


def captured(name: str, number: int = 1) -> str:
    """A captured value, or the ``number``-th of several that one tensor brings."""
    return f"captured{number if number > 1 else ''}_{name}"


def stride(name: str, axis: int) -> str:
    """The stride of a captured tensor's dimension, in elements."""
    return f"stride{axis}_{name}"


def size(name: str, axis: int) -> str:
    """The size of a captured tensor's dimension."""
    return f"size{axis}_{name}"


def survey(name: str, axis: int) -> str:
    """The table of a captured tensor's extremes along a dimension."""
    return f"survey{axis}_{name}"


def gradient(name: str) -> str:
    """The gradient of a captured tensor."""
    return f"gradient_{name}"


def sums(name: str) -> str:
    """The accumulators of that gradient."""
    return f"sums_{name}"


def elements(name: str) -> str:
    """How many elements that gradient has."""
    return f"elements_{name}"


def cleared(name: str) -> str:
    """How many of these have to be cleared."""
    return f"cleared_{name}"
