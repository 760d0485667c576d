"""Which tiles a mask makes empty, full or partial: exactly those that pairs say, one by one."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from flashgen.expr.readings.numpy import evaluate, evaluate_all
from flashgen.expr.readings.tiles import TileRule, tile_rule
from flashgen.expr.trace.traced import Traced
from flashgen.expr.trace.tracer import trace_mask
from flashgen.expr.tree.functions import k_len, q_len
from flashgen.expr.tree.nodes import Const, Index, Node
from flashgen.expr.tree.text import text
from flashgen.expr.tree.visit import postorder

Array = np.ndarray[Any, Any]
Parse = Callable[[str], Node]
BATCH, HEADS, LONGEST = 2, 3, 40
TILES = [(1, 1), (4, 4), (8, 4), (3, 7), (16, 8), (5, 16)]
SQUARE = [(1, 1), (7, 7), (24, 24), (33, 33)]
LENGTHS = [*SQUARE, (5, 23), (23, 5), (40, 17)]


def documents(rng: np.random.Generator, count: int) -> Array:
    return np.sort(rng.integers(0, count, (BATCH, LONGEST)), axis=1)


def causal(b: Node, h: Node, q: Node, k: Node) -> Node:
    return q >= k


def bottom_right(b: Node, h: Node, q: Node, k: Node) -> Node:
    return q + (k_len - q_len) >= k


def window(width: int) -> Callable[..., Node]:
    return lambda b, h, q, k: (q >= k) & (q - k < width)


def prefix_lm(n: int) -> Callable[..., Node]:
    return lambda b, h, q, k: (k < n) | (q >= k)


def document(count: int) -> Callable[..., Node]:
    ids = documents(np.random.default_rng(count), count)
    return lambda b, h, q, k: (ids[b, q] == ids[b, k]) & (q >= k)


def whole_document(count: int) -> Callable[..., Node]:
    ids = documents(np.random.default_rng(count), count)
    return lambda b, h, q, k: ids[b, q] == ids[b, k]


def dilated(stride: int) -> Callable[..., Node]:
    return lambda b, h, q, k: (q - k) % stride == 0


def causal_dilated(stride: int) -> Callable[..., Node]:
    return lambda b, h, q, k: ((q - k) % stride == 0) & (q >= k)


def global_tokens(n: int, width: int) -> Callable[..., Node]:
    return lambda b, h, q, k: (q < n) | (k < n) | (abs(q - k) <= width)


def causal_global_tokens(n: int, width: int) -> Callable[..., Node]:
    return lambda b, h, q, k: ((q < n) | (k < n) | (q - k < width)) & (q >= k)


def chunked(n: int) -> Callable[..., Node]:
    return lambda b, h, q, k: (q // n == k // n) & (q >= k)


def block_sparse(block: int) -> Callable[..., Node]:
    pattern = np.random.default_rng(block).random((HEADS, LONGEST, LONGEST)) < 0.3
    return lambda b, h, q, k: pattern[h, q // block, k // block]


def key_padding(first: int) -> Callable[..., Node]:
    lengths = np.array([first, 17])
    return lambda b, h, q, k: k < lengths[b]


ANY_LENGTHS: dict[str, Callable[..., Node]] = {
    "causal": causal,
    "bottom-right": bottom_right,
    "window": window(6),
    "window of one": window(1),
    "empty window": window(0),
    "prefix": prefix_lm(9),
    "no prefix": prefix_lm(0),
    "dilated": dilated(5),
    "dilated by one": dilated(1),
    "causal and dilated": causal_dilated(6),
    "global tokens": global_tokens(3, 2),
    "causal global tokens": causal_global_tokens(3, 5),
    "chunks": chunked(7),
    "block sparse": block_sparse(4),
    "key padding": key_padding(11),
    "no keys": key_padding(0),
    "documents": whole_document(4),
}
#: With a query's document read from the same table as a key's, positions mean the same in both.
EQUAL_LENGTHS = {"causal documents": document(5), "one causal document": document(1)}


def problems(traced: Traced, lengths: tuple[int, int]) -> list[dict[str, Any]]:
    heads = itertools.product(range(BATCH), range(HEADS))
    common = {**traced.scalars, **traced.tensors, "q_len": lengths[0], "k_len": lengths[1]}
    return [{**common, "b": b, "h": h} for b, h in heads]


def brute_force(mask: Node, env: dict[str, Any]) -> Array:
    shape = env["q_len"], env["k_len"]
    q, k = np.arange(shape[0])[:, None], np.arange(shape[1])[None, :]
    return np.broadcast_to(evaluate(mask, {**env, "q": q, "k": k}), shape)


def tiles_of(env: dict[str, Any], tile: tuple[int, int]) -> tuple[Array, Array, dict[str, Array]]:
    q_lo, k_lo = (np.arange(0, env[name], size) for name, size in zip(("q_len", "k_len"), tile, strict=True))
    bounds = {
        "q_lo": q_lo[:, None],
        "q_hi": np.minimum(q_lo + tile[0], env["q_len"])[:, None] - 1,
        "k_lo": k_lo[None, :],
        "k_hi": np.minimum(k_lo + tile[1], env["k_len"])[None, :] - 1,
    }
    return q_lo, k_lo, bounds


def assert_exact(traced: Traced, rule: TileRule, lengths: tuple[int, int], tile: tuple[int, int]) -> None:
    for env in problems(traced, lengths):
        allowed = brute_force(traced.root, env)
        q_lo, k_lo, bounds = tiles_of(env, tile)
        shape = len(q_lo), len(k_lo)
        may, full = (np.broadcast_to(x, shape) for x in evaluate_all([rule.may, rule.full], {**env, **bounds}))
        some = np.logical_or.reduceat(np.logical_or.reduceat(allowed, q_lo, 0), k_lo, 1)
        every = np.logical_and.reduceat(np.logical_and.reduceat(allowed, q_lo, 0), k_lo, 1)
        np.testing.assert_array_equal(may, some)
        np.testing.assert_array_equal(full, every)


@pytest.mark.parametrize("name", ANY_LENGTHS)
def test_the_tiles_of_named_masks_are_exactly_those_of_brute_force(name: str) -> None:
    traced = trace_mask(ANY_LENGTHS[name])
    rule = tile_rule(traced.root)
    for lengths, tile in itertools.product(LENGTHS, TILES):
        assert_exact(traced, rule, lengths, tile)
        # The backward pass goes over tiles the other way round: rows of keys.
        assert_exact(traced, rule, lengths, tile[::-1])


@pytest.mark.parametrize("name", EQUAL_LENGTHS)
def test_the_tiles_of_causal_documents_are_exactly_those_of_brute_force(name: str) -> None:
    traced = trace_mask(EQUAL_LENGTHS[name])
    rule = tile_rule(traced.root)
    for lengths, tile in itertools.product(SQUARE, TILES):
        assert_exact(traced, rule, lengths, tile)
        assert_exact(traced, rule, lengths, tile[::-1])


@pytest.mark.parametrize(
    "name", ["causal", "bottom-right", "window", "prefix", "key padding", "empty window", "no keys"]
)
def test_masks_of_bounds_alone_have_loops_without_tests(name: str) -> None:
    rule = tile_rule(trace_mask(ANY_LENGTHS[name]).root)
    assert rule.keys_exact
    assert rule.queries_exact
    assert rule.hull_exact


@pytest.mark.parametrize("name", ["global tokens", "chunks", "dilated", "block sparse", "documents"])
def test_other_masks_need_a_test_per_tile(name: str) -> None:
    rule = tile_rule(trace_mask(ANY_LENGTHS[name]).root)
    assert not rule.hull_exact
    assert rule.band is None


@pytest.mark.parametrize("value", [2**31 - 1, -(2**31), 2**31 - 5, -(2**31) + 3, 0])
@pytest.mark.parametrize(
    "mask", ["q - k < w", "k - q > w", "(k - q <= w) & (q - k <= w)", "abs(q - k) < w", "q // 3 < w"]
)
def test_bounds_do_not_wrap_around(read: Parse, mask: str, value: int) -> None:
    """Evaluated with exact integers the mask is right; the rule must say the same in 32 bits."""
    rule, root = tile_rule(read(mask)), read(mask)
    env = {"w": value, "q_len": 12, "k_len": 9}
    allowed = brute_force(root, env)
    q_lo, k_lo, bounds = tiles_of(env, (4, 4))
    may, full = (np.broadcast_to(x, (3, 3)) for x in evaluate_all([rule.may, rule.full], {**env, **bounds}))
    some = np.logical_or.reduceat(np.logical_or.reduceat(allowed, q_lo, 0), k_lo, 1)
    every = np.logical_and.reduceat(np.logical_and.reduceat(allowed, q_lo, 0), k_lo, 1)
    np.testing.assert_array_equal(may, some)
    np.testing.assert_array_equal(full, every)
    ints = [x for x in postorder(rule.may, rule.full, rule.key_begin, rule.key_end) if x.type == "int"]
    for node, result in zip(ints, evaluate_all(ints, {**env, **bounds}), strict=True):
        assert (abs(result) <= 2**31).all(), text(node)


def test_many_alternatives_become_coarser_and_stay_sound() -> None:
    q, k = Index("q"), Index("k")
    mask: Node = Const(True)
    for i in range(12):
        mask = mask & ((q % 13 == i) | (k < i + 2) | (q - k > 3 * i))
    rule = tile_rule(mask)
    assert len(postorder(rule.may, rule.full)) < 2000
    env = {"q_len": 40, "k_len": 40, "b": 0, "h": 0}
    allowed = brute_force(mask, env)
    for tile in TILES:
        q_lo, k_lo, bounds = tiles_of(env, tile)
        may = np.broadcast_to(evaluate(rule.may, {**env, **bounds}), (len(q_lo), len(k_lo)))
        some = np.logical_or.reduceat(np.logical_or.reduceat(allowed, q_lo, 0), k_lo, 1)
        assert not (some & ~may).any()


@pytest.mark.parametrize(
    "mask",
    [
        "abs(q - k) // 3 == 1",
        "abs(q - k) * 2 - 1 < w",
        "minimum(q, k) // 4 == 1",
        "where(on, q, k) // 4 == 2",
        "(q - k) * w > 9",
        "steps[k - q + 24] > 20",
        "(k - q) % 5 == 2",
    ],
)
def test_one_condition_on_one_quantity_is_exact(read: Parse, draw: Any, mask: str) -> None:
    root = read(mask)
    rule = tile_rule(root)
    for seed in range(4):
        env = draw(seed).values(19, 22)
        traced = Traced(root, {n: env[n] for n in ("w", "on")}, {"steps": env["steps"]})
        for tile in TILES:
            assert_exact(traced, rule, (19, 22), tile)
