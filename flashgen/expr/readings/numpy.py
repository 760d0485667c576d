"""The first reading: a tree evaluated with NumPy, in float64 and int64, over whole arrays at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashgen.errors import ArgumentError
from flashgen.expr.tree.build import MAX_INT, MIN_INT
from flashgen.expr.tree.nodes import Binary, Const, Load, Node, Select, Unary
from flashgen.expr.tree.text import name_of, text
from flashgen.expr.tree.tile_nodes import Range, Search, Wide
from flashgen.expr.tree.visit import postorder

Array = NDArray[Any]
#: Values by name: ``b h q k s q_len k_len``, captured numbers and tensors, ``q_lo q_hi k_lo k_hi``.
Env = Mapping[str, Any]

_UNARY: dict[str, Callable[[Array], Array]] = {
    "-": np.negative,
    "~": np.logical_not,
    "abs": np.abs,
    "exp": np.exp,
    "log": np.log,
    "sqrt": np.sqrt,
    "sin": np.sin,
    "cos": np.cos,
    "tan": np.tan,
    "tanh": np.tanh,
    "sigmoid": lambda x: np.exp(-np.logaddexp(0.0, -x)),
    "float": lambda x: x.astype(np.float64),
}
_BINARY: dict[str, Callable[[Array, Array], Array]] = {
    "+": np.add,
    "-": np.subtract,
    "*": np.multiply,
    "/": np.true_divide,
    "//": lambda a, b: np.floor_divide(a, np.where(b == 0, 1, b)),
    "%": lambda a, b: np.remainder(a, np.where(b == 0, 1, b)),
    "<": np.less,
    "<=": np.less_equal,
    ">": np.greater,
    ">=": np.greater_equal,
    "==": np.equal,
    "!=": np.not_equal,
    "&": np.bitwise_and,
    "|": np.bitwise_or,
    "^": np.bitwise_xor,
    "min": np.minimum,
    "max": np.maximum,
}
_DTYPES = {"bool": np.bool_, "int": np.int64, "float": np.float64}


def evaluate(root: Node, env: Env) -> Array:
    """The value of a tree; arrays in ``env`` are broadcast against each other.

    A division of ints by zero divides by one instead. An index outside of its tensor is an ArgumentError, and so are
    a negative shift count and a shift to the left whose result does not fit 32 bits.
    """
    return evaluate_all([root], env)[0]


def evaluate_all(roots: list[Node], env: Env) -> list[Array]:
    """The values of several trees; what they share is computed once."""
    values: dict[Node, Array] = {}
    with np.errstate(all="ignore"):
        for node in postorder(*roots):
            values[node] = _value(node, [values[child] for child in node.children], env)
    return [values[root] for root in roots]


def _value(node: Node, operands: list[Array], env: Env) -> Array:
    if isinstance(node, Binary) and node.op in ("<<", ">>"):
        return _shifted(node, *operands)
    if isinstance(node, Binary):
        return _BINARY[node.op](*operands)
    if isinstance(node, Unary):
        return _UNARY[node.op](*operands)
    if isinstance(node, Select):
        return np.where(*operands)
    if isinstance(node, Const):
        return np.asarray(node.value, _DTYPES[node.type])
    if isinstance(node, Load):
        return _loaded(node, operands, env)
    if isinstance(node, Range):
        return _extreme(node, operands, env)
    if isinstance(node, Search):
        return _place(node, operands, env)
    if isinstance(node, Wide):
        return _clamped(node, operands)
    return _as(env[name_of(node)], node.type)


def as_numpy(value: Any) -> Array:
    """A captured tensor of any library as a NumPy array."""
    if hasattr(value, "detach"):
        value = value.detach()
        value = value.float().cpu().numpy() if value.is_floating_point() else value.cpu().numpy()
    elif hasattr(value, "get") and hasattr(value, "__cuda_array_interface__"):
        value = value.get()
    return np.asarray(value)


def _as(value: Any, type_: str) -> Array:
    return as_numpy(value).astype(_DTYPES[type_], copy=False)


def _loaded(node: Load, indices: list[Array], env: Env) -> Array:
    tensor = as_numpy(env[node.tensor.name])
    for axis, (index, size) in enumerate(zip(indices, tensor.shape, strict=True)):
        wrong = (index < 0) | (index >= size)
        if wrong.any():
            found = int(index[wrong].flat[0]) if index.ndim else int(index)
            raise ArgumentError(
                f"{node.tensor.name} is indexed with {found} in dimension {axis}, which has {size} elements; "
                "give it an element for every b, h, q and k that uses it, or bound the index"
            )
    return np.asarray(tensor[tuple(indices)]).astype(_DTYPES[node.type], copy=False)


def _shifted(node: Binary, number: Array, count: Array) -> Array:
    number, count = np.broadcast_arrays(number, count)
    if (count < 0).any():
        raise ArgumentError(
            f"{text(node)} shifts by {int(count.min())}, and a shift count is not negative; "
            "bound it for every b, h, q and k: fg.maximum(count, 0)"
        )
    if node.op == ">>":
        return np.right_shift(number, np.minimum(count, 63))
    # Numbers of 32 bits, shifted by 32, still fit 64.
    exact = np.left_shift(number, np.minimum(count, 32))
    wrong = (exact < MIN_INT) | (exact > MAX_INT)
    if wrong.any():
        raise ArgumentError(
            f"{text(node)} is {int(number[wrong].flat[0])} << {int(count[wrong].flat[0])}, which does not fit the "
            "32-bit integers of the language; shift by less"
        )
    return exact


def _extreme(node: Range, bounds: list[Array], env: Env) -> Array:
    """Over an empty rectangle the neutral element; bounds are clipped to the tensor, as kernels do."""
    tensor = as_numpy(env[node.tensor.name]).astype(np.int64)
    rank = node.tensor.rank
    reduce, neutral = (np.min, MAX_INT) if node.kind == "min" else (np.max, MIN_INT)

    def of_box(ends: Array) -> int:
        box = tensor[tuple(_clipped(*b) for b in zip(ends[:rank], ends[rank:], tensor.shape, strict=True))]
        return int(reduce(box)) if box.size else neutral

    return _one_by_one(of_box, bounds)


def _clipped(low: int, high: int, size: int) -> slice:
    """``low`` to ``high`` inclusive, each moved into the dimension; nothing when they cross."""
    if low > high:
        return slice(0, 0)
    return slice(min(max(low, 0), size - 1), min(max(high, 0), size - 1) + 1)


def _place(node: Search, operands: list[Array], env: Env) -> Array:
    """Where a dimension's elements first reach a value, or are last within it."""
    tensor = np.moveaxis(as_numpy(env[node.tensor.name]).astype(np.int64), node.axis, -1)

    def in_row(asked: Array) -> int:
        *others, value = asked
        row = tensor[tuple(min(max(x, 0), size - 1) for x, size in zip(others, tensor.shape, strict=False))]
        hits = np.flatnonzero(row >= value if node.kind == "first" else row <= value)
        if node.kind == "first":
            return int(hits[0]) if hits.size else row.size
        return int(hits[-1]) if hits.size else -1

    return _one_by_one(in_row, operands)


def _one_by_one(answer: Callable[[Array], int], operands: list[Array]) -> Array:
    """The answer for the operands of each element, found once where they are the same."""
    shape = np.broadcast_shapes(*(x.shape for x in operands))
    rows = np.stack([np.broadcast_to(x, shape).ravel() for x in operands], axis=1)
    unique, inverse = np.unique(rows, axis=0, return_inverse=True)
    found = np.fromiter((answer(row) for row in unique), np.int64, len(unique))
    return found[inverse.ravel()].reshape(shape)


def _clamped(node: Wide, terms: list[Array]) -> Array:
    if node.op == "*":
        total = np.multiply(terms[0].astype(np.int64), terms[1])
    else:
        total = sum((factor * term for factor, term in zip(node.factors, terms, strict=True)), np.int64(0))
    return np.asarray(np.clip(total, MIN_INT, MAX_INT))
