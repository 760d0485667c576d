"""Queries and keys of caches in the forms that flash-attn's other functions have: packed, in chunks, in pages."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import flashgen as fg

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch
fa3 = pytest.importorskip("flashgen.compat.flash_attn_interface").flash_attn_with_kvcache

from tests.torch.caches import Caches, ints  # noqa: E402


def test_the_third_generation_has_chunks_positions_and_values_of_their_own_width(emulated: Any, reference: Any) -> None:
    at = Caches(5)
    wide = torch.cat([at.v_cache, at.v_cache], -1)
    out, lse = fa3(
        *(at.q, at.k_cache, wide),
        cache_seqlens=at.seqlens,
        page_table=at.table,
        attention_chunk=4,
        pack_gqa=True,
        return_softmax_lse=True,
    )
    exact, exact_lse = at.expected(
        at.k[:, :0], reference, at.q, lambda n, m: (torch.arange(m - n, m) // 4)[:, None] == torch.arange(m) // 4
    )
    assert torch.allclose(out.double(), torch.cat([exact, exact], -1), atol=5e-3)
    assert torch.allclose(lse.double(), exact_lse, atol=5e-3)
    # New keys at the positions of seqlens, said twice.
    angles = {"rotary_cos": at.cos, "rotary_sin": at.sin, "cache_seqlens": at.seqlens, "causal": True}
    again = Caches(5)
    first = fa3(at.q, at.k_cache, at.v_cache, at.k, at.v, page_table=at.table, **angles)
    second = fa3(
        *(again.q, again.k_cache, again.v_cache, again.k, again.v),
        rotary_seqlens=at.seqlens,
        page_table=at.table,
        **angles,
    )
    assert torch.equal(first, second)


@pytest.mark.parametrize("page_size", [None, 5])
def test_packed_queries_are_those_of_each_sequence(emulated: Any, page_size: int | None) -> None:
    at = Caches(page_size)
    places = at.places if page_size is None else {"page_table": at.table}
    options = {"cache_seqlens": at.seqlens, "causal": True, "return_softmax_lse": True, **places}
    alone, alone_lse = fa3(at.q, at.k_cache, at.v_cache, **options)
    packed = torch.cat([at.q[0], at.q[1, 1:]])
    starts = {"cu_seqlens_q": ints(0, 3, 5), "max_seqlen_q": 3}
    out, lse = fa3(packed, at.k_cache, at.v_cache, **options, **starts, num_splits=2)
    assert torch.allclose(out.float(), torch.cat([alone[0], alone[1, 1:]]).float(), atol=2e-3)
    assert torch.allclose(lse, torch.cat([alone_lse[0], alone_lse[1, :, 1:]], -1), atol=1e-4)
    at.seqlens = ints(9, 9)
    one_length, _ = fa3(packed, at.k_cache, at.v_cache, **{**options, "cache_seqlens": at.seqlens}, **starts)
    as_number, _ = fa3(packed, at.k_cache, at.v_cache, **{**options, "cache_seqlens": 9}, **starts)
    assert torch.equal(one_length, as_number)


def test_the_varlen_function_finds_keys_in_pages(emulated: Any) -> None:
    at = Caches(5)
    options = {"causal": True, "softmax_scale": 0.3}
    expected, expected_lse = fa3(
        *(at.q, at.k_cache, at.v_cache),
        cache_seqlens=at.seqlens,
        page_table=at.table,
        return_softmax_lse=True,
        **options,
    )
    starts = ints(0, 3, 6), ints(0, 10, 35)
    out, lse, _ = fg.flash_attn_varlen_func(
        *(at.q.flatten(0, 1), at.k_cache, at.v_cache, *starts, 3, 25),
        block_table=at.table,
        return_attn_probs=True,
        **options,
    )
    again = fg.flash_attn_varlen_func(
        *(at.q.flatten(0, 1), at.k_cache, at.v_cache, *starts, np.int64(3), 25), block_table=at.table, **options
    )
    assert torch.equal(again, out)
    with pytest.raises(fg.ArgumentError, match=r"cu_seqlens_k is a list; pass a torch\.Tensor"):
        fg.flash_attn_varlen_func(at.q[0], at.k_cache, at.v_cache, starts[0], [0, 3], 3, 3, block_table=at.table)
    assert torch.allclose(out.float(), expected.flatten(0, 1).float(), atol=2e-3)
    assert torch.allclose(lse, torch.cat([*expected_lse], -1), atol=1e-4)
