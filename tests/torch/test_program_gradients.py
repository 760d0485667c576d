"""Gradients of what a score captured."""

from __future__ import annotations

from typing import Any

import pytest

import flashgen as fg

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch
pytest.importorskip("flashgen.torch")

from tests.torch.programs import close, expected  # noqa: E402
from tests.torch.results import same  # noqa: E402


def float_program(q: Any, k: Any, v: Any, slopes: Any, table: Any, logits: Any) -> Any:
    score = fg.Score.of(lambda s, b, h, q, k: s + fg.tanh(slopes[h] * (k - q)) + table[h, k]) >> fg.sink(logits)
    return fg.attention(q, k, v, score=score)


def float_reference(q: Any, k: Any, v: Any, slopes: Any, table: Any, logits: Any) -> Any:
    """A sink is one more key, whose value is zero."""
    zero = k.new_zeros(k.shape[0], 1, *k.shape[2:])

    def score(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        keys = k[..., :-1]
        plain = s[..., :-1] + torch.tanh(slopes[h] * (keys - q)) + table[h, keys]
        return torch.cat([plain, logits[h].expand(*s.shape[:-1], 1)], -1)

    return expected(q, torch.cat([k, zero], 1), torch.cat([v, zero], 1), score=score)


def floats() -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(shape, generator=generator) for shape in ((4,), (4, 12), (4,)))


@pytest.mark.parametrize("deterministic", [False, True])
def test_captured_floats_have_gradients(emulated: Any, inputs: Any, deterministic: bool) -> None:
    torch.use_deterministic_algorithms(deterministic)
    try:
        arrays = (*inputs(), *(x.requires_grad_() for x in floats()))
        out, exact = float_program(*arrays), float_reference(*arrays)
        assert close(out, exact)
        do = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out.dtype)
        found = torch.autograd.grad(out, arrays, do)
    finally:
        torch.use_deterministic_algorithms(False)
    for gradient, reference, x in zip(found, torch.autograd.grad(exact, arrays, do.double()), arrays, strict=True):
        assert (gradient.shape, gradient.dtype) == (x.shape, x.dtype)
        assert close(gradient, reference)


def test_only_wanted_gradients_are_computed(emulated: Any, inputs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    backward = fg.Kernel.backward

    def counted(self: Any, *arguments: Any, captured_gradients: bool = False, **options: Any) -> Any:
        asked.append(captured_gradients)
        return backward(self, *arguments, captured_gradients=captured_gradients, **options)

    monkeypatch.setattr(fg.Kernel, "backward", counted)
    slopes, table, logits = floats()
    float_program(*inputs(), slopes, table, logits).sum().backward()
    q, k, v = (x.detach() for x in inputs())
    table.requires_grad_()
    float_program(q, k, v, slopes, table, logits).sum().backward()
    assert asked == [False, True]
    assert table.grad is not None


def test_the_operator_gives_the_same_gradients(emulated: Any, inputs: Any) -> None:
    from flashgen.torch.mask_and_score import score_of
    from flashgen.torch.program import written_program

    slopes, table, logits = (x.requires_grad_() for x in floats())
    score = score_of(lambda s, b, h, q, k: s + fg.tanh(slopes[h] * (k - q)) + table[h, k]) >> fg.sink(logits)
    program, captured = written_program(fg.full(), score)
    q, k, v = inputs()
    wanted = (q, v, slopes, logits)
    out = torch.ops.flashgen.program_forward(q, k, v, list(captured), program.rule)[0]
    through = torch.autograd.grad(out.square().sum(), wanted)
    direct = torch.autograd.grad(fg.attention(q, k, v, score=score).square().sum(), wanted)
    assert same(through, direct)
    compiled = torch.compile(lambda q, k, v: fg.attention(q, k, v, score=score), fullgraph=True, backend="aot_eager")
    assert same(torch.autograd.grad(compiled(q, k, v).square().sum(), wanted), direct)
    torch.library.opcheck(torch.ops.flashgen.program_forward.default, (q, k, v, list(captured), program.rule))
