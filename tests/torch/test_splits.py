"""Attention to parts of the keys, combined to attention to all of them."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

import flashgen as fg

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch
fa3 = pytest.importorskip("flashgen.compat.flash_attn_interface")


@pytest.mark.parametrize("packed", [False, True])
def test_parts_are_combined_to_the_whole(emulated: Any, inputs: Any, packed: bool) -> None:
    tensors = inputs()
    q, k, v = tensors
    whole, lse = fa3.flash_attn_func(q, k, v, return_attn_probs=True)
    parts = [fa3.flash_attn_func(q, k[:, a:b], v[:, a:b], return_attn_probs=True) for a, b in ((0, 5), (5, 5), (5, 12))]
    outs, lses = (torch.stack(x) for x in zip(*parts, strict=True))
    # What stands in a part without keys is of no account.
    outs = torch.where(lses.mT[..., None] == -torch.inf, torch.nan, outs)
    given = [outs, lses.mT]
    if packed:
        given = [x.flatten(1, 2) for x in given]
    found, found_lse = fa3.flash_attn_combine(*given, out_dtype=torch.float32)
    assert found.dtype is torch.float32
    expected = [whole, lse.mT]
    if packed:
        expected = [x.flatten(0, 1) for x in expected]
    assert torch.allclose(found, expected[0].float(), atol=2e-3)
    assert torch.allclose(found_lse, expected[1], atol=1e-4)
    gradients = torch.autograd.grad(found.square().sum() + found_lse.sum(), tensors)
    exact = torch.autograd.grad(whole.float().square().sum() + lse.sum(), tensors)
    assert all(torch.allclose(a, b, atol=1e-2) for a, b in zip(gradients, exact, strict=True))


def test_rows_without_any_key_stay_empty_and_results_go_where_they_are_asked_to() -> None:
    outs, lses = torch.full((2, 1, 3, 2, 8), torch.nan).half(), torch.full((2, 1, 3, 2), -torch.inf)
    out = torch.ones(1, 3, 2, 8).half()
    found, lse = fa3.flash_attn_combine(outs, lses, out)
    assert found is out
    assert found.eq(0).all()
    assert lse.eq(-torch.inf).all()
    assert fa3.flash_attn_combine(outs, lses)[0].dtype is torch.float16


def test_what_has_no_keys_has_no_gradients() -> None:
    outs, lses = torch.randn(2, 1, 3, 2, 8), torch.randn(2, 1, 3, 2)
    # The first row has no keys at all, the second has none in one part.
    lses[:, :, 0], lses[0, :, 1] = -torch.inf, -torch.inf
    outs[lses == -torch.inf] = torch.nan
    tensors = outs.requires_grad_(), lses.requires_grad_()
    out, lse = fa3.flash_attn_combine(*tensors)
    gradients = torch.autograd.grad(out.square().sum() + lse.sum(), tensors)
    for gradient in gradients:
        assert gradient.isfinite().all()
        assert not gradient[lses == -torch.inf].any()
        assert gradient[:, :, 2].all()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"out_partial": [1]}, r"out_partial is a list; pass a torch\.Tensor"),
        ({"lse_partial": torch.zeros(2, 1, 2, 3)}, r"lse_partial \(2, 1, 2, 3\); they must be"),
        ({"out": torch.zeros(1, 2)}, r"out has shape \(1, 2\); it must be \(1, 3, 2, 8\)"),
    ],
)
def test_what_does_not_fit_is_described(change: Any, words: str) -> None:
    given = {"out_partial": torch.zeros(2, 1, 3, 2, 8), "lse_partial": torch.zeros(2, 1, 3, 2), **change}
    with pytest.raises(fg.ArgumentError, match=words):
        fa3.flash_attn_combine(**given)


def test_metadata_of_a_scheduler_is_an_empty_tensor() -> None:
    names = list(inspect.signature(fa3.get_scheduler_metadata).parameters)
    assert names[:9] == [
        *("batch_size", "max_seqlen_q", "max_seqlen_k", "num_heads_q", "num_heads_kv", "headdim", "cache_seqlens"),
        *("qkv_dtype", "headdim_v"),
    ]
    for options in ({"causal": True}, {"has_softcap": True}, {"has_softcap": True, "softcap": 15.0}, {"has_qv": True}):
        metadata = fa3.get_scheduler_metadata(2, 1, 64, 4, 2, 16, torch.tensor([3, 4]), **options)
        assert metadata.shape == (0,)
        assert metadata.dtype is torch.int32


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"softcap": -1.0}, r"softcap=-1\.0 is not a limit for logits"),
        ({"has_qv": 1}, "has_qv=1 is not a bool"),
        ({"has_softcap": None}, "has_softcap=None is not a bool"),
    ],
)
def test_metadata_of_a_wrong_call_is_refused_by_name(options: Any, words: str) -> None:
    with pytest.raises(fg.ArgumentError, match=words):
        fa3.get_scheduler_metadata(2, 1, 64, 4, 2, 16, torch.tensor([3, 4]), **options)
    assert list(inspect.signature(fa3.flash_attn_combine).parameters) == [
        *("out_partial", "lse_partial", "out", "out_dtype"),
    ]
