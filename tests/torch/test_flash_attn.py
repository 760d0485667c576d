"""flash-attn's function names."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest

import flashgen as fg

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


def test_the_signature_is_flash_attns() -> None:
    parameters = inspect.signature(fg.flash_attn_func).parameters
    assert [(p.name, p.default) for p in parameters.values() if p.default is not p.empty] == [
        ("dropout_p", 0.0),
        ("softmax_scale", None),
        ("causal", False),
        ("window_size", (-1, -1)),
        ("softcap", 0.0),
        ("alibi_slopes", None),
        ("deterministic", False),
        ("return_attn_probs", False),
    ]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [(-1, -1), (3, 1), (2, -1), (-1, 2), (0, 0)])
def test_masks_are_aligned_bottom_right(emulated: Any, inputs: Any, reference: Any, causal: bool, window: Any) -> None:
    q, k, v = (x.detach() for x in inputs())
    distance = torch.arange(12)[None] - torch.arange(9)[:, None] - 3
    left, right = window
    mask = torch.ones(9, 12, dtype=torch.bool)
    mask &= (distance >= -left) | (left < 0)
    mask &= (distance <= right) | (right < 0)
    mask &= (distance <= 0) | (not causal)
    out = fg.flash_attn_func(q, k, v, causal=causal, window_size=window)
    assert torch.allclose(out.double(), reference(q, k, v, mask)[0], atol=4e-3)


def test_probabilities_are_asked_for_to_get_the_lse(emulated: Any, inputs: Any, reference: Any) -> None:
    q, k, v = (x.detach() for x in inputs())
    out, lse, probabilities = fg.flash_attn_func(q, k, v, 0.0, 0.5, return_attn_probs=True)
    exact, exact_lse = reference(q, k, v, None, 0.5)
    assert torch.allclose(out.double(), exact, atol=4e-3)
    assert torch.allclose(lse.double(), exact_lse, atol=1e-4)
    assert probabilities.shape == (0,)


def biased(q: Any, k: Any, v: Any, mask: Any, cap: float, slopes: Any) -> Any:
    """flash-attn's formula in float64: the cap first, then ALiBi."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if cap:
        scores = cap * (scores / cap).tanh()
    if slopes is not None:
        places = torch.arange(q.shape[2])[:, None] + k.shape[2] - q.shape[2]
        scores = scores - slopes.double()[..., None, None] * (places - torch.arange(k.shape[2])).abs()
    return (scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v).transpose(1, 2)


@pytest.mark.parametrize("cap", [0.0, 2.0])
@pytest.mark.parametrize("slopes", [None, (4,), (2, 4)])
@pytest.mark.parametrize("compiled", [False, True])
def test_caps_and_slopes_are_flash_attns(emulated: Any, inputs: Any, cap: float, slopes: Any, compiled: bool) -> None:
    q, k, v = inputs()
    alibi = None if slopes is None else torch.rand(slopes)
    mask = torch.ones(9, 12, dtype=torch.bool).tril(3)

    def attend(q: Any, k: Any, v: Any) -> Any:
        return fg.flash_attn_func(q, k, v, 0.0, None, True, softcap=cap, alibi_slopes=alibi)

    call = torch.compile(attend, fullgraph=True, backend="aot_eager") if compiled else attend
    out, exact = call(q, k, v), biased(q, k, v, mask, cap, alibi)
    assert torch.allclose(out.double(), exact, atol=4e-3)
    do = torch.randn_like(out)
    for a, b in zip(
        torch.autograd.grad(out, (q, k, v), do), torch.autograd.grad(exact, (q, k, v), do.double()), strict=True
    ):
        assert torch.allclose(a.double(), b.double(), atol=1e-2)


@pytest.mark.parametrize("packed", ["qkv", "kv"])
def test_packed_inputs_have_packed_gradients(emulated: Any, inputs: Any, packed: str) -> None:
    q, k, v = inputs(len_kv=9, heads_kv=4)
    do = torch.randn(q.shape).half()
    expected = torch.autograd.grad(fg.flash_attn_func(q, k, v, causal=True), (q, k, v), do)
    if packed == "qkv":
        qkv = torch.stack([q, k, v], 2).detach().requires_grad_()
        out = fg.flash_attn_qkvpacked_func(qkv, causal=True)
        actual = torch.autograd.grad(out, qkv, do)[0].unbind(2)
    else:
        kv = torch.stack([k, v], 2).detach().requires_grad_()
        out = fg.flash_attn_kvpacked_func(q, kv, causal=True)
        dq, dkv = torch.autograd.grad(out, (q, kv), do)
        actual = (dq, *dkv.unbind(2))
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"dropout_p": 1.0}, "dropout_p=1.0 is no probability to drop a pair with"),
        ({"softcap": -1.0}, "softcap=-1.0 is not a limit for logits"),
        ({"alibi_slopes": [1.0]}, r"alibi_slopes is a list; pass a torch\.Tensor"),
        ({"alibi_slopes": torch.ones(3)}, r"alibi_slopes has shape \(3,\); it must be \(4,\) or \(2, 4\)"),
        ({"window_size": (-2, 0)}, r"window_size=\(-2, 0\)"),
        ({"window_size": 4}, "window_size=4 must be two whole numbers"),
        ({"window_size": (None, None)}, r"window_size=\(None, None\) must be"),
        ({"softcap": None}, "softcap=None is not a number"),
    ],
)
def test_what_is_not_done_is_refused_by_name(emulated: Any, inputs: Any, option: Any, words: str) -> None:
    with pytest.raises(fg.ArgumentError, match=words):
        fg.flash_attn_func(*inputs(), **option)
    assert emulated == []


def test_numbers_may_be_other_libraries(emulated: Any, inputs: Any) -> None:
    inputs = [x.detach() for x in inputs()]
    expected = fg.flash_attn_func(*inputs, window_size=(4, 0), softmax_scale=0.5)
    found = fg.flash_attn_func(*inputs, window_size=(np.int64(4), torch.tensor(0)), softmax_scale=np.float32(0.5))
    assert torch.equal(found, expected)


def test_a_wrongly_packed_tensor_is_described() -> None:
    with pytest.raises(fg.ArgumentError, match=r"qkv has shape \(2, 9, 2, 4, 16\); it must be"):
        fg.flash_attn_qkvpacked_func(torch.zeros(2, 9, 2, 4, 16))
    with pytest.raises(fg.ArgumentError, match=r"qkv is a list; pass a torch\.Tensor"):
        fg.flash_attn_qkvpacked_func([1])


@pytest.mark.parametrize(("asked", "torch_wants"), [(True, False), (False, True)])
def test_determinism_is_asked_for_here_or_in_torch(emulated: Any, inputs: Any, asked: bool, torch_wants: bool) -> None:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(torch_wants)
    try:
        fg.flash_attn_func(*inputs(), deterministic=asked)
    finally:
        torch.use_deterministic_algorithms(before)
    assert [spec.deterministic for spec in emulated] == [True]
