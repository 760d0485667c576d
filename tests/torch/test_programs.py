"""``flashgen.attention`` with masks and scores that are expressions: values, gradients, and what calls cost."""

from __future__ import annotations

import sys
import time
from typing import Any

import numpy as np
import pytest

import flashgen as fg

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

IDS = torch.tensor([[0] * 5 + [1] * 7, [0] * 2 + [2] * 10], dtype=torch.int32) if torch else None


def close(actual: Any, expected: Any) -> bool:
    return bool(torch.allclose(actual.double(), expected.double(), atol=6e-3, rtol=6e-3))


def expected(q: Any, k: Any, v: Any, mask: Any = None, score: Any = None) -> Any:
    """Attention in float64; the functions take whole index arrays, so they are the user's own."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    logits = q @ k.mT * q.shape[-1] ** -0.5
    sizes = logits.shape
    b, h, i, j = (torch.arange(n).view([-1 if a == axis else 1 for a in range(4)]) for axis, n in enumerate(sizes))
    if score is not None:
        logits = score(logits, b, h, i, j)
    if mask is not None:
        logits = logits.masked_fill(~mask(b, h, i, j).expand(sizes), float("-inf"))
    return (logits.softmax(-1).nan_to_num() @ v).transpose(1, 2)


def test_functions_with_captured_tensors_are_attention(emulated: Any, inputs: Any) -> None:
    q, k, v = inputs()
    slopes, window = torch.rand(4), 7

    def mask(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (q - k < window) & (IDS[b, q] == IDS[b, k])

    def score(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + slopes[h] * (k - q)

    out = fg.attention(q, k, v, mask=mask, score=score)
    exact = expected(q, k, v, mask, score)
    assert close(out, exact)
    do = torch.randn_like(out)
    for actual, reference in zip(
        torch.autograd.grad(out, (q, k, v), do), torch.autograd.grad(exact, (q, k, v), do.double()), strict=True
    ):
        assert close(actual, reference)


def test_named_masks_and_scores_take_tensors(emulated: Any, inputs: Any) -> None:
    q, k, v = (x.detach() for x in inputs(len_q=12))
    slopes = torch.rand(4)
    out = fg.attention(q, k, v, mask=fg.causal() & fg.document(IDS), score=fg.softcap(2.0) >> fg.alibi(slopes))
    exact = expected(
        q,
        k,
        v,
        lambda b, h, q, k: (q >= k) & (IDS[b, q] == IDS[b, k]),
        lambda s, b, h, q, k: 2 * torch.tanh(s / 2) - slopes.view(1, -1, 1, 1) * (q - k).abs(),
    )
    assert close(out, exact)


def test_heads_first_is_a_layout(emulated: Any, inputs: Any) -> None:
    q, k, v = (x.detach() for x in inputs())
    first = tuple(x.transpose(1, 2) for x in (q, k, v))
    for options in ({}, {"score": fg.softcap(2.0)}):
        out, lse = fg.attention(*first, layout="bhsd", return_lse=True, **options)
        plain, plain_lse = fg.attention(q, k, v, return_lse=True, **options)
        assert torch.equal(out.transpose(1, 2), plain)
        assert torch.equal(lse, plain_lse)


def test_a_new_tensor_or_number_is_used_and_a_new_tensor_builds_nothing(emulated: Any, inputs: Any) -> None:
    q, k, v = (x.detach() for x in inputs())

    def attend(bias: Any, cap: float) -> Any:
        return fg.attention(q, k, v, score=lambda s, b, h, q, k: fg.tanh(s / cap) * cap + bias[h, k])

    for bias, cap in ((torch.rand(4, 12), 3.0), (torch.rand(4, 12), 3.0), (torch.zeros(4, 12), 0.5)):
        exact = expected(q, k, v, score=lambda s, b, h, q, k, c=cap, t=bias: c * torch.tanh(s / c) + t[h, k])
        assert close(attend(bias, cap), exact)
    assert len(emulated) == 2


def test_another_shape_is_traced_again(emulated: Any, inputs: Any) -> None:
    table = torch.zeros(4, 3)

    def score(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + table[h, k % table.shape[1]]

    for width in (3, 5):
        table = torch.rand(4, width)
        q, k, v = (x.detach() for x in inputs())
        assert close(fg.attention(q, k, v, score=score), expected(q, k, v, score=score))


def test_one_tensor_in_two_places_is_captured_once_and_two_are_not(emulated: Any, inputs: Any) -> None:
    q, k, v = (x.detach() for x in inputs())
    for first, second in ((torch.rand(12), None), (torch.rand(12), torch.rand(12))):
        a, b2 = first, first if second is None else second
        score = lambda s, b, h, q, k, a=a, c=b2: s + a[k] - 2 * c[q]  # noqa: E731
        assert close(fg.attention(q, k, v, score=score), expected(q, k, v, score=score))
        mask = fg.Mask.of(lambda b, h, q, k, a=a: a[k] > 0.3)
        out = fg.attention(q, k, v, mask=mask, score=score)
        assert close(out, expected(q, k, v, lambda b, h, q, k, a=a: a[k] > 0.3, score))


def test_attributes_of_objects_are_looked_up_on_every_call(emulated: Any, inputs: Any) -> None:
    class Module(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("bias", torch.rand(12))

        def forward(self, q: Any, k: Any, v: Any) -> Any:
            return fg.attention(q, k, v, score=lambda s, b, h, q, k: s + self.bias[k])

    module = Module()
    q, k, v = (x.detach() for x in inputs())
    for _ in range(2):
        module.bias = torch.rand(12)
        assert close(module(q, k, v), expected(q, k, v, score=lambda s, b, h, q, k: s + module.bias[k]))


class Settings:
    window = 3


@pytest.mark.parametrize("kind", ["class", "object", "module", "numpy number", "helper", "list"])
def test_what_a_function_holds_may_change_between_calls(emulated: Any, inputs: Any, kind: str) -> None:
    import types

    q, k, v = (x.detach() for x in inputs())
    place: Any = types.ModuleType("settings") if kind == "module" else Settings() if kind == "object" else Settings
    number: Any = 0
    held: list[int] = [0]

    def helper(q: Any, k: Any) -> Any:
        return abs(q - k) < number

    masks = {
        "numpy number": lambda b, h, q, k: abs(q - k) < number,
        "helper": lambda b, h, q, k: helper(q, k),
        "list": lambda b, h, q, k: abs(q - k) < held[0],
    }
    mask = masks.get(kind, lambda b, h, q, k: abs(q - k) < place.window)
    for width in (2, 6, 2):
        place.window, number, held[0] = width, np.int64(width), width
        assert close(fg.attention(q, k, v, mask=mask), expected(q, k, v, mask))


def test_captured_tensors_are_not_kept_alive(emulated: Any, inputs: Any) -> None:
    import gc
    import weakref

    q, k, v = (x.detach() for x in inputs())

    def attend(bias: Any) -> Any:
        fg.attention(q, k, v, score=lambda s, b, h, q, k: s + bias[k])
        fg.attention(q, k, v, score=fg.bias(bias.view(1, 12)), mask=fg.Mask.of(lambda b, h, q, k: bias[k] > 0))
        return weakref.ref(bias)

    gone = attend(torch.rand(12))
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mask": fg.document(np.zeros((2, 12), np.int32))}, "the captured tensor ids is a numpy.ndarray; make it a"),
        ({"score": fg.alibi(torch.zeros(4, device="meta"))}, "the captured tensor slopes is on meta, and q is on cpu"),
        ({"score": fg.causal()}, "is not a score"),
        ({"mask": fg.softcap(3.0)}, "is not a mask"),
        ({"score": 3}, "score=3 is not a score"),
        ({"dropout_p": -0.1}, "dropout_p=-0.1 is no probability"),
        ({"layout": "sbhd"}, "layout='sbhd' is unknown"),
        ({"score": lambda s, b, h, q, k: s if q > k else 0}, "test_programs.py"),
    ],
)
def test_misuse_is_named(emulated: Any, inputs: Any, options: Any, words: str) -> None:
    q, k, v = (x.detach() for x in inputs())
    with pytest.raises(fg.FlashgenError) as error:
        fg.attention(q, k, v, **options)
    assert words in str(error.value)


def test_looking_up_what_was_traced_before_costs_little() -> None:
    from flashgen.torch.programs import mask_of, program_of, score_of

    slopes, window = torch.rand(4), 7

    def lookup() -> Any:
        mask = mask_of(lambda b, h, q, k: (q - k < window) & (IDS[b, q] == IDS[b, k]))
        return program_of(mask, score_of(lambda s, b, h, q, k: s + slopes[h] * (k - q)))

    lookup()
    times = []
    for _ in range(50):
        start = time.perf_counter()
        lookup()
        times.append(time.perf_counter() - start)
    assert min(times) < 100e-6


def test_a_score_without_tensors_costs_hardly_more_than_none(emulated: Any, inputs: Any) -> None:
    """In calls of Python functions on the way to the kernel, since times differ from machine to machine."""
    arguments, mask, capped = [x.detach() for x in inputs()], fg.causal(), fg.softcap(20.0)

    def functions_called(score: Any) -> int:
        fg.attention(*arguments, mask=mask, score=score)
        count = [0]
        sys.setprofile(lambda frame, event, _: count.__setitem__(0, count[0] + (event == "call")))
        try:
            fg.attention(*arguments, mask=mask, score=score)
        finally:
            sys.setprofile(None)
        return count[0]

    assert functions_called(capped) <= functions_called(None) + 8


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
    from flashgen.torch.programs import program_of, score_of

    slopes, table, logits = (x.requires_grad_() for x in floats())
    score = score_of(lambda s, b, h, q, k: s + fg.tanh(slopes[h] * (k - q)) + table[h, k]) >> fg.sink(logits)
    program, captured = program_of(fg.full(), score)
    q, k, v = inputs()
    wanted = (q, v, slopes, logits)
    out = torch.ops.flashgen.program_forward(q, k, v, list(captured), program.text)[0]
    through = torch.autograd.grad(out.square().sum(), wanted)
    direct = torch.autograd.grad(fg.attention(q, k, v, score=score).square().sum(), wanted)
    assert same(through, direct)
    compiled = torch.compile(lambda q, k, v: fg.attention(q, k, v, score=score), fullgraph=True, backend="aot_eager")
    assert same(torch.autograd.grad(compiled(q, k, v).square().sum(), wanted), direct)
    torch.library.opcheck(torch.ops.flashgen.program_forward.default, (q, k, v, list(captured), program.text))


# What torch's program transformations see.


def call(q: Any, k: Any, v: Any) -> Any:
    return fg.attention(q, k, v, mask=MASK, score=SCORE)


MASK = fg.causal() & fg.document(IDS)
SCORE = fg.softcap(2.0) >> fg.alibi(torch.tensor([0.5, 0.25, 0.1, 0.0]))


def forward_and_backward(call: Any, q: Any, k: Any, v: Any) -> tuple[Any, ...]:
    out = call(q, k, v)
    return (out.detach(), *torch.autograd.grad(out.square().sum(), (q, k, v)))


def same(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_in_one_graph(emulated: Any, inputs: Any, dynamic: bool) -> None:
    q, k, v = inputs(len_q=12)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    assert same(forward_and_backward(compiled, q, k, v), forward_and_backward(call, q, k, v))


def test_a_compiled_function_follows_its_mask(emulated: Any, inputs: Any) -> None:
    q, k, v = (x.detach() for x in inputs(len_q=12))
    compiled = torch.compile(lambda q, k, v, m: fg.attention(q, k, v, mask=m), fullgraph=True, backend="aot_eager")
    other = IDS.flip(1).contiguous()
    for mask in (fg.document(IDS), fg.document(other), fg.prefix_lm(3), fg.prefix_lm(7)):
        assert torch.equal(compiled(q, k, v, mask), fg.attention(q, k, v, mask=mask))
    changed = fg.document(IDS.clone())
    compiled(q, k, v, changed)
    changed.rest.tensors["ids"].copy_(other)  # in place: the tensor is an input of the graph, not a constant
    assert torch.equal(compiled(q, k, v, changed), fg.attention(q, k, v, mask=fg.document(other)))


def test_new_tensors_for_the_same_code_are_not_compiled_again(emulated: Any, inputs: Any) -> None:
    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    q, k, v = (x.detach() for x in inputs(len_q=12))
    compiled = torch.compile(
        lambda q, k, v, m, s: fg.attention(q, k, v, mask=m, score=s), fullgraph=True, backend=backend
    )
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(0, 3, (2, 12), dtype=torch.int32, generator=generator)
        mask, score = (
            fg.causal() & fg.document(ids),
            fg.alibi(torch.rand(4, generator=generator)) >> fg.sink(torch.rand(4)),
        )
        assert torch.equal(compiled(q, k, v, mask, score), fg.attention(q, k, v, mask=mask, score=score))
    assert len(graphs) == 1
    other = fg.causal() & fg.document(torch.zeros(2, 12, dtype=torch.int64))
    assert torch.equal(compiled(q, k, v, other, score), fg.attention(q, k, v, mask=other, score=score))
    assert len(graphs) == 2


def test_a_band_may_be_made_inside_of_a_compiled_function(emulated: Any, inputs: Any) -> None:
    q, k, v = (x.detach() for x in inputs(len_q=12))

    def attend(q: Any, k: Any, v: Any) -> Any:
        return fg.attention(q, k, v, mask=fg.causal(), score=SCORE)

    assert torch.equal(torch.compile(attend, fullgraph=True, backend="aot_eager")(q, k, v), attend(q, k, v))


def test_one_tensor_in_mask_score_and_sink_compiles(emulated: Any, inputs: Any) -> None:
    q, k, v = (x.detach() for x in inputs(len_q=12))
    weights = torch.rand(12)
    mask = fg.Mask.of(lambda b, h, q, k: weights[k] > 0.2)
    score = fg.Score.of(lambda s, b, h, q, k: s + weights[q]) >> fg.sink(weights)
    attend = torch.compile(
        lambda q, k, v: fg.attention(q, k, v, mask=mask, score=score), fullgraph=True, backend="eager"
    )
    assert torch.equal(attend(q, k, v), fg.attention(q, k, v, mask=mask, score=score))


def test_a_function_in_a_compiled_one_is_refused_with_a_remedy(emulated: Any, inputs: Any) -> None:
    compiled = torch.compile(
        lambda q, k, v: fg.attention(q, k, v, mask=lambda b, h, q, k: q >= k), fullgraph=True, backend="aot_eager"
    )
    with pytest.raises(Exception, match=r"Mask\.of\(function\)"):
        compiled(*inputs())


def test_operator_and_function_agree_bit_for_bit(emulated: Any, inputs: Any) -> None:
    from flashgen.torch.programs import program_of

    program, captured = program_of(MASK, SCORE)
    q, k, v = inputs(len_q=12)
    through = forward_and_backward(
        lambda q, k, v: torch.ops.flashgen.program_forward(q, k, v, list(captured), program.text)[0], q, k, v
    )
    assert same(through, forward_and_backward(call, q, k, v))


def test_opcheck_finds_nothing(emulated: Any, inputs: Any) -> None:
    from flashgen.torch.programs import program_of

    program, captured = program_of(MASK, SCORE)
    arguments = (*inputs(len_q=12), list(captured), program.text)
    torch.library.opcheck(torch.ops.flashgen.program_forward.default, arguments)


def test_export_keeps_the_operator_and_needs_no_registry(
    emulated: Any, inputs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flashgen.torch import programs

    class Module(torch.nn.Module):  # type: ignore[misc]
        def forward(self, q: Any, k: Any, v: Any) -> Any:
            return call(q, k, v)

    arguments = tuple(x.detach() for x in inputs(len_q=12))
    program = torch.export.export(Module(), arguments)
    assert "flashgen.program_forward" in program.graph_module.code
    monkeypatch.setattr(programs, "_programs", {})
    monkeypatch.setattr(programs, "_specs", {})
    assert torch.equal(program.module()(*arguments), call(*arguments))
