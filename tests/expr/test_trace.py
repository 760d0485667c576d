"""Tracing functions: what is code, what is captured, and how traced functions combine."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from flashgen.errors import TraceError
from flashgen.expr.trace.traced import Traced
from flashgen.expr.trace.tracer import trace_mask, trace_score
from flashgen.expr.tree import functions as fg
from flashgen.expr.tree.text import text

WINDOW = 7
IDS = np.zeros((2, 8), np.int64)
SLOPES = np.ones(4, np.float32)


def shape(traced: Traced) -> tuple[str, dict[str, Any], list[str]]:
    return text(traced.root), dict(traced.scalars), sorted(traced.tensors)


def test_a_literal_is_code_and_a_captured_number_is_a_value_of_the_call() -> None:
    def mask(window: int) -> Traced:
        return trace_mask(lambda b, h, q, k: (q >= k) & (q - k < window) & (k < 100))

    assert shape(mask(5)) == ("(q >= k) & (q - k < window) & (k < 100)", {"window": 5}, [])
    assert mask(5).root is mask(6).root


def test_globals_are_captured_like_closures() -> None:
    traced = trace_mask(lambda b, h, q, k: (IDS[b, q] == IDS[b, k]) & (q - k < WINDOW))
    assert shape(traced) == ("(IDS[b, q] == IDS[b, k]) & (q - k < WINDOW)", {"WINDOW": 7}, ["IDS"])
    assert traced.tensors["IDS"] is IDS


def test_defaults_and_partial_arguments_are_captured() -> None:
    def mask(b: Any, h: Any, q: Any, k: Any, window: int = 3, *, n: int = 4) -> Any:
        return (q - k < window) | (k < n)

    assert shape(trace_mask(mask)) == ("(q - k < window) | (k < n)", {"window": 3, "n": 4}, [])
    assert shape(trace_mask(functools.partial(mask, window=9)))[1] == {"window": 9, "n": 4}
    leading = functools.partial(lambda width, b, h, q, k: q - k < width, 11)
    assert shape(trace_mask(leading)) == ("q - k < width", {"width": 11}, [])


def test_helper_functions_are_traced_with_what_they_capture() -> None:
    slopes, width = SLOPES, 5

    def near(q: Any, k: Any) -> Any:
        return abs(q - k) <= width

    def score(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return fg.where(near(q, k), s + slopes[h], s) + width

    traced = trace_score(score)
    assert shape(traced) == ("where(abs(q - k) <= width, s + slopes[h], s) + width", {"width": 5}, ["slopes"])


def test_functions_that_refer_to_each_other_are_traced() -> None:
    def power(x: Any, n: int) -> Any:
        return x if n == 1 else x * power(x, n - 1)

    assert text(trace_score(lambda s, b, h, q, k: power(s, 3)).root) == "s * (s * s)"


@dataclass
class Options:
    window: int
    slopes: Any
    table: dict[str, int]

    def mask(self, b: Any, h: Any, q: Any, k: Any) -> Any:
        return self.within(q, k) & (k < self.table["n"])

    def within(self, q: Any, k: Any) -> Any:
        return q - k < self.window

    def __call__(self, s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + self.slopes[h]


def test_attributes_of_captured_objects_are_captured() -> None:
    options = Options(3, SLOPES, {"n": 5})
    assert shape(trace_mask(options.mask)) == ("(q - k < window) & (k < table_n)", {"window": 3, "table_n": 5}, [])
    assert shape(trace_score(options)) == ("s + slopes[h]", {}, ["slopes"])
    assert shape(trace_mask(lambda b, h, q, k: q - k < options.window))[1] == {"window": 3}
    assert shape(trace_mask(lambda b, h, q, k: options.mask(b, h, q, k)))[1] == {"window": 3, "table_n": 5}
    checked = trace_mask(lambda b, h, q, k: q - k < (options.window if isinstance(options, Options) else 0))
    assert shape(checked)[1] == {"window": 3}


def test_items_of_captured_containers_are_captured() -> None:
    pair, tables = (2, 3), [SLOPES, IDS]
    traced = trace_score(lambda s, b, h, q, k: s * pair[1] + tables[0][h] + sum(n for n in pair))
    assert shape(traced) == (
        "s * pair_1 + tables_0[h] + (pair_0 + pair_1)",
        {"pair_0": 2, "pair_1": 3},
        ["tables_0"],
    )


def test_names_are_unique_and_can_be_used_in_cpp() -> None:
    def below(n: int) -> Callable[[Any], Any]:
        return lambda q: q < n

    n, short, where, _private, other = 3, 4, 5, 6, below(8)
    s = 9
    traced = trace_mask(lambda b, h, q, k: (k < n) & other(q) & (k < short) & (k < where) & (k < _private) & (k < s))
    assert set(traced.scalars) == {"n", "n_2", "short", "captured_where", "private", "captured_s"}
    assert sorted(traced.scalars.values()) == [3, 4, 5, 6, 8, 9]


def test_one_tensor_under_two_names_is_captured_once() -> None:
    first = second = np.zeros((2, 4), np.int32)
    assert len(trace_mask(lambda b, h, q, k: first[b, q] == second[b, k]).tensors) == 1


def test_what_is_captured_but_not_used_is_left_out() -> None:
    unused, used = np.zeros(3, complex), 2
    traced = trace_mask(lambda b, h, q, k: (unused, k < used)[1])
    assert shape(traced) == ("k < used", {"used": 2}, [])


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        ("bool", "bool"),
        ("uint8", "int"),
        ("int16", "int"),
        ("int64", "int"),
        ("float16", "float"),
        ("float32", "float"),
    ],
)
def test_tensors_of_every_element_type_are_read(dtype: str, expected: str) -> None:
    tensor = np.zeros(4, dtype)
    root = trace_score(lambda s, b, h, q, k: fg.where(True, tensor[h], 0)).root
    assert {n.type for n in (root, *root.children)} >= {expected} if expected != "bool" else "where" in text(root)


def test_bfloat16_tensors_are_read() -> None:
    half = np.zeros(4, ml_dtypes.bfloat16)
    assert shape(trace_score(lambda s, b, h, q, k: s + half[h]))[2] == ["half"]


@pytest.mark.torch
def test_torch_tensors_are_read_and_kept() -> None:
    import torch

    slopes, scale = torch.ones(4, requires_grad=True), torch.tensor(2.0)
    traced = trace_score(lambda s, b, h, q, k: s * scale + slopes[h])
    assert shape(traced) == ("s * scale + slopes[h]", {}, ["scale", "slopes"])
    assert traced.tensors["slopes"] is slopes
    with pytest.raises(TraceError, match=r"torch.tanh\(\) cannot take a traced value; write fg.tanh instead"):
        trace_score(lambda s, b, h, q, k: torch.tanh(s))
    with pytest.raises(TraceError, match=r"write fg.where instead"):
        trace_score(lambda s, b, h, q, k: torch.where(q > k, s, 0))


def test_lengths_are_part_of_the_language() -> None:
    assert text(trace_mask(lambda b, h, q, k: k - q <= fg.k_len - fg.q_len).root) == "k - q <= k_len - q_len"


def test_a_constant_may_be_returned() -> None:
    assert text(trace_mask(lambda b, h, q, k: True).root) == "True"
    assert text(trace_score(lambda s, b, h, q, k: q).root) == "float(q)"


# ---- combining


def test_masks_combine_and_clashing_names_make_way() -> None:
    def window(n: int) -> Traced:
        return trace_mask(lambda b, h, q, k: q - k < n)

    both = window(3) & window(5)
    assert shape(both) == ("(q - k < n) & (q - k < n_2)", {"n": 3, "n_2": 5}, [])
    assert shape(window(3) | window(3)) == ("q - k < n", {"n": 3}, [])
    assert text((~window(3)).root) == "q - k >= n"
    assert shape(both & window(7))[1] == {"n": 3, "n_2": 5, "n_3": 7}


def test_one_tensor_in_two_masks_keeps_one_name() -> None:
    def document(ids: Any, table: Any) -> Traced:
        return trace_mask(lambda b, h, q, k: ids[b, table[q]] == ids[b, k])

    other = np.zeros(8, np.int32)
    both = document(IDS, other) & trace_mask(lambda b, h, q, k: other[q] > IDS[b, k])
    assert shape(both) == ("(ids[b, table[q]] == ids[b, k]) & (table[q] > ids[b, k])", {}, ["ids", "table"])
    swapped = document(IDS, other) & document(other[None, :], np.zeros(8, np.int64))
    assert text(swapped.root) == "(ids[b, table[q]] == ids[b, k]) & (ids_2[b, table_2[q]] == ids_2[b, k])"


def test_what_combining_folds_away_is_captured_no_longer() -> None:
    n = 3
    always, never = trace_mask(lambda b, h, q, k: True), trace_mask(lambda b, h, q, k: False)
    documents = trace_mask(lambda b, h, q, k: (IDS[b, q] == IDS[b, k]) & (q - k < n))
    assert shape(always | documents) == ("True", {}, [])
    assert shape(documents & never) == ("False", {}, [])
    assert shape(~(documents | always) | (q_at_least_k := trace_mask(lambda b, h, q, k: q >= k))) == shape(q_at_least_k)
    biased = trace_score(lambda s, b, h, q, k: s + SLOPES[h] * n)
    assert shape(biased.then(trace_score(lambda s, b, h, q, k: 2.0))) == ("2.0", {}, [])


def test_scores_follow_each_other() -> None:
    cap = 30.0
    soft = trace_score(lambda s, b, h, q, k: fg.tanh(s / cap) * cap)
    alibi = trace_score(lambda s, b, h, q, k: s + SLOPES[h] * (k - q))
    assert text(soft.then(alibi).root) == "tanh(s / cap) * cap + SLOPES[h] * (k - q)"
    assert text(alibi.then(soft).root) == "tanh((s + SLOPES[h] * (k - q)) / cap) * cap"
    assert shape(alibi.then(soft))[1:] == ({"cap": 30.0}, ["SLOPES"])
