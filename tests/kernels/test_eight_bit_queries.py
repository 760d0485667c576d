"""8-bit queries that attend to a cache of 8-bit numbers, on the emulator."""

from __future__ import annotations

import numpy as np
import pytest

import flashgen as fg
from flashgen import oracle
from flashgen.verify import Mode
from tests.kernels.test_decode import MASKS, SCORES, a_call
from tests.kernels.test_eight_bit_cache import (
    ARCHS,
    NAN,
    arrays_of,
    as_codes,
    kernel_of,
    largest_value,
    of_sequence,
    own_query_scale,
    query_scale_of,
    spec_of,
)
from tests.kernels.test_forward_sm90 import launches

pytestmark = pytest.mark.in_turns(12)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dim", [64, 256])
def test_every_code_of_a_query_reaches_the_logit_exactly(dim: int, arch: str) -> None:
    spec = spec_of(dim, dtype="e4m3", cache="contiguous", mask=fg.full())
    values = oracle.values_of("e4m3")
    codes = np.where(np.isfinite(values), np.arange(256), 0)
    # Row i has one element that is not 0, one of the codes. So few queries run by the decode kernel.
    q = np.zeros((8, 32, 1, dim), np.uint8)
    for i, code in enumerate(codes):
        q[i // 32, i % 32, 0, i % dim] = code
    k = as_codes("e4m3", oracle.quantized("e4m3", np.ones((8, 1, 1, dim))))
    scale = np.float32(0.75)
    _, lse = kernel_of(spec, arch)(as_codes("e4m3", q), k, k, cache=fg.KVCache(), scale=1.0, q_scale=np.array(scale))
    np.testing.assert_allclose(lse.ravel(), values[codes] * 0.75, rtol=1e-6)


def test_a_nan_in_an_8_bit_query_reaches_its_row_alone() -> None:
    spec, call = spec_of(dtype="e4m3"), a_call(queries=(3, 3, 3))
    kernel = kernel_of(spec)
    q, cache, x = arrays_of(spec, call)
    expected, _ = kernel(q, x["k"], x["v"], cache=cache)
    q.view(np.uint8)[2, 1, 5, 7] = NAN
    o, _ = kernel(q, x["k"], x["v"], cache=cache)
    reached = np.zeros(o.shape[:3], bool)
    reached[2, 1, 5] = True
    assert np.array_equal(o[~reached], expected[~reached])
    assert np.isnan(o[reached].astype(np.float32)).all()


@pytest.mark.parametrize("cache", ["paged", "contiguous"])
@pytest.mark.parametrize("mode", [Mode(), Mode("random", 5), Mode(race=True), Mode("priority", 3, race=True)], ids=str)
@pytest.mark.parametrize(
    ("dim", "mask", "score"), [(64, "causal", "none"), (128, "window", "sink"), (96, "holes", "cap")]
)
def test_many_8_bit_queries_run_by_hoppers_kernel(cache: str, mode: Mode, dim: int, mask: str, score: str) -> None:
    spec = spec_of(dim, dtype="e4m3", cache=cache, mask=MASKS[mask], score=SCORES[score])
    kernel = kernel_of(spec, "sm_90a")
    for seed in (4, 5):  # scales of sequences and query heads, and of sequences and heads of keys
        call = a_call(seqlens=(300, 0, 170), queries=(150, 150, 150), page_size=32, seed=seed, heads_kv=4)
        q, cached, x = arrays_of(spec, call, "sequence")
        q_scale = query_scale_of(spec, call)
        with launches(kernel, mode, "prefill") as done:
            o, lse = kernel(q, x["k"], x["v"], cache=cached, q_scale=q_scale)
        assert done == {"FlashAttention-3"}
        for b in range(3):
            own, scale = of_sequence(cached, b, "sequence"), own_query_scale(q_scale, b)
            exact, exact_lse = oracle.forward_cached(spec, q[b : b + 1], x["k"], x["v"], own, q_scale=scale)
            # P has 4 bits.
            atol = 2**-4 * largest_value(spec, x["v"], own)
            np.testing.assert_allclose(o[b].astype(np.float64), exact[0], atol=atol)
            np.testing.assert_allclose(lse[b], exact_lse[0], rtol=1e-3, atol=2e-2)
