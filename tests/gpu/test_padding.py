"""Rows of packed tensors that belong to no sequence, on a GPU: outputs start as NaN, so what is left out shows."""

from __future__ import annotations

from typing import Any

import pytest

import flashgen as fg

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.gpu, pytest.mark.torch]

STARTS = (37, 137, 137, 400, 1000)
LONGEST, TOTAL = 600, 1333


def tensors(dtype: Any = torch.bfloat16, dim: int = 64) -> list[Any]:
    torch.manual_seed(0)
    shapes = ((TOTAL, 8, dim), (TOTAL, 2, dim), (TOTAL, 2, dim), (TOTAL, 8, dim))
    return [torch.randn(*shape, device="cuda", dtype=dtype) for shape in shapes]


def int32(*numbers: int) -> Any:
    return torch.tensor(numbers, dtype=torch.int32, device="cuda")


def kernel(**options: Any) -> fg.Kernel:
    return fg.build(fg.AttentionSpec(64, mask=fg.causal(), varlen=True, **options))


def outside(starts: tuple[int, ...] = STARTS) -> Any:
    found = torch.ones(TOTAL, dtype=torch.bool, device="cuda")
    found[starts[0] : starts[-1]] = False
    return found


def check(results: tuple[Any, ...], starts: tuple[int, ...] = STARTS) -> None:
    o, lse, *gradients = results
    for x in (o, *gradients):
        assert x.isfinite().all()
        assert not x[outside(starts)].any()
    assert (lse[:, outside(starts)] == -torch.inf).all()
    assert lse[:, ~outside(starts)].isfinite().all()


@pytest.mark.parametrize("deterministic", [False, True])
def test_rows_of_no_sequence_are_zeros(deterministic: bool) -> None:
    run = kernel(deterministic=deterministic)
    q, k, v, do = tensors()
    sequences = fg.Sequences(int32(*STARTS), int32(*STARTS), LONGEST, LONGEST)
    o, lse = run(q, k, v, sequences=sequences)
    check((o, lse, *run.backward(do, q, k, v, o, lse, sequences=sequences)))


@pytest.mark.parametrize(("dtype", "dim"), [(torch.float16, 5), (torch.float32, 40), (torch.bfloat16, 256)])
def test_rows_of_every_width_are_cleared(dtype: Any, dim: int) -> None:
    q, k, v, do = tensors(dtype, dim)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    of = fg.Sequences(int32(*STARTS), int32(*STARTS), LONGEST, LONGEST)
    o, lse = fg.attention(*leaves, mask=fg.causal(), sequences=of, return_lse=True)
    check((o.detach(), lse.detach(), *torch.autograd.grad(o, leaves, do)))


def test_a_graph_clears_what_is_outside_of_the_offsets_that_it_finds() -> None:
    run = kernel()
    q, k, v, do = tensors()
    starts = int32(*STARTS)
    sequences = fg.Sequences(starts, starts, LONGEST, LONGEST)

    def both() -> tuple[Any, ...]:
        o, lse = run(q, k, v, sequences=sequences)
        return (o, lse, *run.backward(do, q, k, v, o, lse, sequences=sequences))

    both()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = both()
    for given in (STARTS, (0, 1, 2, 3, 4), (700, 800, 1300, 1333, 1333)):
        starts.copy_(int32(*given))
        for x in results:
            x.fill_(float("nan"))
        graph.replay()
        check(results, given)


@pytest.mark.parametrize("starts", [(30, 10, 20, 60), (-5, 10, 200, 12), (2**31 - 1, -(2**31), 0, 2**31 - 1)])
def test_offsets_without_meaning_leave_no_row_unwritten(starts: tuple[int, ...]) -> None:
    """Nothing checks values on a device. Sequences have no room here, so that none reads beyond its tensors."""
    run = kernel()
    q, k, v, do = tensors()
    sequences = fg.Sequences(int32(*starts), int32(*starts), 0, 0)
    o, lse = run(q, k, v, sequences=sequences)
    gradients = run.backward(do, q, k, v, o, lse, sequences=sequences)
    torch.cuda.synchronize()
    assert not any(x.any() for x in (o, *gradients))
    assert (lse == -torch.inf).all()


@pytest.mark.parametrize("num_splits", [1, 3])
def test_packed_queries_of_a_cache_leave_no_row_unwritten(num_splits: int) -> None:
    run = fg.build(fg.AttentionSpec(64, mask=fg.causal(), direction="forward", cache="contiguous"))
    q = tensors()[0]
    k, v = torch.randn(2, 4, 2000, 2, 64, device="cuda", dtype=torch.bfloat16)
    lengths = int32(2000, 1999, 700, 1000)
    cache = fg.KVCache(lengths, cu_seqlens_q=int32(*STARTS), max_seqlen_q=LONGEST, num_splits=num_splits)
    check(run(q, k, v, cache=cache))
