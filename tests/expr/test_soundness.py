from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

from flashgen.expr.readings.numpy import evaluate, evaluate_all
from flashgen.expr.readings.tiles import TileRule, tile_rule
from flashgen.expr.tree.nodes import Const, Node
from flashgen.expr.tree.text import text

Array = np.ndarray[Any, Any]
LONGEST = 24
BATCHES = 8
#: A developer's run takes the first of them; DRAWN_CASES=ci takes all.
DRAWN = BATCHES if os.environ.get("DRAWN_CASES", "sample") != "sample" else 2
MASKS = 250
SHAPES = 10


def allowed_pairs(mask: Node, env: dict[str, Any]) -> Array:
    q, k = np.arange(env["q_len"])[:, None], np.arange(env["k_len"])[None, :]
    return np.broadcast_to(evaluate(mask, {**env, "q": q, "k": k}), (env["q_len"], env["k_len"]))


def check(mask: Node, rule: TileRule, env: dict[str, Any], tile_q: int, tile_k: int) -> None:
    """The rule against brute force, over all tiles of one problem."""
    allowed = allowed_pairs(mask, env)
    q_lo, k_lo = np.arange(0, env["q_len"], tile_q), np.arange(0, env["k_len"], tile_k)
    bounds = {
        "q_lo": q_lo[:, None],
        "q_hi": np.minimum(q_lo + tile_q, env["q_len"])[:, None] - 1,
        "k_lo": k_lo[None, :],
        "k_hi": np.minimum(k_lo + tile_k, env["k_len"])[None, :] - 1,
    }
    roots = [rule.may, rule.full, rule.key_begin, rule.key_end, rule.query_begin, rule.query_end]
    tiles = (len(q_lo), len(k_lo))
    may, full, *hull = (np.broadcast_to(x, tiles) for x in evaluate_all(roots, {**env, **bounds}))
    some = np.logical_or.reduceat(np.logical_or.reduceat(allowed, q_lo, 0), k_lo, 1)
    every = np.logical_and.reduceat(np.logical_and.reduceat(allowed, q_lo, 0), k_lo, 1)
    assert not (some & ~may).any(), "a tile with an allowed pair was called empty"
    assert not (full & ~every).any(), "a tile with a forbidden pair was called full"
    rows, columns = np.logical_or.reduceat(allowed, q_lo, 0), np.logical_or.reduceat(allowed, k_lo, 1).T
    check_hull(rows, hull[0][:, 0], hull[1][:, 0], some, k_lo, tile_k, exact=rule.keys_exact)
    check_hull(columns, hull[2][0], hull[3][0], some.T, q_lo, tile_q, exact=rule.queries_exact)
    check_band(allowed, rule, env)


def check_hull(needed: Array, begin: Array, end: Array, some: Array, starts: Array, tile: int, *, exact: bool) -> None:
    index = np.arange(needed.shape[1])
    inside = (begin[:, None] <= index) & (index < end[:, None])
    assert not (needed & ~inside).any(), "the loop leaves out an allowed pair"
    assert ((begin >= 0) & (end <= needed.shape[1])).all(), "the loop leaves the sequence"
    if exact:
        visited = np.logical_or.reduceat(inside, starts, 1)
        np.testing.assert_array_equal(visited, some, "an exact loop visits exactly the tiles with allowed pairs")


def check_band(allowed: Array, rule: TileRule, env: dict[str, Any]) -> None:
    if rule.band is None:
        return
    difference = np.arange(allowed.shape[1])[None, :] - np.arange(allowed.shape[0])[:, None]
    within = np.ones_like(difference, bool)
    if rule.band.lower is not None:
        within &= difference >= evaluate(rule.band.lower, env)
    if rule.band.upper is not None:
        within &= difference <= evaluate(rule.band.upper, env)
    np.testing.assert_array_equal(within, allowed, "the band is the mask")


def problem(random: Any) -> tuple[dict[str, Any], int, int]:
    rng = random.rng
    len_q, len_k = (int(n) for n in rng.integers(1, LONGEST + 1, 2))
    env = random.values(len_q, len_k)
    env.update(b=int(rng.integers(2)), h=int(rng.integers(3)))
    return env, int(rng.integers(1, 11)), int(rng.integers(1, 11))


@pytest.mark.parametrize("seed", range(DRAWN))
def test_tile_rules_of_random_masks_are_sound(draw: Any, seed: int) -> None:
    """All batches together are 20,000 pairs of a mask and a problem with its tile shape."""
    assert BATCHES * MASKS * SHAPES >= 20_000
    telling = 0
    for number in range(MASKS):
        random = draw(seed * MASKS + number)
        mask = random.bool_(3)
        rule = tile_rule(mask)
        telling += not isinstance(rule.may, Const) or not isinstance(rule.full, Const)
        for _ in range(SHAPES):
            env, tile_q, tile_k = problem(random)
            try:
                check(mask, rule, env, tile_q, tile_k)
            except AssertionError as error:
                scalars = {n: v for n, v in env.items() if not isinstance(v, np.ndarray)}
                raise AssertionError(f"{text(mask)} with {scalars}, tiles of {tile_q} x {tile_k}: {error}") from error
    # Rules that never say anything are sound too, so most have to say something.
    assert telling > MASKS // 2
