"""``torch.ops.flashgen``: what torch's program transformations see."""

from __future__ import annotations

from typing import Any

import pytest

import flashgen as fg

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


def forward_and_backward(call: Any, q: Any, k: Any, v: Any) -> tuple[Any, ...]:
    out = call(q, k, v)
    return (out.detach(), *torch.autograd.grad(out.square().sum(), (q, k, v)))


def same(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def causal(q: Any, k: Any, v: Any) -> Any:
    return fg.attention(q, k, v, mask=fg.causal())


@pytest.mark.parametrize("layout", ["contiguous", "heads first", "sliced", "last dimension strided"])
@pytest.mark.parametrize("options", [(), (0.3, None, 0), (None, 4, 2, None, 0, True)])
def test_opcheck_finds_nothing(emulated: Any, inputs: Any, layout: str, options: Any) -> None:
    def laid_out(x: Any) -> Any:
        x = x.detach()
        if layout == "heads first":
            x = x.transpose(1, 2).contiguous().transpose(1, 2)
        elif layout == "sliced":
            x = torch.cat([x, x], -1)[..., :16]
        elif layout == "last dimension strided":
            x = x.transpose(-1, -2).contiguous().transpose(-1, -2)
        return x.requires_grad_()

    arguments = tuple(laid_out(x) for x in inputs(len_q=7, len_kv=5))
    torch.library.opcheck(torch.ops.flashgen.forward.default, (*arguments, *options))
    with torch.no_grad():
        out, lse = torch.ops.flashgen.forward(*arguments, *options)
        gradients = (out.new_ones(out.shape), *(x.detach() for x in arguments), out, lse, *options)
        checks = ("test_schema", "test_faketensor")
        torch.library.opcheck(torch.ops.flashgen.backward.default, gradients, test_utils=checks)


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


def test_compiled_for_any_length(emulated: Any, inputs: Any) -> None:
    compiled = torch.compile(causal, fullgraph=True, backend="aot_eager", dynamic=True)
    for length in (3, 5, 8):
        q, k, v = inputs(len_q=length, len_kv=length + 2)
        assert torch.equal(compiled(q, k, v), causal(q, k, v))


def test_flash_attns_function_compiles_too(emulated: Any, inputs: Any) -> None:
    def call(q: Any, k: Any, v: Any) -> Any:
        return fg.flash_attn_func(q, k, v, causal=True, window_size=(3, 3))

    q, k, v = inputs()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert same(forward_and_backward(compiled, q, k, v), forward_and_backward(call, q, k, v))


def test_a_dispatch_mode_sees_the_operator(emulated: Any, inputs: Any) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Recorder(TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    seen: list[Any] = []
    with Recorder():
        causal(*(x.detach() for x in inputs()))
    assert torch.ops.flashgen.forward.default in seen


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


def test_export_keeps_the_operator(emulated: Any, inputs: Any) -> None:
    class Module(torch.nn.Module):  # type: ignore[misc]
        def forward(self, q: Any, k: Any, v: Any) -> Any:
            return causal(q, k, v)

    program = torch.export.export(Module(), tuple(x.detach() for x in inputs()))
    assert "flashgen.forward" in program.graph_module.code
