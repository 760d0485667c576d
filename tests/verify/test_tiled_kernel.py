"""The bounds leave room for what a real kernel does differently from the yardstick, and for no mistake."""

from __future__ import annotations

import functools

import pytest

from flashgen.spec import AttentionSpec, causal, full, window
from flashgen.verify import cases_for, verify
from tests.verify.tiled import tiled_kernel


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("mask", [full(), causal(), window(9, 4)], ids=lambda m: m.describe())
def test_a_tiled_kernel_is_within_the_bounds(dtype, mask):
    for head_dim, head_dim_v in ((1, 1), (40, 24)):
        spec = AttentionSpec(head_dim, head_dim_v=head_dim_v, dtype=dtype, mask=mask)
        result = verify(functools.partial(tiled_kernel, spec), spec, cases=cases_for(spec, tile_q=32, tile_kv=32))
        assert result.ok, [failure.describe() for failure in result.failures]


@pytest.mark.parametrize("mistake", ["no rescale", "no row sum", "top-left", "last key", "head index", "sign of dlse"])
def test_a_mistake_is_found(mistake):
    spec = AttentionSpec(64, dtype="bf16", mask=causal())
    cases = cases_for(spec, tile_q=32, tile_kv=32)
    result = verify(functools.partial(tiled_kernel, spec, mistake=mistake), spec, cases=cases)
    assert result.failures
    assert result.worst.check.ratio > 1
