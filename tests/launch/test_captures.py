"""Captured tensors are checked like the other arguments: before anything is launched."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import flashgen as fg
from flashgen.errors import ArgumentError
from flashgen.launch.arrays.array import HOST, ArrayInfo
from flashgen.launch.call.captures import Captures
from flashgen.plan.expressions import expressions_of
from flashgen.plan.model.plans import Problem
from flashgen.spec import AttentionSpec, score

PROBLEM = Problem(batch=1, heads_q=4, heads_kv=4, len_q=8, len_kv=8)
SPEC = AttentionSpec(64, score=score.alibi(np.ones(4, np.float32)))
Q = ArrayInfo("q", 0, (1, 8, 4, 64), (2048, 256, 64, 1), "bf16", 0)


def slopes(device: int, heads: int = 4) -> ArrayInfo:
    return ArrayInfo("slopes", 64, (heads,), (1,), "fp32", device)


@pytest.mark.parametrize(("device", "where"), [(HOST, "the CPU"), (1, "cuda:1")])
def test_a_captured_tensor_of_another_device_is_refused(device: int, where: str) -> None:
    captures = Captures(SPEC, expressions_of(SPEC))
    with pytest.raises(ArgumentError, match=rf"captured\['slopes'\] is on {where}, q on cuda:0; move it there"):
        captures.check([slopes(device)], Q, PROBLEM)
    captures.check([slopes(0)], Q, PROBLEM)


def test_a_captured_tensor_with_too_few_elements_is_refused() -> None:
    captures = Captures(SPEC, expressions_of(SPEC))
    with pytest.raises(ArgumentError, match=r"captured\['slopes'\] has 3 elements in dimension 0, .* with h, .* has 4"):
        captures.check([slopes(0, heads=3)], Q, PROBLEM)


def arrays(heads: int = 4, queries: int = 8) -> list[np.ndarray[Any, Any]]:
    random = np.random.default_rng(0)
    return [random.standard_normal((1, queries, heads, 16)).astype(np.float32) for _ in "qkv"]


def normal(*shape: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(1).standard_normal(shape).astype(np.float32)


def kernel(score: Any) -> fg.Kernel:
    return fg.build(fg.AttentionSpec(16, dtype="fp32", score=score), arch="sm_80", target="emulator")


@pytest.mark.parametrize("is_remembered", [False, True])
@pytest.mark.parametrize(
    ("built", "given", "axis"),
    [((1, 1, 8, 8), (1, 4, 8, 8), 1), ((1, 1, 8), (4, 8, 8), 0), ((1, 8), (8, 8), 0), ((4, 8, 1), (4, 8, 8), 2)],
)
def test_a_bias_of_another_broadcast_pattern_is_refused(
    built: tuple[int, ...], given: tuple[int, ...], axis: int, is_remembered: bool
) -> None:
    run, (q, k, v) = kernel(fg.bias(normal(*built))), arrays()
    o, lse = run(q, k, v)
    if is_remembered:
        run(q, k, v, captured={"tensor": normal(*built)})
    words = rf"captured\['tensor'\] has shape .*{given[axis]} elements in dimension {axis}.* built for 1"
    with pytest.raises(fg.ArgumentError, match=words):
        run(q, k, v, captured={"tensor": normal(*given)})
    with pytest.raises(fg.ArgumentError, match=words):
        run.backward(q, q, k, v, o, lse, captured={"tensor": normal(*given)}, captured_gradients=True)


def test_a_bias_of_the_same_pattern_and_of_other_lengths_is_taken() -> None:
    run = kernel(fg.bias(normal(1, 1, 8, 8)))
    for queries in (8, 5):
        q, k, v = arrays(queries=queries)
        bias = normal(1, 1, queries, queries)
        spec = fg.AttentionSpec(16, dtype="fp32", score=fg.bias(bias))
        o, _ = run(q, k, v, captured={"tensor": bias})
        np.testing.assert_allclose(o, fg.oracle.forward(spec, q, k, v)[0], atol=1e-5)


def test_tables_whose_size_is_part_of_the_code_keep_it() -> None:
    q, k, v = arrays()
    run = kernel(fg.relative_bias(normal(4, 7)))
    run(q, k, v, captured={"table": normal(4, 7)})
    for width in (5, 9):
        with pytest.raises(fg.ArgumentError, match=f"{width} elements in dimension 1.* built for 7"):
            run(q, k, v, captured={"table": normal(4, width)})


def test_an_index_that_leaves_elements_out_fixes_no_size() -> None:
    q, k, v = arrays()
    table = normal(3, 8)
    run = kernel(lambda s, b, h, q, k: s + table[1, k])
    for rows in (2, 3, 5):
        given = normal(rows, 8)
        o, _ = run(q, k, v, captured={"table": given})
        spec = fg.AttentionSpec(16, dtype="fp32", score=fg.bias(given[1]))
        np.testing.assert_allclose(o, fg.oracle.forward(spec, q, k, v)[0], atol=1e-5)
    with pytest.raises(fg.ArgumentError, match=r"1 elements in dimension 0, .* reads element 1; give it 2"):
        run(q, k, v, captured={"table": normal(1, 8)})
