"""FlashAttention-3's functions, where they differ from flash-attn 2.8's."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

import flashgen as fg

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch
fa3 = pytest.importorskip("flashgen.compat.flash_attn_interface")


def test_the_signatures_are_flash_attention_3s() -> None:
    names = list(inspect.signature(fa3.flash_attn_func).parameters)
    assert names[:9] == ["q", "k", "v", "softmax_scale", "causal", "qv", "q_descale", "k_descale", "v_descale"]
    assert names[9:] == [
        *("window_size", "attention_chunk", "softcap", "num_splits", "pack_gqa", "deterministic", "sm_margin"),
        "return_attn_probs",
    ]
    packed = list(inspect.signature(fa3.flash_attn_qkvpacked_func).parameters)
    assert packed[-4:] == ["deterministic", "num_heads_q", "sm_margin", "return_attn_probs"]


def test_the_fourth_argument_is_the_scale(emulated: Any, inputs: Any, reference: Any) -> None:
    q, k, v = (x.detach() for x in inputs())
    out, lse = fa3.flash_attn_func(q, k, v, 0.4, True, num_splits=3, pack_gqa=True, return_attn_probs=True)
    mask = torch.ones(9, 12, dtype=torch.bool).tril(3)
    exact, exact_lse = reference(q, k, v, mask, 0.4)
    assert torch.allclose(out.double(), exact, atol=4e-3)
    assert torch.allclose(lse.double(), exact_lse, atol=1e-4)


def test_queries_attend_to_their_own_chunk(emulated: Any, inputs: Any, reference: Any) -> None:
    q, k, v = (x.detach() for x in inputs())
    chunks = torch.arange(12) // 4
    exact, _ = reference(q, k, v, chunks[3:, None] == chunks)
    assert torch.allclose(fa3.flash_attn_func(q, k, v, attention_chunk=4).double(), exact, atol=4e-3)


def test_heads_packed_side_by_side(emulated: Any, inputs: Any) -> None:
    q, k, v = (x.detach() for x in inputs(len_kv=9))
    expected = fa3.flash_attn_func(q, k, v, causal=True)
    packed = torch.cat([q, k, v], 2)
    assert torch.equal(fa3.flash_attn_qkvpacked_func(packed, causal=True, num_heads_q=4), expected)
    q = inputs(len_kv=9, heads_kv=4)[0].detach()
    even = torch.stack([q, q, q], 2)
    assert torch.equal(fa3.flash_attn_qkvpacked_func(even), fa3.flash_attn_func(q, q, q))


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"qv": torch.ones(1).half()}, r"qv has shape \(1,\); it must have 4 dimensions"),
        ({"k_descale": torch.ones(1)}, r"k_descale is for q, k and v of torch\.float8_e4m3fn, and q is torch\.float16"),
        ({"attention_chunk": -1}, "attention_chunk=-1 is not a length"),
    ],
)
def test_what_is_not_done_is_refused_by_name(emulated: Any, inputs: Any, option: Any, words: str) -> None:
    with pytest.raises(fg.ArgumentError, match=words):
        fa3.flash_attn_func(*inputs(), **option)
    assert emulated == []
