"""Masks and scores that torch.compile meets in one graph: what they are, where they come from, what they capture."""

from __future__ import annotations

import functools
import subprocess
import sys
from typing import Any

import pytest

import flashgen as fg

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch
pytest.importorskip("flashgen.torch")

from tests.torch.results import same  # noqa: E402

#: What functions of this module find as globals; each test puts its own in place.
tensor_0: Any = None
number: Any = 3


def global_mask(b: Any, h: Any, q: Any, k: Any) -> Any:
    return ((q - k) % 3 != 0) | (q == k)


def global_mask_of_tensor(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (tensor_0[q, k] > 0) | (q == k)


def global_score(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return fg.tanh(s) * 2.0


def global_score_of_tensor(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return s + tensor_0[q, k]


def compiled(function: Any, **options: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager", **options)


def closure(what: str, captures: str, tensor_0: Any) -> Any:
    """The same functions, with the tensor as a closure variable."""
    return {
        ("mask", "nothing"): lambda b, h, q, k: ((q - k) % 3 != 0) | (q == k),
        ("mask", "tensor"): lambda b, h, q, k: (tensor_0[q, k] > 0) | (q == k),
        ("score", "nothing"): lambda s, b, h, q, k: fg.tanh(s) * 2.0,
        ("score", "tensor"): lambda s, b, h, q, k: s + tensor_0[q, k],
    }[what, captures]


class Layer(torch.nn.Module):  # type: ignore[misc]
    def __init__(self, what: str, function: Any) -> None:
        super().__init__()
        self.what, self.function = what, function

    def forward(self, q: Any, k: Any, v: Any) -> Any:
        return fg.attention(q, k, v, **{self.what: self.function})


def caller(what: str, where: str, captures: str, tensor_0: Any) -> Any:
    """A function of q, k and v that finds its mask or score in a place."""
    function = closure(what, captures, tensor_0)
    if where == "object":
        function = fg.Mask.of(function) if what == "mask" else fg.Score.of(function)
    if where == "attribute":
        return Layer(what, function)
    if where == "global":
        return {
            ("mask", "nothing"): lambda q, k, v: fg.attention(q, k, v, mask=global_mask),
            ("mask", "tensor"): lambda q, k, v: fg.attention(q, k, v, mask=global_mask_of_tensor),
            ("score", "nothing"): lambda q, k, v: fg.attention(q, k, v, score=global_score),
            ("score", "tensor"): lambda q, k, v: fg.attention(q, k, v, score=global_score_of_tensor),
        }[what, captures]
    if where == "inside":
        return {
            ("mask", "nothing"): lambda q, k, v: fg.attention(
                q, k, v, mask=lambda b, h, q, k: ((q - k) % 3 != 0) | (q == k)
            ),
            ("mask", "tensor"): lambda q, k, v: fg.attention(
                q, k, v, mask=lambda b, h, q, k: (tensor_0[q, k] > 0) | (q == k)
            ),
            ("score", "nothing"): lambda q, k, v: fg.attention(q, k, v, score=lambda s, b, h, q, k: fg.tanh(s) * 2.0),
            ("score", "tensor"): lambda q, k, v: fg.attention(q, k, v, score=lambda s, b, h, q, k: s + tensor_0[q, k]),
        }[what, captures]
    return lambda q, k, v: fg.attention(q, k, v, **{what: function})


@pytest.mark.parametrize("captures", ["nothing", "tensor", "parameter"])
@pytest.mark.parametrize("where", ["object", "inside", "attribute", "variable", "global"])
@pytest.mark.parametrize("what", ["mask", "score"])
def test_one_graph_computes_what_no_graph_does(
    emulated: Any, inputs: Any, what: str, where: str, captures: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = torch.randn(9, 12, generator=torch.Generator().manual_seed(1)).requires_grad_(captures == "parameter")
    kind = "nothing" if captures == "nothing" else "tensor"
    monkeypatch.setitem(globals(), "tensor_0", table)
    call, arrays = caller(what, where, kind, table), inputs()
    wanted = (*arrays, table) if captures == "parameter" else arrays
    results = []
    for function in (call, compiled(call)):
        out = function(*arrays)
        results.append((out.detach(), *torch.autograd.grad(out.square().sum(), wanted)))
    assert same(*results)


def _same_without_gradients(call: Any, arrays: Any, **options: Any) -> bool:
    arrays = tuple(x.detach() for x in arrays)
    return bool(torch.equal(compiled(call, **options)(*arrays), call(*arrays)))


@pytest.mark.parametrize(
    "function",
    [
        lambda b, h, q, k: ~((q - k) % 3 == 0),
        lambda b, h, q, k: k <= q + (fg.k_len - fg.q_len),
        lambda b, h, q, k: ~(abs(q - k) > number) & (b >= 0) | (h == 1),
        functools.partial(lambda width, b, h, q, k: q - k < width, 4),
        lambda b, h, q, k: (q >= k).int() * 2 + (h == 1).int() > q.int() % 2,
        lambda b, h, q, k: (q.float() / 2 >= k) | (q.min(k).clamp(0, 5).pow(2) < 9),
    ],
)
def test_a_mask_may_use_the_whole_language(emulated: Any, inputs: Any, function: Any) -> None:
    assert _same_without_gradients(lambda q, k, v: fg.attention(q, k, v, mask=function), inputs())


class Slopes:
    def __init__(self) -> None:
        self.values, self.factor, self.shift = torch.rand(4), torch.tensor(1.5), torch.tensor(0.5)

    def __call__(self, s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return self.factor * (s - self.values[h] * abs(q - k)) - self.shift

    def method(self, s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return fg.where(q > k, s**2, fg.minimum(s, 1) * self.factor) + self.values[h]


@pytest.mark.parametrize("function", [Slopes(), Slopes().method])
def test_a_score_may_be_an_object_with_tensors(emulated: Any, inputs: Any, function: Any) -> None:
    assert _same_without_gradients(lambda q, k, v: fg.attention(q, k, v, score=function), inputs())


@pytest.mark.parametrize(
    "function",
    [
        lambda s, t: (t - s) / (s + t),
        lambda s, t: (s - t) * (t + s) + t / s,
        lambda s, t: fg.where(t == s, t, s / t) + t * s,
        lambda s, t: fg.maximum(s, t) - fg.where(s != t, s, t),
    ],
)
def test_a_tensor_without_dimensions_is_a_number(emulated: Any, inputs: Any, function: Any) -> None:
    number = torch.tensor(9.5)
    assert _same_without_gradients(
        lambda q, k, v: fg.attention(q, k, v, score=lambda s, b, h, q, k: function(s, number)), inputs()
    )


@pytest.mark.parametrize("compare", [lambda s, t: s < t, lambda s, t: t >= s])
def test_an_order_with_a_tensor_without_dimensions_is_right_or_refused(
    emulated: Any, inputs: Any, compare: Any
) -> None:
    number, arrays = torch.tensor(0.5), tuple(x.detach() for x in inputs())

    def call(q: Any, k: Any, v: Any) -> Any:
        return fg.attention(q, k, v, score=lambda s, b, h, q, k: fg.where(compare(s, number), s, 1.0))

    found, message = None, ""
    try:
        found = compiled(call)(*arrays)
    except Exception as error:
        message = str(error)
    assert "subtract first" in message if found is None else torch.equal(found, call(*arrays))


def test_tensors_that_the_graph_computes_have_gradients(emulated: Any, inputs: Any) -> None:
    weight = torch.randn(4, 12, generator=torch.Generator().manual_seed(2)).requires_grad_()

    def call(q: Any, k: Any, v: Any) -> Any:
        bias = weight * 2
        return fg.attention(q, k, v, mask=fg.causal(), score=lambda s, b, h, q, k: s + bias[h][k] + bias[h, k])

    def reference(q: Any, k: Any, v: Any) -> Any:
        bias = weight * 2
        return fg.attention(q, k, v, mask=fg.causal(), score=lambda s, b, h, q, k: s + bias[h, k] + bias[h, k])

    arrays = inputs()
    out, exact = compiled(call)(*arrays), reference(*arrays)
    assert torch.equal(out, exact)
    wanted = (*arrays, weight)
    assert same(torch.autograd.grad(out.sum(), wanted), torch.autograd.grad(exact.sum(), wanted))


def test_a_mask_and_a_score_share_a_tensor(emulated: Any, inputs: Any) -> None:
    weights = torch.rand(12)
    call = lambda q, k, v: fg.attention(  # noqa: E731
        *(q, k, v),
        mask=lambda b, h, q, k: weights[k] > 0.2,
        score=lambda s, b, h, q, k: s + weights[k],
    )
    assert _same_without_gradients(call, inputs())


def test_an_object_and_a_function_go_together(emulated: Any, inputs: Any) -> None:
    ids, slopes = torch.tensor([[0] * 5 + [1] * 7] * 2), torch.rand(4)
    mask, score = fg.causal() & fg.document(ids), fg.alibi(slopes)
    arrays = inputs(len_q=12)
    assert _same_without_gradients(
        lambda q, k, v: fg.attention(q, k, v, mask=mask, score=lambda s, b, h, q, k: s + slopes[h]), arrays
    )
    assert _same_without_gradients(
        lambda q, k, v: fg.attention(q, k, v, mask=lambda b, h, q, k: ids[b, q] == ids[b, k], score=score), arrays
    )


def test_a_mask_and_a_score_of_numbers_may_be_made_inside(emulated: Any, inputs: Any) -> None:
    arrays = inputs(len_q=12)
    for mask in (lambda: fg.chunked(4), lambda: fg.dilated(2), lambda: fg.global_tokens(2)):
        call = lambda q, k, v, m=mask: fg.attention(q, k, v, mask=m(), score=fg.softcap(2.0))  # noqa: E731
        assert _same_without_gradients(call, arrays)


WINDOW, CAP = fg.window(9, 0), fg.softcap(2.0)
DOCUMENTS = fg.document(torch.tensor([[0] * 5 + [1] * 7] * 2)) if torch else fg.full()
SLOPES = fg.alibi(torch.linspace(0.1, 0.4, 4)) if torch else fg.softcap(1.0)

COMBINED = {
    "two bands": lambda: {"mask": fg.causal() & fg.window(9, 0)},
    "an outer band": lambda: {"mask": fg.causal() & WINDOW},
    "an outer band first": lambda: {"mask": WINDOW & fg.causal()},
    "or": lambda: {"mask": fg.causal() | fg.global_tokens(3)},
    "not": lambda: {"mask": ~WINDOW},
    "not twice": lambda: {"mask": ~~WINDOW},
    "tensors": lambda: {"mask": fg.causal() & ~DOCUMENTS | fg.dilated(2) & (WINDOW | DOCUMENTS)},
    "scores": lambda: {"score": CAP >> fg.softcap(2.0)},
    "scores with tensors": lambda: {"mask": DOCUMENTS & WINDOW, "score": CAP >> SLOPES >> fg.softcap(3.0)},
    "a function beside": lambda: {"mask": ~DOCUMENTS, "score": lambda s, b, h, q, k: s * 2.0},
}


@pytest.mark.parametrize("combined", COMBINED.values(), ids=COMBINED)
def test_masks_and_scores_are_combined_inside(emulated: Any, inputs: Any, combined: Any) -> None:
    assert _same_without_gradients(lambda q, k, v: fg.attention(q, k, v, **combined()), inputs(len_q=12))


def test_bands_that_are_combined_inside_stay_bands(emulated: Any, inputs: Any) -> None:
    compiled(lambda q, k, v: fg.attention(q, k, v, mask=fg.causal() & WINDOW))(*inputs())
    assert [spec.mask.rest for spec in emulated] == [None]


def test_another_outer_mask_is_combined_anew(emulated: Any, inputs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = tuple(x.detach() for x in inputs(len_q=12))

    def call(q: Any, k: Any, v: Any) -> Any:
        return fg.attention(q, k, v, mask=WINDOW & DOCUMENTS)

    following = compiled(call)
    for mask, ids in ((WINDOW, [0] * 12), (fg.window(2, 1), [0] * 12), (fg.window(2, 1), [0] * 3 + [4] * 9)):
        monkeypatch.setitem(globals(), "WINDOW", mask)
        monkeypatch.setitem(globals(), "DOCUMENTS", fg.document(torch.tensor([ids] * 2)))
        assert torch.equal(following(*arrays), call(*arrays))


def test_combined_masks_and_scores_survive_a_graph_break(emulated: Any, inputs: Any) -> None:
    def call(q: Any, k: Any, v: Any) -> Any:
        mask, score = ~DOCUMENTS & WINDOW | WINDOW, CAP >> SLOPES
        torch._dynamo.graph_break()
        return fg.attention(q, k, v, mask=mask, score=score)

    torch._dynamo.reset()
    arrays = tuple(x.detach() for x in inputs(len_q=12))
    assert torch.equal(torch.compile(call, backend="aot_eager")(*arrays), call(*arrays))


@pytest.mark.parametrize("combine", [lambda: fg.causal() & 3, lambda: fg.causal() | fg.softcap(1.0)])
def test_what_is_no_mask_is_not_combined(emulated: Any, inputs: Any, combine: Any) -> None:
    with pytest.raises(Exception, match=r"combines masks, and a .* is none"):
        compiled(lambda q, k, v: fg.attention(q, k, v, mask=combine()))(*inputs())


def test_masks_are_combined_whichever_is_imported_first() -> None:
    """The compiler's handlers are added after its import, which flashgen leaves to others."""
    code = """
import sys
import {first}
import torch, flashgen as fg, flashgen.torch
assert ("torch._dynamo" in sys.modules) == ("{first}" == "torch._dynamo")
x = torch.zeros(1, 4, 1, 8).half()
mask = fg.window(1, 0)
call = lambda x: fg.attention(x, x, x, mask=~mask)
with fg.torch.emulate_cpu():
    assert torch.equal(torch.compile(call, fullgraph=True, backend="aot_eager")(x), call(x))
"""
    for first in ("flashgen.torch", "torch._dynamo"):
        done = subprocess.run([sys.executable, "-c", code.format(first=first)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


class Numbers:
    width, cap = 3, 1.5


@pytest.mark.parametrize("dynamic", [None, True])
def test_numbers_that_change_are_followed(emulated: Any, inputs: Any, dynamic: bool | None) -> None:
    """Also those that the compiler leaves open: sizes, and what it saw change."""
    numbers = Numbers()

    def call(q: Any, k: Any, v: Any) -> Any:
        half = q.shape[1] // 2
        return fg.attention(
            *(q, k, v),
            mask=lambda b, h, q, k: (k == half) | (half > k) | (q - k < numbers.width) & (numbers.width != k),
            score=lambda s, b, h, q, k: fg.maximum(s * numbers.cap, numbers.cap),
        )

    following = compiled(call, dynamic=dynamic)
    for length, width, cap in ((9, 3, 1.5), (10, 3, 1.5), (10, 4, 1.5), (10, 4, 2.5), (10, 5, 0.5)):
        numbers.width, numbers.cap = width, cap
        arrays = tuple(x.detach() for x in inputs(len_q=length))
        assert torch.equal(following(*arrays), call(*arrays))


def test_other_tensors_of_a_function_are_not_compiled_again(emulated: Any, inputs: Any) -> None:
    arrays = tuple(x.detach() for x in inputs())
    call = lambda q, k, v, bias: fg.attention(q, k, v, score=lambda s, b, h, q, k: s + bias[q, k])  # noqa: E731
    following = compiled(call)
    following(*arrays, torch.rand(9, 12))
    with torch.compiler.set_stance("fail_on_recompile"):
        other = torch.rand(9, 12)
        assert torch.equal(following(*arrays, other), call(*arrays, other))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mask": lambda b, h, q, k: q and k}, r"write fg\.where\(condition, a, b\) for `if`"),
        ({"mask": lambda b, h, q, k: q - k}, "the mask function returned a number"),
        ({"mask": lambda b, h, q, k: None}, "does it lack a return"),
        ({"score": lambda s, b, h, q, k: torch.tanh(s)}, r"torch\.tanh\(\) cannot take a traced value"),
        ({"score": lambda s, b, h, q, k: s + "1"}, "a str has no meaning in a mask or a score"),
        ({"score": lambda s, b, h, q, k: s.int()}, "a float does not become a whole number"),
        ({"score": 3}, "score is a int; pass a flashgen Score or a function"),
    ],
)
def test_what_is_not_in_the_language_is_refused_with_a_remedy(
    emulated: Any, inputs: Any, options: Any, words: str
) -> None:
    with pytest.raises(Exception, match=words):
        compiled(lambda q, k, v: fg.attention(q, k, v, **options))(*inputs())


def test_export_takes_a_function(emulated: Any, inputs: Any) -> None:
    bias = torch.rand(9, 12)

    class Module(torch.nn.Module):  # type: ignore[misc]
        def forward(self, q: Any, k: Any, v: Any) -> Any:
            return fg.attention(q, k, v, score=lambda s, b, h, q, k: s + bias[q, k])

    arrays = tuple(x.detach() for x in inputs())
    for strict in (False, True):
        program = torch.export.export(Module(), arrays, strict=strict)
        assert "flashgen.program_forward" in program.graph_module.code
        assert torch.equal(program.module()(*arrays), Module()(*arrays))
