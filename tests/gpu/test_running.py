"""Streams, graphs, devices, threads, processes and other array libraries, on a real GPU."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import flashgen as fg

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.gpu, pytest.mark.torch]

SPEC = fg.AttentionSpec(64, dtype="bf16", mask=fg.causal())


@pytest.fixture
def inputs(make: Any) -> Any:
    return make(SPEC, 2, 256, 4, 64), make(SPEC, 2, 256, 2, 64), make(SPEC, 2, 256, 2, 64)


def test_work_follows_torchs_current_stream(inputs: Any) -> None:
    q, k, v = inputs
    kernel = fg.build(SPEC)
    expected, _ = kernel(2 * q, k, v)
    stream = torch.cuda.Stream()
    for _ in range(20):
        late = torch.zeros_like(q)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(2_000_000)
            late.copy_(2 * q)
            out, _ = kernel(late, k, v)
        stream.synchronize()
        assert torch.equal(out, expected)


def test_a_captured_graph_replays_with_new_inputs(inputs: Any) -> None:
    q, k, v = inputs
    do = torch.randn_like(q)
    spec = fg.AttentionSpec(64, dtype="bf16", mask=fg.causal(), deterministic=True)
    kernel = fg.build(spec).warmup()

    def run() -> Any:
        o, lse = kernel(q, k, v)
        return (o, lse, *kernel.backward(do, q, k, v, o, lse))

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for seed in range(3):
        torch.manual_seed(seed)
        for x in (q, k, v, do):
            x.copy_(torch.randn_like(x))
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(captured, run(), strict=True))


@pytest.mark.parametrize("unaligned", [False, True])
def test_a_cold_kernel_is_refused_during_capture(inputs: Any, unaligned: bool) -> None:
    q, k, v = inputs
    spec = fg.AttentionSpec(64, dtype="bf16", mask=fg.window(100 + unaligned, 0), direction="forward")
    kernel = fg.build(spec)
    if unaligned:
        kernel.warmup()
        flat = torch.zeros(q.numel() + 1, dtype=q.dtype, device=q.device)
        q = flat[1:].view(q.shape)
    with pytest.raises(fg.LaunchError, match="warmup"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        kernel(q, k, v)
    torch.cuda.synchronize()
    kernel.warmup(access_bytes=2 if unaligned else None)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured, _ = kernel(q, k, v)
    graph.replay()
    assert torch.equal(captured, kernel(q, k, v)[0])


def test_many_threads_share_a_kernel(inputs: Any) -> None:
    q, k, v = inputs
    kernel = fg.build(SPEC)
    expected = [kernel(q[:, : 8 + i], k, v)[0] for i in range(8)]
    torch.cuda.synchronize()

    def work(i: int) -> bool:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            results = [kernel(q[:, : 8 + i % 8], k, v)[0] for _ in range(100)]
        stream.synchronize()
        return all(torch.equal(x, expected[i % 8]) for x in results)

    with ThreadPoolExecutor(32) as pool:
        assert all(pool.map(work, range(32)))


def test_a_forked_child_gets_the_advice_to_spawn(inputs: Any) -> None:
    kernel = fg.build(SPEC).warmup()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            kernel(*inputs)
        except BaseException as error:
            os.write(writing, f"{type(error).__name__}: {error}".encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(writing)
    message = os.read(reading, 10000).decode()
    assert message.startswith("LaunchError:")
    assert "spawn" in message


def test_tensors_on_another_gpu_are_served_there(inputs: Any) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs two GPUs; this machine has {torch.cuda.device_count()}")
    expected = fg.flash_attn_func(*inputs, causal=True)
    there = [x.to("cuda:1").requires_grad_() for x in inputs]
    assert torch.cuda.current_device() == 0
    out = fg.flash_attn_func(*there, causal=True)
    out.sum().backward()
    assert out.device.index == there[0].grad.device.index == 1
    assert torch.equal(out.cpu(), expected.cpu())
    with pytest.raises(fg.ArgumentError, match="on cuda:1 and q on cuda:0"):
        fg.build(SPEC)(inputs[0], there[1].detach(), inputs[2])


def test_cupy_arrays_come_back_as_cupy_arrays() -> None:
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed (pip install cupy-cuda12x, or cupy-cuda13x)")
    spec = fg.AttentionSpec(64, dtype="fp16", mask=fg.causal())
    kernel = fg.build(spec)
    q, k, v, do = (cupy.random.standard_normal((2, 100, 4, 64)).astype(cupy.float16) for _ in range(4))
    stream = cupy.cuda.Stream(non_blocking=True)
    stream.wait_event(cupy.cuda.get_current_stream().record())
    with stream:
        o, lse = kernel(q, k, v)
        gradients = kernel.backward(do, q, k, v, o, lse)
    stream.synchronize()
    assert all(isinstance(x, cupy.ndarray) for x in (o, lse, *gradients))
    t = [torch.from_dlpack(x) for x in (q, k, v, do)]
    expected, expected_lse = kernel(*t[:3])
    assert torch.equal(torch.from_dlpack(o), expected)
    assert torch.equal(torch.from_dlpack(lse), expected_lse)
    torch_gradients = kernel.backward(t[3], *t[:3], expected, expected_lse)
    for actual, reference in zip(gradients, torch_gradients, strict=True):
        assert torch.allclose(torch.from_dlpack(actual), reference, atol=1e-2, rtol=1e-2)


class ThroughDlpack:
    """A library of its own, as far as flashgen can tell."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor

    def __dlpack_device__(self) -> Any:
        return tuple(map(int, self.tensor.__dlpack_device__()))

    def __dlpack__(self, *, stream: Any = None) -> Any:
        return self.tensor.__dlpack__(stream=stream)


class ThroughInterface:
    def __init__(self, tensor: Any) -> None:
        self.__cuda_array_interface__ = tensor.__cuda_array_interface__


@pytest.mark.parametrize(("wrap", "dtype"), [(ThroughDlpack, "bf16"), (ThroughInterface, "fp16")])
def test_any_other_arrays_work_through_the_protocols(wrap: Any, dtype: str, make: Any) -> None:
    spec = fg.AttentionSpec(64, dtype=dtype, mask=fg.causal(), deterministic=True)
    kernel = fg.build(spec)
    q, k, v, do = (make(spec, 2, 100, 4, 64) for _ in range(4))
    expected = kernel(q, k, v)
    expected += kernel.backward(do, q, k, v, *expected)
    torch.cuda.synchronize()
    foreign = [wrap(x) for x in (q, k, v)]
    o, lse = kernel(*foreign)
    results = (o, lse, *kernel.backward(wrap(do), *foreign, o, lse))
    for actual, reference in zip(results, expected, strict=True):
        assert torch.equal(torch.from_dlpack(actual), reference)
