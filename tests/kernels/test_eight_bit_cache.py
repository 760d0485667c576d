"""Attention to caches of 8-bit keys and values, on the emulator."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import flashgen as fg
from flashgen import oracle
from flashgen.verify import Mode
from tests.drawn import LEVEL, some
from tests.kernels import test_decode
from tests.kernels.test_decode import HEADS, MASKS, NAME, SCORES, Call, a_call, calls, of_one, rows_of
from tests.kernels.test_forward_sm90 import launches

pytestmark = pytest.mark.in_turns(12)

EXAMPLES = {"sample": 4, "ci": 12, "nightly": 100}[LEVEL]
ARCHS = ("sm_80", "sm_90a")
DTYPES = ("e4m3", "e5m2")
NAN = 0x7F


@dataclass(frozen=True)
class Scaled:
    """A call, and what its scales are of."""

    call: Call
    per: str


def scaled_calls(page_scales: bool) -> st.SearchStrategy[Scaled]:
    kinds = ("page", "page and head") if page_scales else ("nothing", "tensor", "number", "head", "sequence")
    return st.builds(Scaled, calls(), st.sampled_from(kinds))


def spec_of(dim: int = 32, **fields: Any) -> fg.AttentionSpec:
    given: dict[str, Any] = {"dtype": "fp16", "mask": fg.causal(), "cache": "paged", "cache_dtype": "e4m3", **fields}
    return fg.AttentionSpec(dim, direction="forward", **given)


def kernel_of(spec: fg.AttentionSpec, arch: str = "sm_80") -> fg.Kernel:
    return fg.build(spec, arch=arch, target="emulator")


def as_codes(dtype: str, codes: Any) -> Any:
    return np.asarray(codes, np.uint8).view(
        fg.AttentionSpec(4, direction="forward", cache="paged", cache_dtype=dtype).cache_element.numpy()
    )


def scales_of(per: str, call: Call, pages: int, seed: int) -> dict[str, Any]:
    """Scales of pages differ by factors of a million and more."""
    batch, heads = len(call.seqlens), call.heads_kv
    shapes = {"number": (), "tensor": (1,), "head": (heads,), "sequence": (batch, heads)}
    shapes |= {"page": (pages,), "page and head": (pages, heads)}
    if per == "nothing":
        return {}
    random, size = np.random.default_rng(seed), 7.0 if per.startswith("page") else 1.0
    draws = (np.exp(random.uniform(-size, size, shapes[per])) for _ in "kv")
    return {name: np.asarray(x, np.float32) for name, x in zip(("k_scale", "v_scale"), draws, strict=True)}


def arrays_of(spec: fg.AttentionSpec, call: Call, per: str = "head") -> tuple[Any, fg.KVCache, dict[str, Any]]:
    """What no sequence has is NaN in the cache, and the scale of a page that none has."""
    bare = replace(spec, cache_dtype=None, page_scales=False)
    q, cache, x = test_decode.arrays_of(bare, call)
    assert spec.cache_dtype is not None
    scales = scales_of(per, call, x["k"].shape[0], call.seed)
    if per.startswith("page"):
        used = {int(page) for row in cache.block_table for page in row if page < x["k"].shape[0]}
        unused = [page for page in range(x["k"].shape[0]) if page not in used]
        for scale in scales.values():
            scale[unused] = np.nan
    held = {name: as_codes(spec.cache_dtype, oracle.quantized(spec.cache_dtype, values)) for name, values in x.items()}
    return q, replace(cache, **scales), held


def query_scale_of(spec: fg.AttentionSpec, call: Call) -> Any:
    """A scale of 8-bit queries, of every kind in turn; None for other queries."""
    if spec.dtype != "e4m3":
        return None
    batch, random = len(call.seqlens), np.random.default_rng([call.seed, *b"queries"])
    shapes = ((), (1,), (HEADS,), (call.heads_kv,), (batch, HEADS), (batch, call.heads_kv), "number", None)
    shape = shapes[call.seed % len(shapes)]
    if shape is None:
        return None
    scale = np.exp(random.uniform(-1, 1, () if shape == "number" else shape)).astype(np.float32)
    return float(scale) if shape == "number" else np.asarray(scale)


def own_query_scale(scale: Any, b: int) -> Any:
    return scale[b : b + 1] if np.ndim(scale) == 2 else scale


def of_sequence(cache: fg.KVCache, b: int, per: str) -> fg.KVCache:
    own = of_one(cache, b)
    if per != "sequence":
        return own
    return replace(own, k_scale=cache.k_scale[b : b + 1], v_scale=cache.v_scale[b : b + 1])


def largest_value(spec: fg.AttentionSpec, v: Any, cache: fg.KVCache) -> float:
    """The largest value that some row attends to."""
    values, _ = oracle.cache.gathered(
        (len(cache.seqlens), 1),
        v,
        replace(cache, cu_seqlens_q=None, max_seqlen_q=0),
        scale=cache.v_scale,
        page_scales=spec.page_scales,
    )
    return float(np.abs(values).max(initial=0.0))


def check(kernel: fg.Kernel, spec: fg.AttentionSpec, scaled: Scaled) -> None:
    call, per = scaled.call, scaled.per
    q, cache, x = arrays_of(spec, call, per)
    q_scale = query_scale_of(spec, call)
    with launches(kernel, call.mode, "decode") as done:
        o, lse = kernel(q, x["k"], x["v"], cache=cache, q_scale=q_scale)
    assert done == {NAME}
    assert o.dtype == spec.out_element.numpy()
    rounding = 2 * spec.out_element.epsilon
    for b in range(len(call.seqlens)):
        rows, own = rows_of(call, b), of_sequence(cache, b, per)
        scale = own_query_scale(q_scale, b)
        exact, exact_lse = oracle.forward_cached(spec, q[rows][None], x["k"], x["v"], own, q_scale=scale)
        most = largest_value(spec, x["v"], own)
        np.testing.assert_allclose(o[rows].astype(np.float64), exact[0], atol=1e-3 * most, rtol=rounding)
        np.testing.assert_allclose(lse[:, rows] if call.is_packed else lse[b], exact_lse[0], rtol=1e-5, atol=1e-4)


DRAWN = [
    ("paged", "causal", "none", 128, 128, "sm_80", "bf16", "e4m3", False),
    ("contiguous", "window", "cap", 64, 64, "sm_90a", "fp16", "e5m2", False),
    ("paged", "tree", "sink", 80, 80, "sm_90a", "bf16", "e4m3", True),
    ("paged", "causal", "cap and sink", 128, 128, "sm_90a", "e4m3", "e4m3", False),
]
ALL = [
    ("paged", "full", "alibi", 96, 96, "sm_80", "bf16", "e5m2", True),
    ("paged", "window", "none", 256, 256, "sm_90a", "bf16", "e4m3", False),
    ("paged", "chunks", "cap and sink", 192, 128, "sm_80", "fp16", "e4m3", True),
    ("contiguous", "by head", "none", 64, 64, "sm_80", "fp16", "e4m3", False),
    ("paged", "holes", "sink", 64, 64, "sm_120", "bf16", "e5m2", True),
    ("contiguous", "causal", "none", 256, 256, "sm_120", "fp16", "e4m3", False),
    ("paged", "by head", "cap", 72, 40, "sm_80", "bf16", "e4m3", False),
    ("contiguous", "tree", "none", 20, 36, "sm_80", "fp16", "e5m2", False),
    ("paged", "causal", "none", 224, 224, "sm_80", "bf16", "e4m3", True),
    ("contiguous", "window", "none", 256, 256, "sm_80", "e4m3", "e4m3", False),
    ("paged", "full", "alibi", 96, 96, "sm_90a", "e4m3", "e4m3", True),
    ("paged", "holes", "none", 192, 192, "sm_90a", "e4m3", "e4m3", False),
    ("contiguous", "by head", "cap", 72, 40, "sm_80", "e4m3", "e5m2", False),
    ("paged", "chunks", "sink", 20, 36, "sm_120", "e4m3", "e4m3", True),
]


@pytest.mark.parametrize(
    ("cache", "mask", "score", "dim", "dim_v", "arch", "dtype", "cache_dtype", "page_scales"),
    some([*DRAWN, *ALL], *DRAWN),
)
def test_any_cache_gives_what_the_oracle_gives(
    cache: str,
    mask: str,
    score: str,
    dim: int,
    dim_v: int,
    arch: str,
    dtype: str,
    cache_dtype: str,
    page_scales: bool,
) -> None:
    fields: dict[str, Any] = {"dtype": dtype, "mask": MASKS[mask], "score": SCORES[score], "cache": cache}
    spec = spec_of(dim, head_dim_v=dim_v, cache_dtype=cache_dtype, page_scales=page_scales, **fields)
    kernel = kernel_of(spec, arch)

    @settings(
        max_examples=EXAMPLES, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(scaled=scaled_calls(page_scales))
    def agrees(scaled: Scaled) -> None:
        check(kernel, spec, scaled)

    agrees()


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_code_of_a_value_reaches_the_result_exactly(dtype: str, arch: str) -> None:
    kernel = kernel_of(spec_of(64, cache="contiguous", cache_dtype=dtype, mask=fg.full()), arch)
    codes = np.arange(256).reshape(4, 1, 1, 64)
    q = np.ones((4, 1, 1, 64), np.float16)
    cache = fg.KVCache(v_scale=np.array([0.5], np.float32))
    o, _ = kernel(q, as_codes(dtype, np.zeros_like(codes)), as_codes(dtype, codes), cache=cache)
    np.testing.assert_array_equal(o.ravel(), (oracle.values_of(dtype) * 0.5).astype(np.float16))


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_code_of_a_key_reaches_the_logit_exactly(dtype: str, arch: str) -> None:
    kernel = kernel_of(spec_of(64, cache="contiguous", cache_dtype=dtype, mask=fg.full()), arch)
    values = oracle.values_of(dtype)
    codes = np.where(np.isfinite(values), np.arange(256), 0).reshape(4, 1, 1, 64)
    # Head h has the logit of element h.
    q = np.broadcast_to(np.eye(64, dtype=np.float16), (4, 1, 64, 64))
    cache = fg.KVCache(k_scale=np.array([0.25], np.float32))
    _, lse = kernel(q, as_codes(dtype, codes), as_codes(dtype, codes), cache=cache, scale=1.0)
    np.testing.assert_allclose(lse.ravel(), values[codes].ravel() * 0.25, rtol=1e-6)


@pytest.mark.parametrize("dim", [32, 224])
def test_bf16_queries_of_any_size_keep_their_precision(dim: int) -> None:
    spec = spec_of(dim, dtype="bf16", cache="contiguous", mask=fg.full())
    kernel, random = kernel_of(spec), np.random.default_rng(0)
    # Heads of very different sizes; their first elements are 2^25 times larger, and meet zeros.
    q = random.standard_normal((1, 1, 16, dim))
    q[..., :4] *= 2.0**25
    sizes = np.exp2(np.linspace(-60, 60, 16))[:, None]
    q = (q * sizes).astype(spec.element.numpy())
    codes = oracle.quantized("e4m3", random.standard_normal((1, 40, 16, dim)))
    codes[..., :4] = 0
    k = as_codes("e4m3", codes)
    # Scales of heads bring all logits to one size.
    cache = fg.KVCache(k_scale=(1 / sizes[:, 0]).astype(np.float32))
    o, lse = kernel(q, k, k, cache=cache)
    exact, exact_lse = oracle.forward_cached(spec, q, k, k, cache)
    np.testing.assert_allclose(lse, exact_lse, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(o.astype(np.float64), exact, atol=1e-2)


def two_pages(small: float, k_scale: float = 1.0) -> tuple[fg.AttentionSpec, Any, Any, Any, fg.KVCache]:
    """The first page has nearly all probability and the scale ``small``, and the second one the scale 1."""
    spec, random = spec_of(dtype="bf16", mask=fg.full(), page_scales=True), np.random.default_rng(1)
    q = np.ones((1, 1, 1, 32), spec.element.numpy())
    keys = np.zeros((2, 16, 1, 32))
    keys[0] = 4.0
    values = random.standard_normal((2, 16, 1, 32))
    k, v = (as_codes("e4m3", oracle.quantized("e4m3", x)) for x in (keys, values))
    scales = {"k_scale": np.full(2, k_scale, np.float32), "v_scale": np.array([small, 1.0], np.float32)}
    return spec, q, k, v, fg.KVCache(np.array([32], np.int32), block_table=np.array([[0, 1]], np.int32), **scales)


@pytest.mark.parametrize("small", [1e-9, 1e-4, 1e6])
def test_scales_of_pages_may_differ_by_any_factor(small: float) -> None:
    spec, q, k, v, cache = two_pages(small)
    o, lse = kernel_of(spec)(q, k, v, cache=cache, scale=0.5)
    exact, exact_lse = oracle.forward_cached(spec, q, k, v, cache, scale=0.5)
    np.testing.assert_allclose(lse, exact_lse, rtol=1e-5)
    np.testing.assert_allclose(o.astype(np.float64), exact, rtol=5e-3, atol=np.abs(exact).max() * 2e-3)


def test_values_of_a_page_with_scale_zero_are_zeros() -> None:
    spec, q, k, v, cache = two_pages(0.0)
    o, lse = kernel_of(spec)(q, k, v, cache=cache, scale=0.05)
    exact, exact_lse = oracle.forward_cached(spec, q, k, v, cache, scale=0.05)
    np.testing.assert_allclose(lse, exact_lse, rtol=1e-5)
    np.testing.assert_allclose(o.astype(np.float64), exact, rtol=5e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["k", "v"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_scales", [False, True])
def test_a_nan_reaches_only_rows_that_attend_to_it(dtype: str, name: str, page_scales: bool) -> None:
    spec = spec_of(cache_dtype=dtype, page_scales=page_scales)
    kernel, call = kernel_of(spec), a_call(queries=(3, 3, 3))
    q, cache, x = arrays_of(spec, call, "page" if page_scales else "head")
    expected, expected_lse = kernel(q, x["k"], x["v"], cache=cache)
    page, place = divmod(call.seqlens[2] - 1, call.page_size)
    x[name].view(np.uint8)[cache.block_table[2, page], place] = NAN
    o, lse = kernel(q, x["k"], x["v"], cache=cache)
    reached = np.zeros(o.shape[:2], bool)
    reached[2, 2] = True
    assert np.array_equal(o[~reached], expected[~reached])
    assert np.isnan(o[reached].astype(np.float32)).all()
    assert np.array_equal(lse[:, :, :2], expected_lse[:, :, :2])


@pytest.mark.parametrize("mode", [Mode(), Mode(race=True)], ids=str)
@pytest.mark.parametrize("page_scales", [False, True])
@pytest.mark.parametrize("reach", [3, 16, 21, 32, 45])
def test_a_mask_may_begin_and_end_anywhere_in_a_slice(reach: int, page_scales: bool, mode: Mode) -> None:
    """Slices have 32 keys here. Rows attend to the last ``reach`` keys, and every seventh of these is hidden."""
    near = fg.Mask.of(lambda b, h, q, k: (k >= fg.k_len - reach) & (k % 7 != 3))
    spec = spec_of(64, mask=fg.causal() & near, page_scales=page_scales)
    kernel, lengths = kernel_of(spec, "sm_90a"), (1, 15, 17, 31, 32, 33, 47, 63, 129, 150)
    assert int(kernel.plan.kernel("decode").constant("tile_kv")) == 32 * 4
    call = a_call(seqlens=lengths, queries=(2,) * len(lengths), mode=mode)
    check(kernel, spec, Scaled(call, "page" if page_scales else "head"))
    # Hidden values are not finite.
    q, cache, x = arrays_of(spec, call, "page" if page_scales else "head")
    expected = kernel(q, x["k"], x["v"], cache=cache)
    for b, length in enumerate(lengths):
        for hidden in range(3, length, 7):
            page, place = divmod(hidden, call.page_size)
            x["v"].view(np.uint8)[cache.block_table[b, page], place] = NAN
    again = kernel(q, x["k"], x["v"], cache=cache)
    assert all(np.array_equal(a, b) for a, b in zip(again, expected, strict=True))


@pytest.mark.parametrize("per", ["sequence", "page and head"])
@pytest.mark.parametrize("queries", [1, 100])
def test_a_batch_invariant_result_has_the_same_bits_in_any_batch(queries: int, per: str) -> None:
    spec = spec_of(dtype="bf16", page_scales=per.startswith("page"))
    kernel = kernel_of(spec)
    lengths = (9000, 60, 0, 4100) if queries == 1 else (700, 60, 0)
    call = a_call(seqlens=lengths, queries=(queries,) * len(lengths), heads_kv=16, batch_invariant=True)
    q, cache, x = arrays_of(spec, call, per)
    together = kernel(q, x["k"], x["v"], cache=cache)
    for b in (0, len(lengths) - 1):
        alone = kernel(q[b : b + 1], x["k"], x["v"], cache=of_sequence(cache, b, per))
        assert all(np.array_equal(both[b], own[0]) for both, own in zip(together, alone, strict=True))


@pytest.mark.parametrize("queries", [64, 130])
def test_many_queries_run_by_the_same_kernel(queries: int) -> None:
    spec = spec_of(64)
    check(kernel_of(spec, "sm_90a"), spec, Scaled(a_call(seqlens=(200, 150, 9), queries=(queries,) * 3), "head"))


def test_a_cache_without_room_gives_zeros() -> None:
    spec = spec_of(cache="contiguous", mask=fg.full())
    none = as_codes("e4m3", np.zeros((2, 0, 1, 32)))
    o, lse = kernel_of(spec)(np.ones((2, 3, 4, 32), np.float16), none, none, cache=fg.KVCache())
    assert not o.any()
    assert (lse == -np.inf).all()


def test_elements_between_aligned_ones_are_read() -> None:
    spec = spec_of(cache="contiguous", mask=fg.full())
    kernel, random = kernel_of(spec), np.random.default_rng(5)
    # Rows are 36 bytes apart, and begin 4 bytes behind a multiple of 16.
    wide = as_codes("e4m3", oracle.quantized("e4m3", random.standard_normal((2, 50, 1, 36))))
    k, q = wide[..., 4:], random.standard_normal((2, 1, 4, 32)).astype(np.float16)
    o, _ = kernel(q, k, k, cache=fg.KVCache())
    exact, _ = oracle.forward_cached(spec, q, k, k, fg.KVCache())
    np.testing.assert_allclose(o.astype(np.float64), exact, atol=3e-3)


def complaint(name: str) -> tuple[Any, str]:
    """A call with one thing wrong, and what is said of it."""
    rows, pages = spec_of(cache="contiguous", mask=fg.full()), spec_of(page_scales=True)
    q, ints, table = np.zeros((2, 1, 4, 32), np.float16), np.zeros(2, np.int32), np.zeros((2, 3), np.int32)
    k = as_codes("e4m3", np.zeros((2, 8, 2, 32)))
    wide = fg.AttentionSpec(32, dtype="fp16", direction="forward", cache="contiguous")

    def attend(spec: fg.AttentionSpec, k: Any = k, **fields: Any) -> Any:
        return lambda: kernel_of(spec)(q, k, k, cache=fg.KVCache(ints, **fields))

    def floats(*shape: int) -> Any:
        return np.ones(shape, np.float32)

    return {
        "16-bit keys": (attend(rows, np.zeros(k.shape, np.float16)), r"k is fp16, but .* 8-bit cache of e4m3 \(float8"),
        "e5m2 keys": (attend(rows, as_codes("e5m2", np.zeros(k.shape))), "k is e5m2, but .* 8-bit cache of e4m3"),
        "three scales": (
            attend(rows, k_scale=floats(3)),
            r"cache.k_scale is fp32 of shape \(3,\); pass float32 of one",
        ),
        "16-bit scales": (attend(rows, v_scale=np.ones(2, np.float16)), r"cache.v_scale is fp16 of shape \(2,\)"),
        "a number": (attend(rows, v_scale=0.5), "v_scale: .*float is not an array"),
        "no scales of pages": (attend(pages, block_table=table), "cache.k_scale=None, but .* page_scales=True"),
        "scales of heads": (
            attend(pages, block_table=table, k_scale=floats(2), v_scale=floats(5)),
            r"cache.v_scale .* shapes \(2,\), \(2, 2\)",
        ),
        "scales of a 16-bit cache": (
            attend(wide, np.zeros(k.shape, np.float16), k_scale=floats(1)),
            "cache.k_scale is for kernels built with cache_dtype",
        ),
        "misaligned": (
            attend(rows, as_codes("e4m3", np.zeros((2, 8, 2, 34)))[..., :32]),
            "needs rows aligned to 4 bytes, and access_bytes=2",
        ),
        "scales of keys in the call": (
            lambda: kernel_of(spec_of(dtype="e4m3", cache="contiguous"))(
                k[:, :1], k, k, cache=fg.KVCache(ints), k_scale=floats(2)
            ),
            r"k_scale is a scale of the cache; pass cache=flashgen.KVCache\(k_scale=...\)",
        ),
        "three scales of queries": (
            lambda: kernel_of(spec_of(dtype="e4m3", cache="contiguous"))(
                k[:, :1], k, k, cache=fg.KVCache(ints), q_scale=floats(3)
            ),
            r"q_scale is fp32 of shape \(3,\); pass float32 of one of the shapes \(\), \(1,\), \(2,\), \(2, 2\)",
        ),
        "scales of 16-bit queries": (
            lambda: kernel_of(rows)(q, k, k, cache=fg.KVCache(ints), q_scale=floats(1)),
            "q_scale, k_scale and v_scale are for kernels built with dtype='e4m3'",
        ),
        "16-bit new keys beside 8-bit queries": (
            lambda: kernel_of(spec_of(dtype="e4m3", cache="contiguous")).append(k, k, q, q, cache=fg.KVCache(ints)),
            "k is fp16, but this kernel was built for e4m3; convert it",
        ),
        "new keys of 8 bits": (
            lambda: kernel_of(rows).append(k, k, k, k, cache=fg.KVCache(ints)),
            "k is e4m3, but this kernel was built for fp16",
        ),
        "new scales": (
            lambda: kernel_of(rows).append(
                *(k, k, np.zeros(k.shape, np.float16), np.zeros(k.shape, np.float16)),
                cache=fg.KVCache(ints, k_scale=floats(7)),
            ),
            r"cache.k_scale is fp32 of shape \(7,\)",
        ),
    }[name]


@pytest.mark.parametrize(
    "name",
    [
        *("16-bit keys", "e5m2 keys", "three scales", "16-bit scales", "a number", "no scales of pages"),
        *("scales of heads", "scales of a 16-bit cache", "misaligned", "new keys of 8 bits", "new scales"),
        *("scales of keys in the call", "three scales of queries", "scales of 16-bit queries"),
        "16-bit new keys beside 8-bit queries",
    ],
)
def test_what_does_not_fit_is_refused_in_a_sentence(name: str) -> None:
    call, words = complaint(name)
    with pytest.raises(fg.FlashgenError, match=words):
        call()
