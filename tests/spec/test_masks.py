"""The named masks mean what they say, whatever the lengths, and combine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from flashgen.errors import SpecError, TraceError
from flashgen.oracle import Rules
from flashgen.oracle.problem import Problem
from flashgen.spec import AttentionSpec, Mask, causal, full, window
from flashgen.spec.masks import named as masks

BATCH, HEADS = 2, 3
IDS = np.array([[0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 2], [5, 5, 5, 5, 5, 5, 5, 5, 5, 7, 7, 7]], np.int32)
IDS_KV = np.array([[0, 1, 1, 2, 2], [5, 5, 7, 7, 9]], np.int64)
PATTERN = np.random.default_rng(0).integers(0, 2, (HEADS, 4, 6)).astype(bool)
LENGTHS = np.array([3, 0], np.int32)
Rule = Callable[[int, int, int, int, int], bool]


def allowed(mask: Any, len_q: int, len_kv: int) -> np.ndarray[Any, Any]:
    """``[b, h, q, k]`` as the oracle has it."""
    q, k = np.zeros((BATCH, len_q, HEADS, 8)), np.zeros((BATCH, len_kv, HEADS, 8))
    rules = Rules(AttentionSpec(8, mask=mask), Problem(q, k, k, None, 1.0))
    return np.array([[rules.allowed(b, h) for h in range(HEADS)] for b in range(BATCH)])


def by_definition(rule: Rule, len_q: int, len_kv: int) -> np.ndarray[Any, Any]:
    """The same, pair by pair; the rule also gets the query's position among the keys."""
    found = np.zeros((BATCH, HEADS, len_q, len_kv), bool)
    for b, h, q, k in np.ndindex(*found.shape):
        found[b, h, q, k] = rule(b, h, q, k, q + len_kv - len_q)
    return found


NAMED: dict[str, tuple[Mask, Rule]] = {
    "prefix": (masks.prefix_lm(3), lambda b, h, q, k, at: k < 3 or k <= at),
    "prefix per sequence": (masks.prefix_lm(LENGTHS), lambda b, h, q, k, at: k < LENGTHS[b] or k <= at),
    "dilated": (masks.dilated(3), lambda b, h, q, k, at: (at - k) % 3 == 0),
    "global": (masks.global_tokens(2), lambda b, h, q, k, at: at < 2 or k < 2),
    "chunked": (masks.chunked(4), lambda b, h, q, k, at: at // 4 == k // 4),
    "padding": (masks.key_padding(LENGTHS), lambda b, h, q, k, at: k < LENGTHS[b]),
    "blocks": (masks.block_sparse(PATTERN, (3, 2)), lambda b, h, q, k, at: PATTERN[h, q // 3, k // 2]),
    "one block size": (masks.block_sparse(PATTERN[0] * 7, 3), lambda b, h, q, k, at: PATTERN[0, q // 3, k // 3]),
    "window and": (causal() & masks.dilated(2), lambda b, h, q, k, at: k <= at and (at - k) % 2 == 0),
    "or": (window(1, 1) | masks.global_tokens(1), lambda b, h, q, k, at: abs(at - k) <= 1 or at < 1 or k < 1),
    "not": (~causal(), lambda b, h, q, k, at: k > at),
    "not everything": (~full(), lambda b, h, q, k, at: False),
    "top-left or": (
        window(0, 0, align="top-left") | window(None, -1 + 1),
        lambda b, h, q, k, at: q == k or k <= at,
    ),
}


@pytest.mark.parametrize("lengths", [(12, 12), (5, 9), (9, 5), (1, 10), (0, 3), (3, 0)])
@pytest.mark.parametrize("name", NAMED)
def test_a_named_mask_allows_what_its_definition_does(name: str, lengths: tuple[int, int]) -> None:
    mask, rule = NAMED[name]
    assert np.array_equal(allowed(mask, *lengths), by_definition(rule, *lengths))


def test_documents_are_distinguished_by_their_ids() -> None:
    assert np.array_equal(
        allowed(masks.document(IDS), 12, 12), by_definition(lambda b, h, q, k, at: IDS[b, q] == IDS[b, k], 12, 12)
    )
    assert np.array_equal(
        allowed(masks.document(IDS, IDS_KV), 12, 5),
        by_definition(lambda b, h, q, k, at: IDS[b, q] == IDS_KV[b, k], 12, 5),
    )


def test_a_function_is_a_mask() -> None:
    width = 2
    mask = Mask.of(lambda b, h, q, k: (q >= k) & (q - k < width) & (h != 1))
    expected = by_definition(lambda b, h, q, k, at: q >= k and q - k < 2 and h != 1, 6, 7)
    assert np.array_equal(allowed(mask, 6, 7), expected)
    assert np.array_equal(allowed(lambda b, h, q, k: (q >= k) & (q - k < width) & (h != 1), 6, 7), expected)


def test_a_function_of_the_distance_alone_is_a_band() -> None:
    mask = Mask.of(lambda b, h, q, k: (q >= k) & (q - k < 4))
    assert mask.is_band
    assert (mask.has_lower, mask.has_upper) == (True, True)
    assert mask.diagonals(10, 10) == (-3, 0)
    assert not masks.dilated(2).is_band


def test_equal_masks_are_equal_whatever_tensors_they_captured() -> None:
    assert masks.document(IDS) == masks.document(IDS + 1)
    assert hash(masks.document(IDS)) == hash(masks.document(IDS + 1))
    assert masks.document(IDS) != masks.document(IDS.astype(np.int64))
    assert masks.chunked(4) == masks.chunked(4)
    assert masks.chunked(4) != masks.chunked(5)
    assert causal() & masks.chunked(4) != masks.chunked(4)
    assert masks.chunked(4) != "chunked"


def test_masks_describe_themselves() -> None:
    assert (causal() & masks.key_padding(LENGTHS)).describe() == "causal & (k < lengths[b])"
    assert Mask.of(lambda b, h, q, k: q == k).describe() == "q == k"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: masks.prefix_lm(-1), "n=-1 is not a count; use a whole number from 0"),
        (lambda: masks.prefix_lm(2.5), "n=2.5 is not a count"),
        (lambda: masks.dilated(0), "stride=0 is not a count; use a whole number from 1"),
        (lambda: masks.chunked(True), "n=True is not a count"),
        (lambda: masks.document([0, 1]), r"ids=\[0, 1\] is not a tensor of 2 dimensions"),
        (lambda: masks.document(np.zeros(3, np.int32)), r"of shape \(3,\) is not a tensor of 2 dimensions"),
        (lambda: masks.key_padding(np.zeros((1, 1))), r"of shape \(1, 1\) is not a tensor of 1 dimensions"),
        (lambda: masks.block_sparse(PATTERN, (0, 2)), "block=0 is not a count"),
    ],
)
def test_what_is_no_mask_is_refused(make: Callable[[], Mask], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        make()


def test_a_mask_function_must_give_a_condition() -> None:
    with pytest.raises(TraceError, match="the mask function returned a number"):
        AttentionSpec(8, mask=lambda b, h, q, k: q - k)
