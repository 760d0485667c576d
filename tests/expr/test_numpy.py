from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flashgen.errors import ArgumentError
from flashgen.expr.readings.numpy import as_numpy, evaluate, evaluate_all
from flashgen.expr.trace.parse import parse
from flashgen.expr.tree.nodes import Index, Tensor
from flashgen.expr.tree.tile_nodes import Range, TileVar, Wide


def value(source: str, captured: Any, **env: Any) -> Any:
    return evaluate(parse(source, captured, score=True), env)


def test_indices_broadcast_into_a_matrix_of_pairs(captured: Any) -> None:
    q, k = np.arange(4)[:, None], np.arange(5)[None, :]
    np.testing.assert_array_equal(value("(q >= k) & (q - k < w)", captured, q=q, k=k, w=2), (q >= k) & (q - k < 2))


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("q // 3", -3),
        ("q % 3", 2),
        ("q // -3", 2),
        ("q % -3", -1),
        ("q / 2", -3.5),
        ("abs(q)", 7),
        ("minimum(q, 2)", -7),
        ("where(q < 0, 1.5, q)", 1.5),
        ("~(q < 0) | (q == -7)", True),
        ("exp(s)", np.exp(2.0)),
        ("log(s)", np.log(2.0)),
        ("tanh(s)", np.tanh(2.0)),
    ],
)
def test_operations_mean_what_python_means(captured: Any, source: str, expected: Any) -> None:
    found = value(source, captured, q=-7, s=2.0)
    assert found == expected
    assert found.dtype == np.asarray(expected).dtype


def test_sigmoid_is_right_far_from_zero_too(captured: Any) -> None:
    found = value("sigmoid(s)", captured, s=np.array([-1000.0, -700.0, 2.0, 700.0, np.inf, -np.inf, np.nan]))
    np.testing.assert_allclose(found, [0, np.exp(-700.0), 1 / (1 + np.exp(-2.0)), 1, 1, 0, np.nan])


def test_a_divisor_of_zero_counts_as_one(captured: Any) -> None:
    assert value("q // n", captured, q=7, n=0) == 7
    assert value("q % n", captured, q=7, n=0) == 0


def test_tensors_are_read_in_double_precision(captured: Any) -> None:
    bias = np.float16([[0.1, 0.2], [0.3, 0.4]])
    found = value("bias[h, q]", captured, bias=bias, h=1, q=np.arange(2))
    assert found.dtype == np.float64
    np.testing.assert_array_equal(found, bias[1].astype(np.float64))


@pytest.mark.parametrize(("index", "axis"), [(-1, 1), (5, 1)])
def test_an_index_outside_of_its_tensor_is_an_error(captured: Any, index: int, axis: int) -> None:
    with pytest.raises(ArgumentError, match=f"ids is indexed with {index} in dimension {axis}, which has 5 elements"):
        value("ids[b, q + m]", captured, ids=np.zeros((2, 5), int), b=0, q=np.array([0, 1]), m=index - (index > 0))


@pytest.mark.torch
def test_torch_tensors_are_read(captured: Any) -> None:
    import torch

    half = torch.tensor([1.5, 2.5], dtype=torch.bfloat16, requires_grad=True)
    np.testing.assert_array_equal(as_numpy(half), [1.5, 2.5])
    assert value("slopes[h]", captured, slopes=half, h=1) == 2.5
    assert value("seen[q]", captured, seen=torch.tensor([True, False]), q=0)


def test_ranges_cover_both_ends_and_stay_in_the_tensor() -> None:
    table = np.array([[4, 9, 2], [7, 1, 8]])
    low, high = (TileVar("q_lo"), TileVar("k_lo")), (TileVar("q_hi"), TileVar("k_hi"))
    tensor = Tensor("table", "int", 2)
    env = {
        "table": table,
        "q_lo": 0,
        "q_hi": np.array([0, 1, -1]),
        "k_lo": np.array([0, 1, 0]),
        "k_hi": np.array([1, 7, 0]),
    }
    smallest, largest = evaluate_all([Range("min", tensor, low, high), Range("max", tensor, low, high)], env)
    assert smallest.tolist() == [4, 1, 2**31 - 1]
    assert largest.tolist() == [9, 9, -(2**31)]


def test_wide_sums_and_products_are_exact_and_then_clamped() -> None:
    q = Index("q")
    values = {"q": np.array([2**31 - 1, 5, -(2**31)])}
    assert evaluate(Wide("+", (3, 1), (q, q)), values).tolist() == [2**31 - 1, 20, -(2**31)]
    assert evaluate(Wide("+", (1, -1), (q, q)), values).tolist() == [0, 0, 0]
    assert evaluate(Wide("*", (1, 1), (q, q)), values).tolist() == [2**31 - 1, 25, 2**31 - 1]
