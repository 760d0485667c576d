"""Grids that may start before the one before them has ended, on a real GPU: what that one does, they wait for.

On Hopper the forward kernel is such a grid. Its calls here have fewer blocks than there are multiprocessors, so that
the next one does start early.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import pytest

import flashgen as fg

torch = pytest.importorskip("torch")
# Outputs with margins around them would have other kernels run between two calls.
pytestmark = [pytest.mark.gpu, pytest.mark.torch, pytest.mark.usefixtures("plain_outputs")]

SPEC = fg.AttentionSpec(64, dtype="bf16", direction="forward")
#: So high that a result is nearly one row of values, and hangs on every bit of its queries.
SCALE = 1.0
CALLS, PAIRS = 40, 3
#: Clock cycles for which the stream is held, so that all calls of a chain are there when the first one begins.
HELD = 5_000_000


class Problem(NamedTuple):
    """Queries for the first call, and keys and values that take turns, so that no two results in a row are alike."""

    q: Any
    pairs: list[tuple[Any, Any]]


@pytest.fixture(params=[512, 4096])
def problem(request: pytest.FixtureRequest, make: Any) -> Problem:
    q, *others = (make(SPEC, 1, request.param, 2, 64) for _ in range(1 + 2 * PAIRS))
    return Problem(q, list(zip(others[::2], others[1::2], strict=True)))


def chain(kernel: Any, problem: Problem, queries: Any = None, *, waits: bool = False) -> list[Any]:
    """The results of calls, each of which has the last one's result for its queries.

    With ``queries`` a kernel of torch's turns every result around and puts it there.
    """
    q, results = problem.q, []
    for i in range(CALLS):
        o, _ = kernel(q, *problem.pairs[i % PAIRS], scale=SCALE)
        results.append(o)
        if waits:
            torch.cuda.synchronize()
        q = o if queries is None else torch.neg(o, out=queries)
        if waits:
            torch.cuda.synchronize()
    return results


def expected_of(kernel: Any, problem: Problem, queries: Any) -> list[Any]:
    """The results where no two grids ever meet; they stay, so that no memory that others get holds them."""
    results = chain(kernel, problem, queries, waits=True)
    assert not any(torch.equal(one, other) for one, other in pairwise(results))
    assert all(x.isfinite().all() for x in results)
    return results


def fill_free_memory_with_nan(like: Any) -> None:
    """What is allocated next on this stream holds NaN."""
    torch.cuda.empty_cache()
    corrupted = [torch.full_like(like, torch.nan) for _ in range(2 * CALLS)]
    del corrupted


def assert_equal(found: list[Any], expected: list[Any]) -> None:
    wrong = [i for i, (one, other) in enumerate(zip(found, expected, strict=True)) if not torch.equal(one, other)]
    assert not wrong, f"of {len(expected)} results these differ from those of calls that were waited for: {wrong}"


@pytest.fixture(params=["o is the next q", "torch writes q"])
def queries(request: pytest.FixtureRequest, problem: Problem) -> Any:
    return None if request.param == "o is the next q" else torch.empty_like(problem.q)


def test_a_chain_of_calls_on_a_stream(problem: Problem, queries: Any) -> None:
    kernel = fg.build(SPEC)
    expected = expected_of(kernel, problem, queries)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            fill_free_memory_with_nan(problem.q)
            if queries is not None:
                queries.fill_(torch.nan)
            torch.cuda._sleep(HELD)
            found = chain(kernel, problem, queries)
            stream.synchronize()
            assert_equal(found, expected)
            del found


def test_a_chain_of_calls_in_a_graph(problem: Problem, queries: Any) -> None:
    kernel = fg.build(SPEC)
    expected = expected_of(kernel, problem, queries)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = chain(kernel, problem, queries)
    for _ in range(2):
        for x in (*found, *([] if queries is None else [queries])):
            x.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert_equal(found, expected)


def test_replays_of_a_graph_follow_each_other(problem: Problem) -> None:
    kernel, q = fg.build(SPEC), problem.q.clone()
    expected = expected_of(kernel, problem, None)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = chain(kernel, problem._replace(q=q))
        # The next replay begins with queries that this one is to replace at its end.
        q.copy_(found[-1])
    kept = []
    torch.cuda._sleep(HELD)
    for _ in range(2):
        graph.replay()
        kept.append([x.clone() for x in found])
    torch.cuda.synchronize()
    assert_equal(kept[0], expected)
    assert_equal(kept[1], chain(kernel, problem._replace(q=expected[-1]), waits=True))


def test_it_may_follow_copies_and_the_work_of_other_streams_in_a_graph_too(problem: Problem) -> None:
    kernel, pairs = fg.build(SPEC), problem.pairs
    side, late, other = torch.cuda.Stream(), torch.empty_like(problem.q), torch.empty_like(problem.q)

    def run(wait: Callable[[], None]) -> list[Any]:
        late.copy_(problem.q)
        wait()
        first, _ = kernel(late, *pairs[0], scale=SCALE)
        wait()
        # From here two kernels, of two streams, are what the last call depends on.
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.neg(first, out=other)
        second, _ = kernel(first, *pairs[1], scale=SCALE)
        torch.cuda.current_stream().wait_stream(side)
        wait()
        third, _ = kernel(other, second, pairs[2][1], scale=SCALE)
        wait()
        late.zero_()
        wait()
        fourth, _ = kernel(late, *pairs[2], scale=SCALE)
        wait()
        return [first, second, third, fourth]

    expected = run(torch.cuda.synchronize)
    for x in (late, other):
        x.fill_(torch.nan)
    torch.cuda._sleep(HELD)
    assert_equal(run(lambda: None), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run(lambda: None)
    for _ in range(2):
        for x in (*found, late, other):
            x.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert_equal(found, expected)
