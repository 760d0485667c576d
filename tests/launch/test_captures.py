"""Captured tensors are checked like the other arguments: before anything is launched."""

from __future__ import annotations

import numpy as np
import pytest

from flashgen.errors import ArgumentError
from flashgen.launch.array import HOST, ArrayInfo
from flashgen.launch.captures import Captures
from flashgen.plan.expressions import expressions_of
from flashgen.plan.model import Problem
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
