"""The cache as NumPy has it: by hand, and against attention to what it holds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from ml_dtypes import float8_e4m3fn

from flashgen import oracle
from flashgen.spec import AttentionSpec, KVCache, Rotary, causal

RANDOM = np.random.default_rng(0)
SPEC = AttentionSpec(4, mask=causal(), direction="forward", cache="paged")
CONTIGUOUS = AttentionSpec(4, dtype="e4m3", mask=causal(), direction="forward", cache="contiguous", cache_dtype="e4m3")


def ints(*values: object) -> np.ndarray:
    return np.array(values, np.int32)


def test_keys_of_a_sequence_are_found_through_the_table_of_its_row() -> None:
    pages = RANDOM.standard_normal((5, 3, 1, 4))
    keys = np.concatenate([pages[4], pages[1], pages[2]])  # 9 of them
    q = RANDOM.standard_normal((2, 2, 1, 4))
    table = ints([0, 0, 0], [4, 1, 2], [3, 99, 99])
    cache = KVCache(ints(7, 0), ints(1, 2), ints(2, 0), table, appended=1)
    o, lse = oracle.forward_cached(SPEC, q, pages, pages, cache)
    alone = AttentionSpec(4, mask=causal())
    expected, expected_lse = oracle.forward(alone, q[:1], keys[None, 2:8], keys[None, 2:8])
    np.testing.assert_allclose(o[0], expected[0])
    np.testing.assert_allclose(lse[0], expected_lse[0])
    # The other one has the key that was appended: the last query sees it, and the first sees none.
    np.testing.assert_allclose(o[1, 1], pages[3, 0])
    assert not o[1, 0].any()
    assert lse[1, 0, 0] == -np.inf


@pytest.mark.parametrize("heads_kv", [1, 2, 4])
@pytest.mark.parametrize("shape", [(), (1,), "heads", "heads of keys", "batch, heads", "batch, heads of keys"])
def test_queries_have_a_scale_each_or_that_of_their_head_of_keys(shape: Any, heads_kv: int) -> None:
    kinds = {"heads": (4,), "heads of keys": (heads_kv,), "batch, heads": (2, 4), "batch, heads of keys": (2, heads_kv)}
    scale = RANDOM.uniform(0.5, 2.0, kinds.get(shape, shape)).astype(np.float32)
    q, k = (RANDOM.standard_normal((2, 3, heads, 4)).astype(float8_e4m3fn) for heads in (4, heads_kv))
    found = oracle.forward_cached(CONTIGUOUS, q, k, k, KVCache(), q_scale=scale)
    of_heads = scale if scale.shape in ((), (1,)) or scale.shape[-1] == 4 else np.repeat(scale, 4 // heads_kv, -1)
    scaled = q.astype(np.float64) * np.broadcast_to(of_heads, (2, 4))[:, None, :, None]
    expected = oracle.forward(AttentionSpec(4, mask=causal()), scaled, *[k.astype(np.float64)] * 2)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-15)


def test_what_is_appended_lies_behind_what_was_there_and_what_has_no_room_is_left_out() -> None:
    before, new = np.zeros((3, 4, 1, 4)), RANDOM.standard_normal((2, 3, 1, 4))
    after = oracle.appended(before, new, KVCache(ints(0, 2), ints(2, 1)))
    np.testing.assert_array_equal(after[2], [*new[0], np.zeros((1, 4))])
    np.testing.assert_array_equal(after[1], [*np.zeros((2, 1, 4)), *new[1, :2]])
    assert not before.any()
    assert not after[0].any()


@pytest.mark.parametrize(
    ("interleaved", "expected"), [(True, [-2.0, 1.0, -4.0, 3.0, 5.0]), (False, [-3.0, -4.0, 1.0, 2.0, 5.0])]
)
def test_a_quarter_of_a_turn(interleaved: bool, expected: list[float]) -> None:
    x = np.array([1.0, 2.0, 3.0, 4.0, 5.0]).reshape(1, 1, 1, 5)
    rotary = Rotary(np.array([[1.0, 1.0], [0.0, 0.0]]), np.array([[0.0, 0.0], [1.0, 1.0]]), interleaved)
    still = oracle.turned(x, KVCache(ints(0)), rotary)
    np.testing.assert_array_equal(still, x)
    np.testing.assert_array_equal(oracle.turned(x, KVCache(ints(1)), rotary).ravel(), expected)
    np.testing.assert_array_equal(oracle.turned(x, KVCache(ints(9)), rotary).ravel(), expected)


def test_each_row_has_a_position_unless_all_have_one() -> None:
    x, angles = np.ones((1, 3, 1, 2)), np.arange(8.0).reshape(8, 1)
    rotary, cache = Rotary(np.cos(angles), np.sin(angles), positions=ints(4)), KVCache(ints(1))
    found = oracle.turned(x, cache, rotary)
    np.testing.assert_allclose(found[0, :, 0, 0], np.cos(angles[4:7, 0]) - np.sin(angles[4:7, 0]))
    together = oracle.turned(x, cache, rotary, one_position=True)
    np.testing.assert_array_equal(together, np.repeat(found[:, :1], 3, axis=1))
