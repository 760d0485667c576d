"""``dropout_p`` in torch: which pairs are dropped, that they are the same in both passes, and who decides."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

import flashgen as fg
from flashgen import oracle

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from tests.torch.results import same  # noqa: E402

P = 0.3
STATE = torch.tensor([2**61 + 7, 2**33 + 5]) if torch else None


def close(actual: Any, expected: Any) -> bool:
    return bool(torch.allclose(actual.double(), expected.double(), atol=8e-3, rtol=8e-3))


def with_dropped(q: Any, k: Any, v: Any, kept: Any) -> Any:
    """Causal attention in float64 with these pairs kept."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    causal = torch.ones(q.shape[2], k.shape[2]).tril(k.shape[2] - q.shape[2]).bool()
    weights = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~causal, float("-inf")).softmax(-1)
    return (weights * kept / (1 - P) @ v).transpose(1, 2)


def attend(q: Any, k: Any, v: Any, **options: Any) -> Any:
    return fg.attention(q, k, v, mask=fg.causal(), dropout_p=P, **options)


def forward_and_backward(call: Any, *inputs: Any) -> tuple[Any, ...]:
    torch.manual_seed(5)
    out = call(*inputs)
    return (out.detach(), *torch.autograd.grad(out.float().square().sum(), inputs))


def test_pairs_of_the_state_are_dropped_in_both_passes(emulated: Any, inputs: Any) -> None:
    q, k, v = inputs()
    out, _ = torch.ops.flashgen.forward(q, k, v, None, None, 0, dropout_p=P, rng_state=STATE)
    kept = torch.from_numpy(oracle.dropout_mask(fg.Dropout(P, state=STATE.numpy()), 2, 4, 9, 12))
    exact = with_dropped(q, k, v, kept)
    assert close(out, exact)
    do = torch.randn_like(out)
    found = torch.autograd.grad(out, (q, k, v), do)
    for actual, expected in zip(found, torch.autograd.grad(exact, (q, k, v), do.double()), strict=True):
        assert close(actual, expected)


@pytest.mark.parametrize("score", [None, fg.softcap(20.0)])
def test_torchs_generator_decides(emulated: Any, inputs: Any, score: Any) -> None:
    q, k, v = inputs()

    def call(q: Any, k: Any, v: Any) -> Any:
        return attend(q, k, v, score=score)

    first = forward_and_backward(call, q, k, v)
    assert not torch.equal(first[0], call(q, k, v))
    assert same(forward_and_backward(call, q, k, v), first)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert same(forward_and_backward(compiled, q, k, v), first)
    with torch.no_grad():
        torch.manual_seed(5)
        assert torch.equal(call(q, k, v), first[0])


def test_a_checkpoint_drops_the_same_pairs_again(emulated: Any, inputs: Any) -> None:
    from torch.utils.checkpoint import checkpoint

    q, k, v = inputs()
    saved = forward_and_backward(lambda *x: checkpoint(attend, *x, use_reentrant=False), q, k, v)
    assert same(saved, forward_and_backward(attend, q, k, v))


def test_flash_attns_function_drops(emulated: Any, inputs: Any) -> None:
    def call(q: Any, k: Any, v: Any) -> Any:
        return fg.flash_attn_func(q, k, v, P, causal=True)

    assert same(forward_and_backward(call, *inputs()), forward_and_backward(attend, *inputs()))


def test_torch_draws_the_oracles_pairs() -> None:
    from flashgen.compat.probabilities import kept_pairs

    kept = oracle.dropout_mask(fg.Dropout(P, state=STATE.numpy()), 2, 3, 37, 41)
    assert torch.equal(kept_pairs(fg.Dropout(P, state=STATE), 2, 3, 37, 41), torch.from_numpy(kept))


def test_signs_of_probabilities_say_what_was_dropped(emulated: Any, inputs: Any) -> None:
    q, k, v = inputs()
    call = partial(fg.flash_attn_func, dropout_p=P, causal=True, return_attn_probs=True)
    torch.manual_seed(5)
    out, _, signed = call(q, k, v)
    assert (signed.shape, signed.dtype) == ((2, 4, 128, 128), q.dtype)
    assert not signed.requires_grad
    assert not signed[:, :, 9:].any()
    assert not signed[..., 12:].any()
    signed = signed[:, :, :9, :12]
    exact = with_dropped(q, k, v, signed >= 0)
    assert close(out, exact)
    found = torch.autograd.grad(out.float().sum(), (q, k, v))
    assert all(map(close, found, torch.autograd.grad(exact.sum(), (q, k, v))))
    assert close(signed.abs().sum(-1), torch.ones(2, 4, 9))
    assert not signed[:, :, 0, 4:].any(), "a key after the query"
    torch.manual_seed(5)
    assert torch.equal(fg.flash_attn_func(q, k, v, P, causal=True), out), "asking changes nothing"
    torch.manual_seed(5)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q, k, v)[2][:, :, :9, :12], signed)


def test_probabilities_of_sequences_are_those_of_a_batch(emulated: Any, inputs: Any) -> None:
    q, k, v = (x.detach() for x in inputs())
    starts = {"cu_seqlens_q": (0, 9, 9, 14), "cu_seqlens_k": (0, 12, 15, 22)}
    rows = (torch.cat([q[0], q[1, :5]]), *(torch.cat([x[0], x[1, :3], x[1, :7]]) for x in (k, v)))
    options = {"causal": True, "softcap": 2.0, "alibi_slopes": torch.rand(4), "window_size": (6, 0)}
    given = {name: torch.tensor(value, dtype=torch.int32) for name, value in starts.items()}
    given |= {"max_seqlen_q": 9, "max_seqlen_k": 12}
    torch.manual_seed(5)
    *_, packed = fg.flash_attn_varlen_func(*rows, **given, dropout_p=P, return_attn_probs=True, **options)
    torch.manual_seed(5)
    *_, alone = fg.flash_attn_func(q[:1], k[:1], v[:1], P, return_attn_probs=True, **options)
    assert packed.shape == (3, 4, 128, 128)
    assert torch.equal(packed[0], alone[0])
    assert not packed[1].any()
    _, _, shorter = fg.flash_attn_func(q[1:, :5], k[1:, :7], v[1:, :7], P, return_attn_probs=True, **options)
    assert torch.equal(packed[2].abs(), shorter[0].abs())


def test_opcheck_finds_nothing(emulated: Any, inputs: Any) -> None:
    arguments = (*inputs(), None, None, 0)
    torch.library.opcheck(torch.ops.flashgen.forward.default, arguments, {"dropout_p": P, "rng_state": STATE})


def test_vmap_leaves_the_batch_what_it_is(emulated: Any, inputs: Any) -> None:
    q, k, v = (x.detach() for x in inputs())

    def call(q: Any) -> Any:
        return torch.ops.flashgen.forward(q, k, v, dropout_p=P, rng_state=STATE)[0]

    mapped = torch.vmap(call)(torch.stack([q, 2 * q]))
    assert torch.equal(mapped[0], call(q))
    assert torch.equal(mapped[1], call(2 * q))


@pytest.mark.parametrize("p", [-0.1, 1.0, 2])
def test_what_is_no_probability_is_refused(emulated: Any, inputs: Any, p: Any) -> None:
    with pytest.raises(fg.ArgumentError, match=f"dropout_p={p} is no probability"):
        fg.attention(*inputs(), dropout_p=p)
    assert emulated == []
