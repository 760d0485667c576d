"""``flash_attn_with_kvcache`` of both generations, with the emulator in the GPU's place."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest

import flashgen as fg

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch
fa2 = pytest.importorskip("flashgen.compat.flash_attn").flash_attn_with_kvcache
fa3 = pytest.importorskip("flashgen.compat.flash_attn_interface").flash_attn_with_kvcache

from tests.torch.caches import Caches, causal, ints, turned  # noqa: E402


def test_the_signatures_are_flash_attns() -> None:
    names = list(inspect.signature(fa2).parameters)
    assert names[:9] == [
        "q",
        "k_cache",
        "v_cache",
        "k",
        "v",
        "rotary_cos",
        "rotary_sin",
        "cache_seqlens",
        "cache_batch_idx",
    ]
    assert names[9:] == [
        *("cache_leftpad", "block_table", "softmax_scale", "causal", "window_size", "softcap", "rotary_interleaved"),
        *("alibi_slopes", "num_splits", "return_softmax_lse"),
        # flashgen's own.
        *("batch_invariant", "q_descale", "k_descale", "v_descale", "page_scales"),
    ]
    defaults = {n: p.default for n, p in inspect.signature(fa2).parameters.items()}
    assert (defaults["window_size"], defaults["rotary_interleaved"], defaults["num_splits"]) == ((-1, -1), True, 0)
    assert fg.flash_attn_with_kvcache is fa2
    names = list(inspect.signature(fa3).parameters)
    assert names[5:13] == [
        *("qv", "rotary_cos", "rotary_sin", "cache_seqlens", "cache_batch_idx", "cache_leftpad", "page_table"),
        "cu_seqlens_q",
    ]
    assert names[13:] == [
        *("cu_seqlens_k_new", "max_seqlen_q", "rotary_seqlens", "q_descale", "k_descale", "v_descale"),
        *("softmax_scale", "causal", "window_size", "attention_chunk", "softcap", "rotary_interleaved"),
        *("scheduler_metadata", "num_splits", "pack_gqa", "sm_margin", "return_softmax_lse"),
        # flashgen's own.
        *("batch_invariant", "page_scales"),
    ]


@pytest.mark.parametrize(
    ("page_size", "interleaved", "is_causal"),
    [(None, True, True), (None, False, False), (5, True, True), (5, False, True)],
)
def test_new_keys_are_turned_put_into_the_cache_and_attended_to(
    emulated: Any, reference: Any, page_size: int | None, interleaved: bool, is_causal: bool
) -> None:
    at = Caches(page_size)
    q = turned(at.q, at, torch.arange(3) if is_causal else torch.zeros(3).long(), interleaved)
    k = turned(at.k, at, torch.arange(3), interleaved)
    exact, exact_lse = at.expected(k, reference, q, causal if is_causal else None)
    before = at.keys(at.k_cache).clone(), at.keys(at.v_cache).clone()
    out, lse = fa2(
        *(at.q, at.k_cache, at.v_cache, at.k, at.v, at.cos, at.sin, at.seqlens),
        causal=is_causal,
        rotary_interleaved=interleaved,
        num_splits=2,
        return_softmax_lse=True,
        **at.places,
    )
    assert torch.allclose(out.double(), exact, atol=5e-3)
    assert torch.allclose(lse.double(), exact_lse, atol=5e-3)
    for b, length in enumerate(at.seqlens.tolist()):
        before[0][b, length : length + 3], before[1][b, length : length + 3] = k[b].half(), at.v[b]
    assert torch.allclose(at.keys(at.k_cache).double(), before[0].double(), atol=1e-3, rtol=1e-3)
    assert torch.equal(at.keys(at.v_cache), before[1])


def test_one_length_may_be_a_number_and_no_length_is_all_there_is_room_for(emulated: Any, reference: Any) -> None:
    at = Caches()
    nothing = at.k[:, :0]
    for given, lengths in ((7, [7, 7]), (np.int64(8), [8, 8]), (None, [40, 40])):
        exact, _ = at.expected(nothing, reference, at.q, lengths=lengths)
        out = fa2(at.q, at.k_cache, at.v_cache, cache_seqlens=given, **at.places)
        assert torch.allclose(out.double(), exact, atol=5e-3)


def test_leftpad_window_softcap_and_alibi_count_from_the_first_key(emulated: Any) -> None:
    at, left = Caches(), ints(4, 0)
    options = {"causal": True, "window_size": (6, 0), "softcap": 3.0, "alibi_slopes": torch.rand(2, 4)}
    out = fa2(at.q, at.k_cache, at.v_cache, cache_seqlens=at.seqlens, cache_leftpad=left, **at.places, **options)
    for b, (first, length) in enumerate(zip(left.tolist(), at.seqlens.tolist(), strict=True)):
        own = {**options, "alibi_slopes": options["alibi_slopes"][b : b + 1]}
        k, v = (at.keys(cache)[b : b + 1, first:length] for cache in (at.k_cache, at.v_cache))
        alone = fg.flash_attn_func(at.q[b : b + 1], k, v, **own)
        assert torch.allclose(out[b : b + 1].float(), alone.float(), atol=2e-3)


def test_one_length_in_a_tensor_without_dimensions_is_refused(emulated: Any) -> None:
    at = Caches()
    with pytest.raises(fg.ArgumentError, match=r"cache\.seqlens is torch.int32 of shape \(\); pass 2 contiguous int32"):
        fa2(at.q, at.k_cache, at.v_cache, cache_seqlens=torch.tensor(9, dtype=torch.int32), **at.places)


@pytest.mark.parametrize(
    ("function", "options", "words"),
    [
        (fa2, {"v": None}, "k and v go together"),
        (fa2, {"cache_seqlens": None}, "cache_seqlens=None"),
        (fa2, {"k": None, "v": None, "rotary_cos": torch.ones(1), "rotary_sin": torch.ones(1)}, "pass k and v too"),
        (fa2, {"rotary_cos": 1}, "rotary_cos and rotary_sin go together"),
        (fa2, {"rotary_cos": 1, "rotary_sin": 1}, "rotary_cos is a int; pass a torch.Tensor"),
        (fa2, {"cache_seqlens": [10, 25]}, r"cache_seqlens=\[10, 25\] says not how many keys there are"),
        (fa2, {"cache_batch_idx": [1, 0]}, "cache_batch_idx is a list; pass a torch.Tensor"),
        (fa2, {"k_cache": [1]}, "k_cache is a list; pass a torch.Tensor"),
        (fa2, {"softcap": None}, "softcap=None is not a number"),
        (fa2, {"softcap": -1.0}, "softcap=-1.0"),
        (fa2, {"alibi_slopes": torch.ones(3)}, r"alibi_slopes has shape \(3,\)"),
        (fa2, {"num_splits": 1000}, "num_splits=1000 is out of range"),
        (fa2, {"k": torch.ones(2, 3, 16)}, "k has shape .* must have 4 dimensions"),
        (fa3, {"qv": 1}, "qv is a int; pass a torch.Tensor"),
        (fa3, {"cu_seqlens_q": torch.ones(3)}, "q has shape .* must have 3 dimensions"),
        (fa3, {"q_descale": 1}, "q_descale is a int; pass a torch.Tensor"),
        (fa3, {"q_descale": torch.ones(1)}, r"q_descale is for q of torch\.float8_e4m3fn, and q is torch\.float16"),
        (fa3, {"v_descale": 1}, "v_descale is a int; pass a torch.Tensor"),
        (fa2, {"k_descale": torch.ones(1)}, "k_descale is for caches in float8, and k_cache is torch.float16"),
        (fa2, {"page_scales": 1}, "page_scales=1 is not a bool"),
        (fa2, {"v_cache": torch.zeros(3, 40, 2, 16)}, "k_cache is torch.float16 and v_cache is torch.float32"),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(emulated: Any, function: Any, options: Any, words: str) -> None:
    at = Caches()
    caches = {"k_cache": at.k_cache, "v_cache": at.v_cache}
    given = {**caches, "k": at.k, "v": at.v, "cache_seqlens": at.seqlens, **options}
    with pytest.raises(fg.ArgumentError, match=words):
        function(at.q, **given)
    assert emulated == []
