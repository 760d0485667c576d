"""Tensors that stand for larger ones: masks of bools, and keys and values that all sequences share."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import flashgen as fg
from flashgen.launch.executor import Executor

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from tests.torch.programs import close, expected  # noqa: E402
from tests.torch.results import forward_and_backward, same  # noqa: E402

SHAPES = [(9, 12), (1, 12), (12,), (4, 9, 12), (4, 1, 12), (2, 1, 9, 12), (1, 4, 9, 1), (2, 4, 1, 12), (1, 1, 9, 12)]


def bools(shape: tuple[int, ...]) -> Any:
    return torch.rand(shape, generator=torch.Generator().manual_seed(sum(shape))) > 0.3


@pytest.mark.parametrize("shape", SHAPES)
def test_a_tensor_of_bools_is_a_mask_that_broadcasts(emulated: Any, inputs: Any, shape: tuple[int, ...]) -> None:
    q, k, v = inputs()
    mask = bools(shape)
    out = fg.attention(q, k, v, mask=mask)
    exact = expected(q, k, v, lambda b, h, q, k: mask.expand(2, 4, 9, 12))
    assert close(out, exact)
    do = torch.randn_like(out)
    gradients = torch.autograd.grad(out, (q, k, v), do), torch.autograd.grad(exact, (q, k, v), do.double())
    assert all(close(*pair) for pair in zip(*gradients, strict=True))
    torch._dynamo.reset()
    compiled = torch.compile(lambda q, k, v, m: fg.attention(q, k, v, mask=m), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q, k, v, mask), out)


def test_a_tensor_of_bools_goes_with_scores_and_other_layouts(emulated: Any, inputs: Any) -> None:
    q, k, v = (x.detach() for x in inputs())
    mask = bools((9, 12))
    plain = fg.attention(q, k, v, mask=lambda b, h, q, k: mask[q, k], score=fg.softcap(2.0))
    first = (x.transpose(1, 2) for x in (q, k, v))
    swapped = fg.attention(*first, mask=mask, score=fg.softcap(2.0), layout="bhsd")
    assert torch.equal(swapped.transpose(1, 2), plain)
    assert torch.equal(fg.attention(q, k, v, mask=fg.Mask.of(mask), score=fg.softcap(2.0)), plain)


def test_a_tensor_of_bools_has_a_part_for_each_packed_sequence(emulated: Any, rows: Any) -> None:
    q, k, v = (x.detach() for x in rows())
    starts_q, starts_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 5, 14], [0, 8, 18]))
    mask = bools((2, 1, 9, 10))
    out = fg.attention(q, k, v, mask=mask, sequences=fg.Sequences(starts_q, starts_k, 9, 10))
    for b, (rows_q, rows_k) in enumerate(((slice(0, 5), slice(0, 8)), (slice(5, 14), slice(8, 18)))):
        own = mask[b : b + 1, :, : rows_q.stop - rows_q.start, : rows_k.stop - rows_k.start]
        alone = fg.attention(q[None, rows_q], k[None, rows_k], v[None, rows_k], mask=own)
        assert close(out[rows_q], alone[0])


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (torch.ones(9, 12), r"mask is a tensor of float32 and shape \(9, 12\); .* score=flashgen\.bias\(m\)"),
        (torch.ones(9, 11, dtype=torch.bool), r"mask has shape \(9, 11\).*\(2, 4, 9, 12\).*lambda b, h, q, k: m\["),
        (torch.ones(3, 1, 1, 1, dtype=torch.bool), r"mask has shape \(3, 1, 1, 1\)"),
        (torch.ones(1, 2, 1, 9, 12, dtype=torch.bool), "leading dimensions may be missing"),
        (torch.tensor(True), r"and shape \(\)"),
        (np.ones((9, 12), bool), r"mask is a numpy\.ndarray; make it a torch tensor"),
        ([True] * 10_000, r"mask=\[True, .*\.\.\.\] is not a mask"),
    ],
)
def test_what_is_no_mask_is_refused_without_printing_it(emulated: Any, inputs: Any, mask: Any, words: str) -> None:
    with pytest.raises(fg.ArgumentError, match=f"(?s){words}") as error:
        fg.attention(*inputs(), mask=mask)
    assert len(str(error.value)) < 500
    assert "tensor(" not in str(error.value)


def test_a_tensor_for_a_score_is_refused_without_printing_it(emulated: Any, inputs: Any) -> None:
    with pytest.raises(fg.ArgumentError, match=r"^score is a torch\.Tensor; pass flashgen\.bias\(tensor\)"):
        fg.attention(*inputs(), score=torch.ones(9, 12))


@pytest.mark.parametrize("which", ["kv", "k", "v"])
@pytest.mark.parametrize("options", [{}, {"mask": fg.causal()}, {"score": fg.softcap(2.0)}])
def test_all_sequences_may_share_keys_and_values(emulated: Any, inputs: Any, which: str, options: Any) -> None:
    q, k, v = inputs(batch=3)
    k, v = (x[:1].detach().requires_grad_() if name in which else x for name, x in (("k", k), ("v", v)))
    found = forward_and_backward(lambda q, k, v: fg.attention(q, k, v, **options), q, k, v)
    repeated = forward_and_backward(
        lambda q, k, v: fg.attention(q, *(x.repeat(3 // len(x), 1, 1, 1) for x in (k, v)), **options), q, k, v
    )
    assert same(found, repeated)
    assert [x.shape for x in found[1:]] == [x.shape for x in (q, k, v)]


def test_shared_keys_compile_and_capture(emulated: Any, inputs: Any) -> None:
    q, k, v = inputs(batch=3)
    k, v = (x[:1].detach().requires_grad_() for x in (k, v))
    bias = torch.rand(3, 12)

    def call(q: Any, k: Any, v: Any) -> Any:
        return fg.attention(q, k, v, score=lambda s, b, h, q, k: s + bias[b, k]) + fg.attention(q, k, v)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert same(forward_and_backward(compiled, q, k, v), forward_and_backward(call, q, k, v))


def test_shared_keys_are_not_copied(emulated: Any, inputs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (x.detach() for x in inputs(batch=3))
    seen: list[Any] = []
    forward = Executor.find_forward

    def spied(self: Any, q: Any, k: Any, v: Any, *rest: Any, **options: Any) -> Any:
        seen.append((k.data_ptr(), k.stride()[0], v.data_ptr(), v.stride()[0]))
        return forward(self, q, k, v, *rest, **options)

    monkeypatch.setattr(Executor, "find_forward", spied)
    fg.attention(q, k[:1], v[:1])
    assert seen == [(k.data_ptr(), 0, v.data_ptr(), 0)]


def test_other_batches_do_not_fit(emulated: Any, inputs: Any) -> None:
    q, k, v = (x.detach() for x in inputs(batch=3))
    with pytest.raises(fg.ArgumentError, match="k has batch 2 and q has batch 3"):
        fg.attention(q, k[:2], v[:2])
