"""Rows of packed tensors that belong to no sequence have zeros for results, through torch's functions as well."""

from __future__ import annotations

from typing import Any

import pytest

import flashgen as fg

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from tests.torch.packed import forward_and_backward  # noqa: E402

INSIDE_Q, INSIDE_K = slice(2, 11), slice(1, 14)


def offsets() -> list[Any]:
    return [torch.tensor(x, dtype=torch.int32) for x in ((2, 6, 11), (1, 9, 14))]


def through_attention(q: Any, k: Any, v: Any) -> Any:
    starts_q, starts_k = offsets()
    of = fg.Sequences(starts_q, starts_k, 5, 8)
    return fg.attention(q, k, v, mask=fg.causal(), sequences=of, return_lse=True)


def through_flash_attn(q: Any, k: Any, v: Any) -> Any:
    return fg.flash_attn_varlen_func(q, k, v, *offsets(), 5, 8, causal=True, return_attn_probs=True)[:2]


@pytest.mark.parametrize("call", [through_attention, through_flash_attn])
def test_rows_of_no_sequence_are_zeros(emulated: Any, rows: Any, call: Any) -> None:
    out, lse, dq, dk, dv = forward_and_backward(call, *rows(14, 18))
    for found, inside in ((out, INSIDE_Q), (dq, INSIDE_Q), (dk, INSIDE_K), (dv, INSIDE_K)):
        outside = torch.ones(found.shape[0], dtype=torch.bool)
        outside[inside] = False
        assert not found[outside].any()
        assert found.isfinite().all()
    assert (lse[:, :2] == -torch.inf).all()
    assert (lse[:, 11:] == -torch.inf).all()
    assert lse[:, INSIDE_Q].isfinite().all()


@pytest.mark.parametrize("record", [False, True])
def test_offsets_that_change_in_place_are_checked_again(emulated: Any, rows: Any, record: bool) -> None:
    """A call that is like one before, whose comparison takes no look at values."""
    tensors, (starts_q, starts_k) = rows(14, 18), offsets()
    tensors = tensors if record else tuple(x.detach() for x in tensors)

    def call() -> Any:
        return fg.flash_attn_varlen_func(*tensors, starts_q, starts_k, 5, 8, causal=True)

    first = call()
    assert torch.equal(call(), first)
    starts_k[1] = 0
    with pytest.raises(fg.ArgumentError, match=r"cu_seqlens_k\[1\]=0 is below .*cu_seqlens_k\[0\]=1"):
        call()
    starts_k[1], starts_q[2] = 9, 15
    with pytest.raises(fg.ArgumentError, match=r"sequence 1 of .*cu_seqlens_q has 9 rows, more than max_seqlen_q=5"):
        call()
    starts_q[1:] = torch.tensor([10, 15])
    with pytest.raises(fg.ArgumentError, match="max_seqlen_q=5"):
        call()
