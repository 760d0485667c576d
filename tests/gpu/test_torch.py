"""The torch layer on CUDA tensors."""

from __future__ import annotations

from typing import Any

import pytest

import flashgen as fg

torch = pytest.importorskip("torch")
pytest.importorskip("flashgen.torch")  # registers the operators
pytestmark = [pytest.mark.gpu, pytest.mark.torch]

SPEC = fg.AttentionSpec(64, dtype="bf16", mask=fg.causal())


@pytest.fixture
def inputs(make: Any) -> Any:
    shapes = ((2, 130, 4, 64), (2, 150, 2, 64), (2, 150, 2, 64))
    return tuple(make(SPEC, *shape).requires_grad_() for shape in shapes)


def causal(q: Any, k: Any, v: Any) -> Any:
    return fg.attention(q, k, v, mask=fg.causal(), deterministic=True)


def forward_and_backward(call: Any, inputs: Any, do: Any) -> tuple[Any, ...]:
    out = call(*inputs)
    return (out.detach(), *torch.autograd.grad(out, inputs, do))


def test_autograd_is_within_the_oracles_bounds(inputs: Any, judge: Any) -> None:
    q, k, v = inputs
    out, lse = fg.attention(q, k, v, mask=fg.causal(), return_lse=True)
    do = torch.randn_like(out)
    judge(SPEC, q, k, v, do, None, (out, lse, *torch.autograd.grad(out, inputs, do)))


def test_flash_attns_function_is_within_the_oracles_bounds(inputs: Any, judge: Any) -> None:
    q, k, v = inputs
    spec = fg.AttentionSpec(64, dtype="bf16", mask=fg.window(40, 0))
    out, lse, _ = fg.flash_attn_func(q, k, v, causal=True, window_size=(40, 7), return_attn_probs=True)
    do = torch.randn_like(out)
    judge(spec, q, k, v, do, None, (out, lse, *torch.autograd.grad(out, inputs, do)))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_results_are_the_same(inputs: Any, backend: str) -> None:
    do = torch.randn_like(inputs[0])
    try:
        compiled = forward_and_backward(torch.compile(causal, fullgraph=True, backend=backend), inputs, do)
    except Exception as error:
        if backend == "inductor" and "compiler" in str(error).lower():
            pytest.skip(f"torch's own compiler cannot run here: {error}")
        raise
    for a, b in zip(compiled, forward_and_backward(causal, inputs, do), strict=True):
        assert torch.equal(a, b)


def test_opcheck_finds_nothing(plain_outputs: None, inputs: Any) -> None:
    torch.library.opcheck(torch.ops.flashgen.forward.default, (*inputs, None, None, 0, None, None, True))
    heads_first = [x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in inputs]
    torch.library.opcheck(torch.ops.flashgen.forward.default, (*heads_first, 0.2, 17))


@pytest.mark.parametrize("through", ["function", "operator", "compiled"])
def test_autocast_casts_to_its_dtype(inputs: Any, through: str) -> None:
    q, k, v = (x.detach().float().requires_grad_() for x in inputs)

    def operator(q: Any, k: Any, v: Any) -> Any:
        return torch.ops.flashgen.forward(q, k, v, None, None, 0)[0]

    compiled = torch.compile(causal, fullgraph=True, backend="aot_eager")
    call = {"function": causal, "operator": operator, "compiled": compiled}[through]
    with torch.autocast("cuda", torch.bfloat16):
        out = call(q, k, v)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, causal(*(x.bfloat16() for x in (q, k, v))))
    out.sum().backward()
    assert q.grad.dtype == torch.float32


def test_torchs_global_switch_makes_gradients_reproducible(inputs: Any) -> None:
    do = torch.randn_like(inputs[0])

    def call(q: Any, k: Any, v: Any) -> Any:
        return fg.flash_attn_func(q, k, v, causal=True)

    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        first = forward_and_backward(call, inputs, do)
        for _ in range(20):
            again = forward_and_backward(call, inputs, do)
            assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))
    finally:
        torch.use_deterministic_algorithms(before)


def test_gradients_are_computed_on_the_stream_of_the_forward_pass(inputs: Any) -> None:
    do = torch.randn_like(inputs[0])
    expected = forward_and_backward(causal, inputs, do)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(2_000_000)
        actual = forward_and_backward(causal, inputs, do)
    stream.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
