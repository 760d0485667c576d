"""``flash_attn_with_kvcache`` of both generations with caches in float8, with the emulator in the GPU's place."""

from __future__ import annotations

from typing import Any

import pytest

import flashgen as fg

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch
fa2 = pytest.importorskip("flashgen.compat.flash_attn").flash_attn_with_kvcache
fa3 = pytest.importorskip("flashgen.compat.flash_attn_interface").flash_attn_with_kvcache

from tests.torch.caches import Caches, causal, ints  # noqa: E402

FLOAT8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


class Float8Caches(Caches):
    """``Caches`` in float8, with a scale for each sequence and head as FlashAttention-3 takes them."""

    def __init__(self, page_size: int | None = None, dtype: str = "e4m3", new: int = 3) -> None:
        super().__init__(page_size, new)
        generator = torch.Generator().manual_seed(1)
        self.k_cache, self.v_cache = (x.to(FLOAT8[dtype]) for x in (self.k_cache, self.v_cache))
        self.k_descale, self.v_descale = (torch.rand(2, 2, generator=generator) * 2 + 0.1 for _ in "kv")

    @property
    def scales(self) -> dict[str, Any]:
        return {"k_descale": self.k_descale, "v_descale": self.v_descale}

    def values(self, cache: Any, scale: Any) -> Any:
        return self.keys(cache.float()).double() * scale[:, None, :, None].double()

    def attended(self, reference: Any, lengths: Any, mask: Any = None) -> Any:
        """Attention in float64 to what the caches hold now."""
        found = []
        for b, length in enumerate(lengths):
            k, v = (
                self.values(cache, scale)[b : b + 1, :length]
                for cache, scale in ((self.k_cache, self.k_descale), (self.v_cache, self.v_descale))
            )
            found.append(reference(self.q[b : b + 1].double(), k, v, None if mask is None else mask(3, length)))
        return [torch.cat(parts) for parts in zip(*found, strict=True)]


@pytest.mark.parametrize(
    ("page_size", "dtype", "is_causal"),
    [(None, "e4m3", True), (None, "e5m2", False), (5, "e4m3", True), (5, "e5m2", True)],
)
@pytest.mark.parametrize("function", [fa2, fa3])
def test_new_keys_are_rounded_put_into_the_cache_and_attended_to(
    emulated: Any, reference: Any, function: Any, page_size: int | None, dtype: str, is_causal: bool
) -> None:
    at = Float8Caches(page_size, dtype)
    before = at.keys(at.k_cache.float()).clone()
    where = {"page_table" if function is fa3 and name == "block_table" else name: x for name, x in at.places.items()}
    out, lse = function(
        *(at.q, at.k_cache, at.v_cache, at.k, at.v),
        cache_seqlens=at.seqlens,
        causal=is_causal,
        return_softmax_lse=True,
        **at.scales,
        **where,
    )
    lengths = [length + 3 for length in at.seqlens.tolist()]
    exact, exact_lse = at.attended(reference, lengths, causal if is_causal else None)
    assert torch.allclose(out.double(), exact, atol=5e-3)
    assert torch.allclose(lse.double(), exact_lse, atol=5e-3)
    held = at.keys(at.k_cache.float())
    for b, length in enumerate(at.seqlens.tolist()):
        # torch divides and rounds as the kernel does.
        new = (at.k[b].float() / at.k_descale[b, :, None]).to(FLOAT8[dtype]).float()
        assert torch.equal(held[b, length : length + 3], new)
        assert torch.equal(held[b, :length], before[b, :length])
    assert [spec.cache_dtype for spec in emulated] == [dtype]


@pytest.mark.parametrize(
    "options",
    [
        {"window_size": (6, 0)},
        {"causal": True, "softcap": 3.0},
        {"causal": True, "cache_leftpad": ints(4, 0)},
        {"causal": True, "num_splits": 2},
    ],
    ids=str,
)
def test_options_mean_what_they_mean_for_16_bit_caches(emulated: Any, options: dict[str, Any]) -> None:
    at = Float8Caches(5)
    out = fa2(at.q, at.k_cache, at.v_cache, cache_seqlens=at.seqlens, **at.scales, **at.places, **options)
    k, v = (torch.zeros(30, 5, 2, 16).half() for _ in "kv")
    for b in range(2):
        for cache, held, scale in ((k, at.k_cache, at.k_descale), (v, at.v_cache, at.v_descale)):
            pages = at.table[b].long()
            cache[pages] = (held.float()[pages] * scale[b, :, None]).half()
    wide = fa2(at.q, k, v, cache_seqlens=at.seqlens, **at.places, **options)
    assert torch.allclose(out.float(), wide.float(), atol=1e-2)


@pytest.mark.parametrize("shape", [None, (), (1,), (2,), "expanded"])
def test_scales_may_be_shared(emulated: Any, reference: Any, shape: Any) -> None:
    at = Float8Caches()
    if shape is None:
        scales = {}
        at.k_descale = at.v_descale = torch.ones(2, 2)
    else:
        of_one = torch.tensor([0.7, 0.3])[: 2 if shape == (2,) else 1]
        at.k_descale = at.v_descale = of_one.expand(2, 2).contiguous()
        given = of_one.expand(2, 2) if shape == "expanded" else of_one.view(shape)
        scales = {"k_descale": given, "v_descale": given}
    for _ in range(2):  # as a new call, and as one like before
        out = fa2(at.q, at.k_cache, at.v_cache, cache_seqlens=at.seqlens, **scales, **at.places)
        exact, _ = at.attended(reference, at.seqlens.tolist())
        assert torch.allclose(out.double(), exact, atol=5e-3)


def test_other_scales_of_a_call_like_before_count(emulated: Any, reference: Any) -> None:
    at = Float8Caches()
    for factor in (1.0, 3.0):
        at.k_descale, at.v_descale = at.k_descale * factor, at.v_descale * factor
        out = fa2(at.q, at.k_cache, at.v_cache, cache_seqlens=at.seqlens, **at.scales, **at.places)
        exact, _ = at.attended(reference, at.seqlens.tolist())
        assert torch.allclose(out.double(), exact, atol=2e-2)
    without = fa2(at.q, at.k_cache, at.v_cache, cache_seqlens=at.seqlens, **at.places)
    assert not torch.allclose(out.float(), without.float(), atol=2e-2)


def test_each_page_may_have_a_scale(emulated: Any) -> None:
    at, table = Float8Caches(5), torch.rand(30, 2) + 0.1
    scales = {"k_descale": table, "v_descale": table.flip(0), "page_scales": True}
    out = fa2(at.q, at.k_cache, at.v_cache, at.k, at.v, cache_seqlens=at.seqlens, causal=True, **scales, **at.places)
    k, v = (
        (cache.float() * scale[:, None, :, None]).half()
        for cache, scale in ((at.k_cache, table), (at.v_cache, table.flip(0)))
    )
    wide = fa2(at.q, k, v, cache_seqlens=at.seqlens + 3, causal=True, **at.places)
    assert torch.allclose(out.float(), wide.float(), atol=1e-2)


def check_packed(at: Any, other: Any, scales: dict[str, Any], rotary: dict[str, Any], atol: float) -> None:
    """Packed queries and keys of ``at`` give and append what those of its equal ``other`` do by sequence."""
    out = fa3(
        *(at.q.flatten(0, 1), at.k_cache, at.v_cache, at.k.flatten(0, 1), at.v.flatten(0, 1)),
        cache_seqlens=at.seqlens,
        page_table=at.table,
        cu_seqlens_q=ints(0, 3, 6),
        cu_seqlens_k_new=ints(0, 3, 6),
        max_seqlen_q=3,
        causal=True,
        **scales,
        **rotary,
    )
    whole = fa3(
        *(other.q, other.k_cache, other.v_cache, other.k, other.v),
        cache_seqlens=other.seqlens,
        page_table=other.table,
        causal=True,
        **scales,
        **rotary,
    )
    assert torch.equal(at.k_cache.view(torch.uint8), other.k_cache.view(torch.uint8))
    assert torch.equal(at.v_cache.view(torch.uint8), other.v_cache.view(torch.uint8))
    assert torch.allclose(out.float(), whole.flatten(0, 1).float(), atol=atol)


@pytest.mark.parametrize("page_scales", [False, True])
def test_packed_keys_have_the_scales_of_their_sequences(emulated: Any, page_scales: bool) -> None:
    at, other = Float8Caches(5), Float8Caches(5)
    scales = {**at.scales}
    if page_scales:
        table = torch.rand(30) + 0.1
        scales = {"k_descale": table, "v_descale": table, "page_scales": True}
    check_packed(at, other, scales, {"rotary_cos": at.cos, "rotary_sin": at.sin}, atol=2e-3)


def test_compiled_in_one_graph(emulated: Any) -> None:
    at, other = Float8Caches(5), Float8Caches(5)

    def step(q: Any, k_cache: Any, v_cache: Any, k: Any, v: Any, seqlens: Any, k_descale: Any, v_descale: Any) -> Any:
        places = {"cache_seqlens": seqlens, "block_table": at.table}
        return fa2(q, k_cache, v_cache, k, v, **places, causal=True, k_descale=k_descale, v_descale=v_descale)

    rest = at.k, at.v, at.seqlens, at.k_descale, at.v_descale
    eager = step(at.q, at.k_cache, at.v_cache, *rest)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(other.q, other.k_cache, other.v_cache, *rest), eager)
    assert torch.equal(other.k_cache.view(torch.uint8), at.k_cache.view(torch.uint8))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"k_descale": torch.ones(3)}, r"cache\.k_scale is fp32 of shape \(3,\); pass float32 of one of the shapes"),
        ({"v_descale": torch.ones(2).half()}, r"cache\.v_scale is fp16 of shape \(2,\)"),
        ({"page_scales": True}, r"page_scales=True"),
        ({"k": torch.zeros(2, 3, 2, 16).to(torch.float8_e4m3fn)}, "k is e4m3, but this kernel was built for fp16"),
        (
            {"q": torch.zeros(2, 3, 4, 16)},
            "cache_dtype='e4m3' needs queries of 16 or 8 bits; use dtype='bf16', 'fp16' or 'e4m3'",
        ),
        (
            {"v_cache": torch.zeros(3, 40, 2, 16).to(torch.float8_e5m2)},
            "v_cache is torch.float8_e5m2; they must be equal",
        ),
    ],
)
def test_what_does_not_go_with_a_float8_cache_is_refused_by_name(emulated: Any, options: Any, words: str) -> None:
    at = Float8Caches()
    given = {"q": at.q, "k_cache": at.k_cache, "v_cache": at.v_cache, "k": at.k, "v": at.v, "cache_seqlens": at.seqlens}
    with pytest.raises(fg.FlashgenError, match=words):
        fa2(**{**given, **options})
