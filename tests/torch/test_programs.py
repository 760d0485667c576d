"""``flashgen.attention`` with masks and scores that are expressions: values, and what calls cost."""

from __future__ import annotations

import sys
import time
from typing import Any

import numpy as np
import pytest

import flashgen as fg

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from tests.torch.programs import IDS, close, expected  # noqa: E402


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
    from flashgen.torch.mask_and_score import mask_of, score_of
    from flashgen.torch.program import written_program

    slopes, window = torch.rand(4), 7

    def lookup() -> Any:
        mask = mask_of(lambda b, h, q, k: (q - k < window) & (IDS[b, q] == IDS[b, k]))
        return written_program(mask, score_of(lambda s, b, h, q, k: s + slopes[h] * (k - q)))

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
