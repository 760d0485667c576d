"""``dropout_p`` in torch: which pairs are dropped, that they are the same in both passes, and who decides."""

from __future__ import annotations

from typing import Any

import pytest

import flashgen as fg
from flashgen import oracle

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

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


def same(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


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
