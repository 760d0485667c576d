"""How gradients of captured tensors are planned: what is summed over what, and which kernels that takes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import flashgen as fg
from flashgen.expr import k_len, minimum, q_len, where
from flashgen.plan import plan
from flashgen.plan.captured.gradients import gradients_of
from flashgen.spec import score

T1, T2, T4 = (np.zeros((4,) * rank, np.float32) for rank in (1, 2, 4))
BUCKETS = np.zeros(9, np.int32)

OVER: dict[str, tuple[Any, str]] = {
    "of a head": (lambda s, b, h, q, k: s * T1[h], "block"),
    "of a sequence and a group": (lambda s, b, h, q, k: s * T2[b, h // 2], "block"),
    "a constant": (lambda s, b, h, q, k: s * T1[0], "block"),
    "of a query": (lambda s, b, h, q, k: s * T2[h, q % 7], "rows"),
    "of a key": (lambda s, b, h, q, k: s * T2[k, h], "columns"),
    "by distance": (lambda s, b, h, q, k: s + T1[k - q], "diagonals"),
    "by distance from the end": (lambda s, b, h, q, k: s + T1[(q + (k_len - q_len)) - k], "diagonals"),
    "by limited distance": (lambda s, b, h, q, k: s + T2[h, minimum(abs(q - k), 3)], "diagonals"),
    "by buckets of distance": (lambda s, b, h, q, k: s + T1[where(q - k < 8, q - k, (q - k) // 8 + 7)], "diagonals"),
    "by looked-up distance": (lambda s, b, h, q, k: s + T1[BUCKETS[minimum(abs(k - q), 8)]], "diagonals"),
    "by twice the distance": (lambda s, b, h, q, k: s + T1[2 * k - 2 * q], "diagonals"),
    "by a sum": (lambda s, b, h, q, k: s + T1[q + k], "pairs"),
    "by distance and key": (lambda s, b, h, q, k: s + T2[k - q, k], "pairs"),
    "by distance of blocks": (lambda s, b, h, q, k: s + T1[q // 4 - k // 4], "pairs"),
    "by an uneven distance": (lambda s, b, h, q, k: s + T1[2 * k - q], "pairs"),
}


def gradients(function: Any) -> dict[str, Any]:
    attention = plan(fg.AttentionSpec(32, score=function))
    return {g.tensor.name: g for g in gradients_of(attention.kernels[0].expressions)}


@pytest.mark.parametrize("case", OVER)
def test_pairs_that_share_an_element(case: str) -> None:
    function, over = OVER[case]
    (gradient,) = gradients(function).values()
    assert [share.over for share in gradient.pairs] == [over]
    assert gradient.how == "sum"


@pytest.mark.parametrize(
    ("function", "how"),
    [
        (lambda s, b, h, q, k: s + T4[b, h, q, k], "tile"),
        (lambda s, b, h, q, k: s * T2[k, q], "tile"),
        (lambda s, b, h, q, k: s + T4[3, 0, q, k], "tile"),
        (lambda s, b, h, q, k: s + T4[0, q, q, k], "sum"),
        (lambda s, b, h, q, k: s + T2[q, k - 1], "sum"),
        (lambda s, b, h, q, k: s + T4[b, h // 2, q, k], "sum"),
        (lambda s, b, h, q, k: s + T2[q, k] * T2[k, q], "sum"),
        (lambda s, b, h, q, k: where(T2[q, k] > 0, s, s * 2), "none"),
    ],
)
def test_a_tensor_with_an_element_for_every_pair_needs_no_sums(function: Any, how: str) -> None:
    (gradient,) = gradients(function).values()
    assert gradient.how == how


def roles(spec: fg.AttentionSpec) -> list[str]:
    return [kernel.role for kernel in plan(spec).kernels if kernel.captured is not None]


def test_only_the_kernels_that_are_needed_are_planned() -> None:
    bias = score.bias(T4)
    assert roles(fg.AttentionSpec(32, score=bias)) == ["captured_clear", "captured_tile0"]
    both = bias >> score.bias(np.zeros((4, 4, 4)))
    assert roles(fg.AttentionSpec(32, score=both)) == ["captured_clear", "captured_tile0", "captured_tile1"]
    assert roles(fg.AttentionSpec(32, score=score.sink(T1))) == ["captured_clear", "captured_sink", "captured_store"]
    assert roles(fg.AttentionSpec(32, score=score.alibi(T1))) == ["captured_clear", "captured_pairs", "captured_store"]
    assert roles(fg.AttentionSpec(32, score=score.alibi(T1), direction="forward")) == []
    assert roles(fg.AttentionSpec(32, score=score.softcap(3.0))) == []
    assert roles(fg.AttentionSpec(32, mask=fg.causal())) == []


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_86", "sm_90", "sm_120"])
@pytest.mark.parametrize("head_dim", [8, 64, 128, 256])
def test_they_fit_wherever_the_backward_pass_does(arch: str, head_dim: int) -> None:
    everything = score.alibi(T1) >> score.relative_bias(np.zeros((4, 9))) >> score.bias(T4) >> score.sink(T1)
    attention = plan(fg.AttentionSpec(head_dim, dtype="fp16", score=everything), arch=arch)
    for kernel in attention.kernels:
        assert kernel.smem.bytes <= kernel.arch.max_smem_per_block
