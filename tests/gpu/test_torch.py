"""The torch layer on CUDA tensors."""

from __future__ import annotations

import shutil
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


def packed(q: Any, k: Any, v: Any) -> Any:
    starts = [torch.tensor([0, 50, x.shape[1]], device="cuda", dtype=torch.int32) for x in (q, k)]
    return fg.flash_attn_varlen_func(q[0], k[0], v[0], *starts, 150, 150, causal=True, deterministic=True)


def sloped(q: Any, k: Any, v: Any) -> Any:
    slopes = torch.linspace(0.1, 0.4, q.shape[2], device="cuda")
    return fg.flash_attn_func(q, k, v, alibi_slopes=slopes, deterministic=True)


@pytest.mark.parametrize("call", [causal, packed, sloped])
def test_gradients_of_calls_like_one_before_are_the_same(inputs: Any, call: Any) -> None:
    from flashgen.torch import replay

    do = torch.randn_like(call(*inputs))
    others = [torch.randn_like(x).requires_grad_() for x in inputs]
    found = forward_and_backward(call, others, do)
    replay._replays.clear()
    for a, b in zip(found, forward_and_backward(call, others, do), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_results_are_the_same(inputs: Any, backend: str) -> None:
    if backend == "inductor":
        pytest.importorskip("triton", reason="Triton is not installed; torch's inductor needs it")
        if not any(map(shutil.which, ("cc", "gcc", "clang"))):
            pytest.skip("no C compiler is installed (cc, gcc or clang); Triton needs one")
    do = torch.randn_like(inputs[0])
    compiled = forward_and_backward(torch.compile(causal, fullgraph=True, backend=backend), inputs, do)
    for a, b in zip(compiled, forward_and_backward(causal, inputs, do), strict=True):
        assert torch.equal(a, b)


def test_opcheck_finds_nothing(plain_outputs: None, inputs: Any) -> None:
    torch.library.opcheck(torch.ops.flashgen.forward.default, (*inputs, None, None, 0, None, None, True))
    heads_first = [x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in inputs]
    torch.library.opcheck(torch.ops.flashgen.forward.default, (*heads_first, 0.2, 17))


@pytest.mark.parametrize("part", range(10))
def test_opcheck_finds_nothing_in_200_samples(plain_outputs: None, part: int) -> None:
    """All that it looks at, with strides of every kind."""
    from tests.torch.test_operators import sample

    def inputs(batch: int, len_q: int, len_kv: int, heads: int, heads_kv: int) -> Any:
        shapes = (batch, len_q, heads, 16), *2 * [(batch, len_kv, heads_kv, 16)]
        return tuple(torch.randn(shape, device="cuda", dtype=torch.float16).requires_grad_() for shape in shapes)

    torch.manual_seed(part)
    for number in range(20 * part, 20 * part + 20):
        arguments, options = sample(inputs, number)
        torch.library.opcheck(torch.ops.flashgen.forward.default, (*arguments, *options))


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


def test_the_gradient_of_the_lse_is_within_the_oracles_bounds(inputs: Any) -> None:
    q, k, v = inputs
    out, lse = fg.attention(q, k, v, mask=fg.causal(), return_lse=True)
    do, dlse = torch.randn_like(out), torch.randn_like(lse)
    found = torch.autograd.grad((out, lse), inputs, (do, dlse))
    arrays = [x.detach().float().cpu().numpy() for x in (q, k, v, do)]
    dlse = dlse.cpu().numpy()
    exact = fg.oracle.backward(SPEC, *arrays, dlse=dlse)
    limits = fg.oracle.bounds(SPEC, *arrays, dlse=dlse)
    for name, result, reference in zip(("dq", "dk", "dv"), found, exact, strict=True):
        check = fg.oracle.check(result.float().cpu().numpy(), reference, getattr(limits, name))
        assert check.ok, f"{name}: {check}"


def captured(call: Any) -> tuple[Any, Any]:
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.graph(graph, stream=stream):
        result = call()
    return graph, result


@pytest.mark.parametrize("score", [None, fg.softcap(20.0)])
def test_a_graph_captures_what_was_called_once_before(plain_outputs: None, inputs: Any, score: Any) -> None:
    q, k, v = (x.detach() for x in inputs)

    def call() -> Any:
        return fg.attention(q, k, v, mask=fg.causal(), score=score, return_lse=True)

    call()
    graph, (out, lse) = captured(call)
    q.copy_(torch.randn_like(q))
    graph.replay()
    expected = call()
    assert torch.equal(out, expected[0])
    assert torch.equal(lse, expected[1])


def test_a_capture_of_what_was_never_called_is_refused(plain_outputs: None) -> None:
    q = torch.randn(1, 64, 2, 88, device="cuda", dtype=torch.bfloat16)
    with pytest.raises(fg.LaunchError, match="make the same call once before the capture"):
        captured(lambda: fg.attention(q, q, q, mask=fg.window(17, 3)))
    torch.cuda.synchronize()
    assert fg.attention(q, q, q, mask=fg.window(17, 3)).isfinite().all()


def test_a_graph_captures_what_was_warmed_up_before(plain_outputs: None) -> None:
    q = torch.randn(1, 64, 2, 104, device="cuda", dtype=torch.bfloat16)
    fg.build(fg.AttentionSpec(104, dtype="bf16", mask=fg.window(19, 5))).warmup()
    graph, out = captured(lambda: fg.attention(q, q, q, mask=fg.window(19, 5)))
    q.copy_(torch.randn_like(q))
    graph.replay()
    assert torch.equal(out, fg.attention(q, q, q, mask=fg.window(19, 5)))


def test_tensors_of_two_devices_are_refused(inputs: Any) -> None:
    q, k, v = (x.detach() for x in inputs)
    with pytest.raises(fg.ArgumentError, match="k is on the CPU"):
        fg.attention(q, k.cpu(), v)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sdpa_is_computed_by_flashgen(plain_outputs: None, is_causal: bool, dtype: str) -> None:
    sdpa = torch.nn.functional.scaled_dot_product_attention
    calls: list[str] = []
    kernel_call, kernel_backward = fg.Kernel.__call__, fg.Kernel.backward
    x = [torch.randn(2, 4, 200, 64, device="cuda", dtype=getattr(torch, dtype)).requires_grad_() for _ in range(3)]
    do = torch.randn_like(x[0])

    def run(*options: Any) -> tuple[Any, ...]:
        out = sdpa(*x, is_causal=is_causal)
        return (out.detach(), *torch.autograd.grad(out, x, do))

    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        expected = run()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fg.Kernel, "__call__", lambda *a, **o: (calls.append("forward"), kernel_call(*a, **o))[1])
        patch.setattr(fg.Kernel, "backward", lambda *a, **o: (calls.append("backward"), kernel_backward(*a, **o))[1])
        with fg.torch.enable_sdpa():
            found = run()
            assert calls == ["forward", "backward"]
            compiled = torch.compile(sdpa, fullgraph=True, backend="aot_eager")
            assert torch.equal(compiled(*x, is_causal=is_causal), found[0])
            before = len(calls)
        plain = run()
        assert len(calls) == before
    for a, b, c in zip(found, expected, plain, strict=True):
        assert a.stride() == c.stride()
        assert torch.allclose(a.float(), b.float(), atol=4e-2, rtol=4e-2)


def test_sdpa_goes_as_it_came_a_hundred_times(plain_outputs: None) -> None:
    sdpa = torch.nn.functional.scaled_dot_product_attention
    x = torch.randn(1, 2, 128, 64, device="cuda", dtype=torch.float16)
    plain = sdpa(x, x, x)
    for _ in range(100):
        with fg.torch.enable_sdpa():
            sdpa(x, x, x)
        assert torch.equal(sdpa(x, x, x), plain)
