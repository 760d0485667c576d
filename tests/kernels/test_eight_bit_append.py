"""Appending keys and values to a cache of 8-bit numbers, on the emulator."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import flashgen as fg
from flashgen import oracle
from flashgen.verify import Mode
from tests.kernels.test_decode import a_call
from tests.kernels.test_eight_bit_cache import DTYPES, arrays_of, as_codes, kernel_of, spec_of

pytestmark = pytest.mark.in_turns(12)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_turned", [False, True])
def test_appended_8_bit_keys_have_the_scale_of_the_cache(dtype: str, is_turned: bool) -> None:
    spec = spec_of(dtype="e4m3", cache_dtype=dtype)
    kernel, random = kernel_of(spec), np.random.default_rng(9)
    kernel.target.options = Mode(race=True).options  # type: ignore[attr-defined]
    _, where, x = arrays_of(spec, a_call(seqlens=(40, 40, 40), page_size=7))
    held = replace(where, seqlens=np.array((20, 0, 33), np.int32), leftpad=None)
    # Every code of e4m3 is among them.
    new_k, new_v = (as_codes("e4m3", random.permutation(np.arange(3 * 5 * 2 * 32) % 256)) for _ in "kv")
    new_k, new_v = (new.reshape(3, 5, 2, 32) for new in (new_k, new_v))
    before = {name: codes.copy() for name, codes in x.items()}
    rows, rotary = new_k, None
    if is_turned:
        angles = random.uniform(0, 7, (64, 8))
        tables = (np.cos(angles).astype(new_k.dtype), np.sin(angles).astype(new_k.dtype))
        rotary = fg.Rotary(*tables, interleaved=False)
        with np.errstate(invalid="ignore"):
            turned = oracle.turned(new_k, held, rotary).astype(np.float32)
        rows = as_codes("e4m3", oracle.quantized("e4m3", turned))
    kernel.append(x["k"], x["v"], new_k, new_v, cache=held, rotary=rotary)
    for name, new, scale in (("k", rows, held.k_scale), ("v", new_v, held.v_scale)):
        exact = oracle.appended(before[name], new, held, scale=scale)
        found, wanted = (oracle.values_of(dtype)[codes.view(np.uint8)] for codes in (x[name], exact))
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("per", ["nothing", "number", "tensor", "head", "sequence", "page", "page and head"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cache", ["paged", "contiguous"])
def test_appended_numbers_are_those_of_a_16_bit_cache_rounded(cache: str, dtype: str, per: str) -> None:
    """After the rotation, which may differ by roundings from the oracle's."""
    if per.startswith("page") and cache == "contiguous":
        pytest.skip("a contiguous cache has no pages")
    spec = spec_of(cache=cache, cache_dtype=dtype, page_scales=per.startswith("page"), dtype="bf16")
    call = a_call(seqlens=(20, 0, 33), page_size=7, heads_kv=2, seed=8, mode=Mode(race=True))
    kernel = kernel_of(spec)
    kernel.target.options = call.mode.options  # type: ignore[attr-defined]
    _, where, x = arrays_of(spec, a_call(seqlens=(40, 40, 40), page_size=7), per)
    random, element = np.random.default_rng(9), spec.element.numpy()
    new_k, new_v = ((random.standard_normal((3, 5, 2, 32)) * 9).astype(element) for _ in "kv")
    new_v[0, 1] = 3e38
    new_k[1, 2, 0, 3] = np.nan
    angles = random.uniform(0, 7, (64, 8))
    rotary = fg.Rotary(np.cos(angles).astype(element), np.sin(angles).astype(element), interleaved=False)
    held = replace(where, seqlens=np.array(call.seqlens, np.int32), leftpad=None)
    before = {name: codes.copy() for name, codes in x.items()}
    q = random.standard_normal((3, 5, 4, 32)).astype(element)
    turned = kernel.append(x["k"], x["v"], new_k, new_v, cache=held, q=q, rotary=rotary)
    # The same by the kernel for a 16-bit cache.
    wide = kernel_of(replace(spec, cache_dtype=None, page_scales=False))
    wide_k, wide_v = (np.zeros(x["k"].shape, element) for _ in "kv")
    plain = replace(held, k_scale=None, v_scale=None)
    assert np.array_equal(turned, wide.append(wide_k, wide_v, new_k, new_v, cache=plain, q=q, rotary=rotary))
    rows = [oracle.turned(new_k, plain, rotary), new_v]
    for name, source, new, scale in zip("kv", (wide_k, wide_v), rows, (held.k_scale, held.v_scale), strict=True):
        exact = oracle.appended(np.zeros_like(source), new, plain)
        assert np.allclose(source.astype(np.float64), exact.astype(np.float64), rtol=2e-2, atol=0.1, equal_nan=True)
        kept = [source[place] for b in range(3) for place in oracle.cache._places(source, plain, b)]
        stored = oracle.appended(
            before[name],
            np.stack(kept).reshape(3, -1, *source.shape[2:])[:, :, :, :],
            replace(held, seqlens=np.zeros(3, np.int32)),
            scale=scale,
            page_scales=spec.page_scales,
        )
        written = oracle.appended(np.zeros(source.shape, np.float32), np.ones_like(new, np.float32), plain) != 0
        codes = x[name].view(np.uint8)
        assert np.array_equal(codes[written], stored.view(np.uint8)[written])
        assert np.array_equal(codes[~written], before[name].view(np.uint8)[~written])
