"""``torch.ops.flashgen``: what torch's program transformations see."""

from __future__ import annotations

import random
from typing import Any

import pytest

import flashgen as fg

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from tests.torch.results import Recorder, forward_and_backward, same  # noqa: E402


def causal(q: Any, k: Any, v: Any) -> Any:
    return fg.attention(q, k, v, mask=fg.causal())


LAYOUTS = ("contiguous", "heads first", "sliced", "last dimension strided", "one batch", "every other row", "unaligned")
OPTIONS: tuple[tuple[Any, ...], ...] = ((), (0.3, None, 0), (None, 4, 2, None, 0, True))
#: All that opcheck looks at, for a few; for many, what goes wrong with strides and shapes.
_ALL, _MANY = 14, 186


def laid_out(x: Any, layout: str) -> Any:
    x = x.detach()
    if layout == "heads first":
        x = x.transpose(1, 2).contiguous().transpose(1, 2)
    elif layout == "sliced":
        x = torch.cat([x, x], -1)[..., : x.shape[-1]]
    elif layout == "last dimension strided":
        x = x.transpose(-1, -2).contiguous().transpose(-1, -2)
    elif layout == "one batch":
        x = x[:1].expand(x.shape)
    elif layout == "every other row":
        x = torch.stack([x, x], 2).flatten(1, 2)[:, ::2]
    elif layout == "unaligned":
        x = torch.cat([x, x], -1)[..., 1 : 1 + x.shape[-1]]
    return x.requires_grad_()


def sample(inputs: Any, number: int) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Arguments of a call whose sizes and layouts the number draws, and its options."""
    draw = random.Random(number)
    heads_kv = draw.choice((1, 2))
    sizes = {"batch": draw.randint(1, 3), "len_q": draw.randint(1, 9), "len_kv": draw.randint(1, 9)}
    made = inputs(**sizes, heads=heads_kv * draw.randint(1, 2), heads_kv=heads_kv)
    return tuple(laid_out(x, draw.choice(LAYOUTS)) for x in made), draw.choice(OPTIONS)


@pytest.mark.parametrize("number", range(_ALL))
def test_opcheck_finds_nothing(emulated: Any, inputs: Any, number: int) -> None:
    arguments, options = sample(inputs, number)
    arguments = tuple(laid_out(x, LAYOUTS[number % len(LAYOUTS)]) for x in arguments)
    torch.library.opcheck(torch.ops.flashgen.forward.default, (*arguments, *options))


def test_opcheck_finds_nothing_in_many_samples(emulated: Any, inputs: Any) -> None:
    checks = ("test_schema", "test_faketensor")
    seen = set()
    for number in range(_ALL, _ALL + _MANY):
        arguments, options = sample(inputs, number)
        arguments = tuple(x.detach() for x in arguments)
        seen.add(tuple((x.shape, x.stride()) for x in arguments))
        torch.library.opcheck(torch.ops.flashgen.forward.default, (*arguments, *options), test_utils=checks)
        out, lse = torch.ops.flashgen.forward(*arguments, *options)
        dlse = {} if number % 2 else {"dlse": torch.ones_like(lse)}
        gradients = (torch.ones_like(out), *arguments, out, lse, *options)
        torch.library.opcheck(torch.ops.flashgen.backward.default, gradients, dlse, test_utils=checks)
    assert len(seen) > 0.9 * _MANY


def test_operator_and_function_agree_bit_for_bit(emulated: Any, inputs: Any) -> None:
    q, k, v = inputs()
    through_operator = forward_and_backward(
        lambda q, k, v: torch.ops.flashgen.forward(q, k, v, None, None, 0)[0], q, k, v
    )
    assert same(through_operator, forward_and_backward(causal, q, k, v))


def test_compiled_in_one_graph(emulated: Any, inputs: Any) -> None:
    q, k, v = inputs()
    compiled = torch.compile(causal, fullgraph=True, backend="aot_eager")
    assert same(forward_and_backward(compiled, q, k, v), forward_and_backward(causal, q, k, v))


def test_compiled_once_for_all_lengths(emulated: Any, inputs: Any) -> None:
    compiled = torch.compile(causal, fullgraph=True, backend="aot_eager", dynamic=True)
    # Sizes that are equal while compiling are taken to be always equal.
    compiled(*inputs(batch=5, len_q=7, len_kv=11))
    with torch.compiler.set_stance("fail_on_recompile"):
        for length in range(2, 52):
            q, k, v = inputs(batch=2 + length % 3, len_q=length, len_kv=2 + 3 * length % 50)
            assert torch.equal(compiled(q, k, v), causal(q, k, v))


def test_flash_attns_function_compiles_too(emulated: Any, inputs: Any) -> None:
    def call(q: Any, k: Any, v: Any) -> Any:
        return fg.flash_attn_func(q, k, v, causal=True, window_size=(3, 3))

    q, k, v = inputs()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert same(forward_and_backward(compiled, q, k, v), forward_and_backward(call, q, k, v))


def test_a_dispatch_mode_sees_the_operator(emulated: Any, inputs: Any) -> None:
    with Recorder() as recorder:
        causal(*(x.detach() for x in inputs()))
    assert torch.ops.flashgen.forward.default in recorder.seen


def test_selective_checkpointing_saves_the_operator(emulated: Any, inputs: Any) -> None:
    from functools import partial

    from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

    from flashgen.torch import SAC_SAVE

    q, k, v = inputs()
    context = partial(create_selective_checkpoint_contexts, list(SAC_SAVE))
    calls: list[Any] = []
    kernel_call = fg.Kernel.__call__

    def counted(self: Any, *arguments: Any, **options: Any) -> Any:
        calls.append(self)
        return kernel_call(self, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fg.Kernel, "__call__", counted)
        out = checkpoint(causal, q, k, v, use_reentrant=False, context_fn=context)
        torch.autograd.grad(out.sum(), q)
    assert len(calls) == 1


def test_flops_are_counted(emulated: Any, inputs: Any) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    q, k, v = inputs(batch=2, len_q=9, len_kv=12, heads=4, heads_kv=2, dim=16)
    with FlopCounterMode(display=False) as counter:
        torch.autograd.grad(causal(q, k, v).sum(), q)
    product = 2 * 2 * 4 * 9 * 12 * 16
    assert counter.get_total_flops() == (2 + 5) * product


def test_vmap_maps_over_any_dimension(emulated: Any, inputs: Any) -> None:
    q, k, v = (x.detach() for x in inputs(batch=3))
    q = torch.stack([q, 2 * q], 2)
    mapped = torch.vmap(causal, in_dims=(2, None, None))(q, k, v)
    assert torch.equal(mapped[0], causal(q[:, :, 0], k, v))
    assert torch.equal(mapped[1], causal(q[:, :, 1], k, v))


def test_vmap_of_gradients(emulated: Any, inputs: Any) -> None:
    q, k, v = (x.detach() for x in inputs())
    out, lse = torch.ops.flashgen.forward(q, k, v)
    do, dlse = torch.randn(3, *out.shape).half(), torch.randn(3, *lse.shape)

    def backward(do: Any, dlse: Any) -> Any:
        return torch.ops.flashgen.backward(do, q, k, v, out, lse, deterministic=True, dlse=dlse)

    mapped = torch.vmap(backward)(do, dlse)
    for i in range(3):
        assert same(tuple(x[i] for x in mapped), backward(do[i], dlse[i]))


def test_vmap_of_captured_tensors_leaves_the_batch_what_it_is(emulated: Any, inputs: Any) -> None:
    q, k, v = (x.detach() for x in inputs(batch=2))
    biases = torch.randn(3, 2, 12)

    def attend(q: Any, bias: Any) -> Any:
        return fg.attention(q, k, v, score=lambda s, b, h, q, k: s + bias[b, k])

    mapped = torch.vmap(attend, in_dims=(None, 0))(q, biases)
    for bias, found in zip(biases, mapped, strict=True):
        assert torch.equal(found, attend(q, bias))


def test_export_keeps_the_operator(emulated: Any, inputs: Any) -> None:
    class Module(torch.nn.Module):  # type: ignore[misc]
        def forward(self, q: Any, k: Any, v: Any) -> Any:
            return causal(q, k, v)

    program = torch.export.export(Module(), tuple(x.detach() for x in inputs()))
    assert "flashgen.forward" in program.graph_module.code
