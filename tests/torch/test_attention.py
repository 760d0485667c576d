"""``flashgen.attention`` on plain tensors: values, gradients, and which kernel is taken."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import flashgen as fg

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


def close(actual: Any, expected: Any) -> bool:
    return bool(torch.allclose(actual.double(), expected.double(), atol=4e-3, rtol=4e-3))


def bottom_right_causal(len_q: int, len_kv: int) -> Any:
    return torch.ones(len_q, len_kv, dtype=torch.bool).tril(len_kv - len_q)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [None, 0.4])
def test_values_and_gradients_are_attentions(
    emulated: Any, inputs: Any, reference: Any, causal: bool, scale: float | None
) -> None:
    q, k, v = inputs()
    mask = bottom_right_causal(9, 12) if causal else None
    out, lse = fg.attention(q, k, v, mask=fg.causal() if causal else None, scale=scale, return_lse=True)
    do = torch.randn_like(out)
    exact, exact_lse = reference(q, k, v, mask, scale)
    assert close(out, exact)
    assert close(lse, exact_lse)
    for actual, expected in zip(
        torch.autograd.grad(out, (q, k, v), do),
        torch.autograd.grad(exact, (q, k, v), do.double()),
        strict=True,
    ):
        assert close(actual, expected)


def test_the_gradient_of_a_sum_arrives_expanded_and_is_understood(emulated: Any, inputs: Any, reference: Any) -> None:
    q, k, v = inputs()
    actual = torch.autograd.grad(fg.attention(q, k, v).sum(), v)[0]
    assert close(actual, torch.autograd.grad(reference(q, k, v)[0].sum(), v)[0])


def test_heads_first_tensors_are_views(emulated: Any, inputs: Any, reference: Any) -> None:
    q, k, v = (x.detach().transpose(1, 2).contiguous().transpose(1, 2) for x in inputs())
    assert close(fg.attention(q, k, v), reference(q, k, v)[0])


def test_a_last_stride_other_than_one_is_copied(emulated: Any, inputs: Any, reference: Any) -> None:
    q, k, v = (x.detach().transpose(-1, -2).contiguous().transpose(-1, -2) for x in inputs())
    assert q.stride(-1) != 1
    assert close(fg.attention(q, k, v), reference(q, k, v)[0])


def test_without_gradients_only_the_forward_pass_is_built(emulated: Any, inputs: Any) -> None:
    q, k, v = inputs()
    with torch.no_grad():
        out = fg.attention(q, k, v)
    assert [spec.direction for spec in emulated] == ["forward"]
    assert not out.requires_grad


def test_each_kernel_is_built_once(emulated: Any, inputs: Any) -> None:
    for len_q in (3, 4, 3):
        fg.attention(*inputs(len_q=len_q), mask=fg.causal())
    assert len(emulated) == 1


@pytest.mark.parametrize(
    ("asked", "torch_wants", "expected"),
    [(None, False, False), (None, True, True), (True, False, True), (False, True, False)],
)
def test_determinism_follows_torch_unless_asked(
    emulated: Any, inputs: Any, asked: bool | None, torch_wants: bool, expected: bool
) -> None:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(torch_wants)
    try:
        fg.attention(*inputs(), deterministic=asked)
    finally:
        torch.use_deterministic_algorithms(before)
    assert [spec.deterministic for spec in emulated] == [expected]


@pytest.mark.parametrize("of", ["both", "lse alone"])
@pytest.mark.parametrize("path", ["function", "program", "operator", "program operator", "compiled"])
def test_the_lse_is_differentiable(emulated: Any, inputs: Any, reference: Any, of: str, path: str) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    q, k, v = inputs()
    score = fg.Score.of(lambda s, b, h, q, k: s * 1.0) if "program" in path else None

    def attend(q: Any, k: Any, v: Any) -> Any:
        return fg.attention(q, k, v, score=score, return_lse=True)

    def through_operator(q: Any, k: Any, v: Any) -> Any:
        with FlopCounterMode(display=False):
            return attend(q, k, v)

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    call = compiled if path == "compiled" else through_operator if "operator" in path else attend
    (out, lse), (exact, exact_lse) = call(q, k, v), reference(q, k, v)
    do, dlse = torch.randn_like(out), torch.randn_like(lse)
    actual, expected = (lse * dlse).sum(), (exact_lse * dlse).sum()
    if of == "both":
        actual, expected = actual + (out * do).sum(), expected + (exact * do).sum()
    for x in (q, k) if of == "lse alone" else (q, k, v):
        found, wanted = (torch.autograd.grad(loss, x, retain_graph=True)[0] for loss in (actual, expected))
        assert close(found, wanted)


@pytest.mark.parametrize("path", ["function", "operator", "program"])
def test_autocast_casts_to_its_dtype(emulated: Any, inputs: Any, path: str) -> None:
    q, k, v = (x.detach().float().requires_grad_() for x in inputs())
    score = fg.softcap(20.0) if path == "program" else None

    def attend(q: Any, k: Any, v: Any) -> Any:
        return torch.ops.flashgen.forward(q, k, v)[0] if path == "operator" else fg.attention(q, k, v, score=score)

    with torch.autocast("cpu", torch.bfloat16):
        out = attend(q, k, v)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, attend(*(x.bfloat16() for x in (q, k, v))))
    out.sum().backward()
    assert q.grad.dtype == torch.float32


@pytest.mark.parametrize("scored", ["plain", "cap, slopes and sink"])
@pytest.mark.filterwarnings("ignore:.*not a double precision floating point")
def test_gradients_are_the_slopes_of_the_function(emulated: Any, scored: str) -> None:
    """By differences, in float32: of both results, by all inputs, also those that a score captured."""
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Any:
        return torch.randn(shape, generator=generator).requires_grad_()

    q, k, v = normal(1, 3, 2, 4), normal(1, 4, 1, 4), normal(1, 4, 1, 3)
    slopes, logits = normal(2), normal(2)

    def attend(q: Any, k: Any, v: Any, slopes: Any, logits: Any) -> Any:
        score = fg.softcap(3.0) >> fg.alibi(slopes) >> fg.sink(logits) if scored != "plain" else None
        return fg.attention(q, k, v, mask=fg.window(2, 0), score=score, return_lse=True, deterministic=True)

    inputs = (q, k, v, slopes, logits) if scored != "plain" else (q, k, v, slopes.detach(), logits.detach())
    assert torch.autograd.gradcheck(attend, inputs, eps=1e-2, atol=1e-3, rtol=1e-2)


def test_during_a_capture_nothing_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    from flashgen.torch import kernels
    from flashgen.torch.program import FULL

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(kernels, "get_driver", lambda: SimpleNamespace(capability=lambda device: 80))
    on_gpu = SimpleNamespace(shape=(24,), dtype=torch.float16, get_device=lambda: 0)
    spec = fg.AttentionSpec(24, dtype="fp16")

    def kernel() -> Any:
        return kernels.kernel_for(on_gpu, on_gpu, FULL, gradients=False, deterministic=False)

    with pytest.raises(fg.LaunchError, match="make the same call once before the capture"):
        kernel()
    # What was built by hand will do, also if it could do more.
    kept = fg.build(spec, arch="sm_80")
    assert kernel() is kept
    kernels._kernels.forget(lambda key: True)


def test_of_a_thousand_widths_the_last_kernels_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    from flashgen.api import KERNELS_KEPT
    from flashgen.torch import kernels
    from flashgen.torch.program import Program

    monkeypatch.setattr(kernels, "_kernels", kernels.Recent(KERNELS_KEPT))
    monkeypatch.setattr(kernels, "_build", lambda *key: key)
    x = SimpleNamespace(shape=(24,), dtype=torch.float16, get_device=lambda: 0)

    def kernel(width: int) -> Any:
        return kernels.kernel_for(x, x, Program((width, 0, None, None)), gradients=False, deterministic=False)

    made = [kernel(width) for width in range(1000)]
    assert len(kernels._kernels) <= KERNELS_KEPT
    assert all(kernel(width) is made[width] for width in range(1000 - KERNELS_KEPT // 2, 1000))


def test_second_derivatives_are_refused(emulated: Any, inputs: Any) -> None:
    q, k, v = inputs()
    (dq,) = torch.autograd.grad(fg.attention(q, k, v).pow(2).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dq.sum().backward()


def test_checkpointing_recomputes_the_same(emulated: Any, inputs: Any) -> None:
    from torch.utils.checkpoint import checkpoint

    q, k, v = inputs()
    plain = torch.autograd.grad(fg.attention(q, k, v).sum(), q)[0]
    saved = torch.autograd.grad(checkpoint(fg.attention, q, k, v, use_reentrant=False).sum(), q)[0]
    assert torch.equal(plain, saved)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"mask": "causal"}, "mask='causal' is not a mask"),
        ({"k": [1.0]}, "k is a list; pass a torch.Tensor"),
        ({"q": torch.zeros(())}, "q has shape (), k has shape (2, 12, 2, 16)"),
        ({"q": torch.zeros(2, 3, 4, 16)}, "k is fp16, but this kernel was built for fp32"),
        (
            {"q": torch.zeros(2, 3, 4, 16, dtype=torch.float64)},
            "q is torch.float64; convert it",
        ),
        ({"scale": -1.0}, "scale=-1.0"),
    ],
)
def test_misuse_is_named(emulated: Any, inputs: Any, change: Any, words: str) -> None:
    q, k, v = (x.detach() for x in inputs())
    with pytest.raises(fg.FlashgenError) as error:
        fg.attention(**{"q": q, "k": k, "v": v, **change})
    assert words in str(error.value)


def test_cpu_tensors_are_sent_to_the_gpu(inputs: Any) -> None:
    q, k, v = inputs()
    for call in (fg.attention, torch.ops.flashgen.forward):
        with pytest.raises(fg.ArgumentError, match=r"q\.cuda\(\)"):
            call(q, k, v)


def nested(layout: Any) -> Any:
    return torch.nested.nested_tensor([torch.zeros(9, 4, 16), torch.zeros(5, 4, 16)], dtype=torch.half, layout=layout)


@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning", "ignore:Sparse CSR:UserWarning")
@pytest.mark.parametrize(
    "make",
    [
        lambda: nested(torch.strided),
        lambda: nested(torch.jagged),
        lambda: torch.zeros(2, 9, 4, 16, dtype=torch.half).to_sparse(),
        lambda: torch.zeros(9, 16, dtype=torch.half).to_sparse_csr(),
    ],
    ids=["nested", "jagged", "sparse", "sparse CSR"],
)
@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("score", [None, fg.softcap(3.0), fg.bias(torch.zeros(9, 9))], ids=["plain", "softcap", "bias"])
def test_tensors_that_are_not_dense_are_refused_in_a_sentence(emulated: Any, make: Any, name: str, score: Any) -> None:
    given = {other: torch.zeros(2, 9, 4, 16, dtype=torch.half) for other in "qkv"} | {name: make()}
    with pytest.raises(
        fg.ArgumentError, match=rf"^{name} is a (nested tensor|tensor of layout torch.sparse).*; pass a dense one"
    ):
        fg.attention(**given, score=score)
