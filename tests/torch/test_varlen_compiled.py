"""Packed sequences in compiled functions: one graph for all lengths, known or not."""

from __future__ import annotations

from typing import Any

import pytest

import flashgen as fg

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch
pytest.importorskip("flashgen.torch")

from tests.torch.packed import LENGTHS, close, forward_and_backward, sequences  # noqa: E402


def test_compiled_once_for_all_lengths(emulated: Any, rows: Any) -> None:
    def call(q: Any, k: Any, v: Any, of_q: Any, of_k: Any, longest_q: int, longest_k: int) -> Any:
        of = fg.Sequences(of_q, of_k, longest_q, longest_k)
        out, lse = fg.attention(q, k, v, mask=fg.causal(), sequences=of, return_lse=True)
        capped = fg.flash_attn_varlen_func(q, k, v, of_q, of_k, longest_q, longest_k, causal=True, softcap=2.0)
        return out + capped, lse

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=True)

    def arguments(lengths: Any) -> Any:
        of = sequences(lengths)
        return of.cu_seqlens_q, of.cu_seqlens_k, of.max_seqlen_q, of.max_seqlen_k

    where = arguments(LENGTHS)
    forward_and_backward(lambda *x: compiled(*x, *where), *rows())
    with torch.compiler.set_stance("fail_on_recompile"):
        for lengths in (((4, 6), (9, 12)), ((2, 3), (3, 4), (5, 13), (0, 2), (11, 9))):
            tensors, where = rows(*(sum(n) for n in zip(*lengths, strict=True))), arguments(lengths)
            found = forward_and_backward(lambda *x, where=where: compiled(*x, *where), *tensors)
            assert close(found, forward_and_backward(lambda *x, where=where: call(*x, *where), *tensors))


@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_a_compiled_function_follows_its_window(emulated: Any, rows: Any, softcap: float) -> None:
    """A kernel's limits are no sizes to leave open."""
    of, tensors = sequences(), tuple(x.detach() for x in rows())

    def call(q: Any, k: Any, v: Any, window: int) -> Any:
        options = {"window_size": (window, 0), "softcap": softcap}
        return fg.flash_attn_varlen_func(q, k, v, of.cu_seqlens_q, of.cu_seqlens_k, 9, 8, **options)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=True)
    for window in (2, 4):
        assert torch.equal(compiled(*tensors, window), call(*tensors, window))


def test_lengths_may_be_unknown_until_the_graph_runs(emulated: Any, rows: Any) -> None:
    """As where padding is taken out within the compiled function."""

    def call(q: Any, k: Any, v: Any, of_q: Any, of_k: Any) -> Any:
        longest_q, longest_k = of_q.diff().max().item(), of_k.diff().max().item()
        out = fg.flash_attn_varlen_func(q, k, v, of_q, of_k, longest_q, longest_k, causal=True)
        return out, out.float().square().sum(-1)

    of, tensors = sequences(), rows()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    where = of.cu_seqlens_q, of.cu_seqlens_k
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        found = forward_and_backward(lambda *x: compiled(*x, *where), *tensors)
    assert close(found, forward_and_backward(lambda *x: call(*x, *where), *tensors))
