"""The named masks beyond bands. Where lengths differ, the last query stands at the last key."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flashgen.common.checks import is_whole
from flashgen.common.show import show
from flashgen.errors import SpecError
from flashgen.expr import Const, Node, is_tensor, k_len, q_len
from flashgen.spec.masks.mask import Mask, window
from flashgen.spec.tensors import check_tensor

#: ``sliding_window(left, right)`` is ``window(left, right)``: keys from left before to right after the query.
sliding_window = window


def prefix_lm(n: Any) -> Mask:
    """The first ``n`` keys are open to every query, the others causal; ``n`` may be a tensor, one per sequence."""
    if is_tensor(n):
        check_tensor("n", n, 1)
        return _mask(lambda b, h, q, k: (k < n[b]) | (k <= _position(q)))
    _check_count("n", n, smallest=0)
    return _mask(lambda b, h, q, k: (k < n) | (k <= _position(q)))


def document(ids: Any, ids_kv: Any = None) -> Mask:
    """A query attends to the keys of its own document: ``ids[b, q] == ids[b, k]``.

    ``ids`` is an integer tensor (batch, length). With ``ids_kv``, ``ids`` is that of the queries alone. Tiles are
    left out exactly when the ids never decrease along a sequence, as packed documents have them.
    """
    check_tensor("ids", ids, 2)
    if ids_kv is None:
        return _mask(lambda b, h, q, k: ids[b, q] == ids[b, k])
    check_tensor("ids_kv", ids_kv, 2)
    return _mask(lambda b, h, q, k: ids[b, q] == ids_kv[b, k])


def dilated(stride: int) -> Mask:
    """Every ``stride``-th key, counted from the query's own position, on both sides."""
    _check_count("stride", stride, smallest=1)
    return _mask(lambda b, h, q, k: (_position(q) - k) % stride == 0)


def global_tokens(n: int) -> Mask:
    """The first ``n`` positions attend to all keys, and all queries attend to them."""
    _check_count("n", n, smallest=0)
    return _mask(lambda b, h, q, k: (_position(q) < n) | (k < n))


def chunked(n: int) -> Mask:
    """Positions fall into chunks of ``n``, and a query attends to its own chunk (``attention_chunk``)."""
    _check_count("n", n, smallest=1)
    return _mask(lambda b, h, q, k: _position(q) // n == k // n)


def block_sparse(pattern: Any, block: int | tuple[int, int] = 64) -> Mask:
    """Blocks of ``block`` queries by keys, each allowed where ``pattern`` is true (or not 0).

    ``pattern`` is (query blocks, key blocks), with dimensions for heads, or batch and heads, before them.
    """
    rank = check_tensor("pattern", pattern, 2, 3, 4)
    sides = block if isinstance(block, tuple) and len(block) == 2 else (block, block)
    for side in sides:
        _check_count("block", side, smallest=1)
    # Constants, not captured numbers: a division by one is a shift or a multiplication.
    rows, columns = (Const(side) for side in sides)
    leading = "bh"[4 - rank :]

    def allowed(b: Any, h: Any, q: Any, k: Any) -> Any:
        places = {"b": b, "h": h}
        indices = (*(places[name] for name in leading), q // rows, k // columns)
        found = pattern[indices]
        return found if found.type == "bool" else found != 0

    return _mask(allowed)


def key_padding(lengths: Any) -> Mask:
    """The first ``lengths[b]`` keys of sequence b exist; the others are padding that nobody attends to."""
    check_tensor("lengths", lengths, 1)
    return _mask(lambda b, h, q, k: k < lengths[b])


def _mask(condition: Callable[..., Any]) -> Mask:
    return Mask.of(condition)


def _position(q: Node) -> Node:
    return q + (k_len - q_len)


def _check_count(name: str, value: object, *, smallest: int) -> None:
    if not is_whole(value, smallest, 2**30 - 1):
        raise SpecError(f"{name}={show(value)} is not a count; use a whole number from {smallest} to 2**30 - 1")
