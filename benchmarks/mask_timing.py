"""Times one cell of the benchmark of masks and scores, after checking that both libraries mean the same."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import mask_cases
import torch
import torch._functorch.config
import torch._inductor.config
from mask_cases import heads_first
from mask_rows import DIRECTIONS, Cell, Row
from timing import milliseconds
from torch._dynamo.utils import counters

#: Relative error (Frobenius norm) above which two implementations disagree.
TOLERANCE = 2e-2

#: For each pass, what either library is called by.
Calls = dict[str, dict[str, Callable[[], Any]]]


def measure(cell: Cell, rounds: int, at_least: float) -> Row:
    """Times both libraries in turn, round after round, each for ``at_least`` milliseconds or one call."""
    row = Row(cell)
    torch._dynamo.reset()
    counters.clear()
    # A pool of processes that compile would run beside what is timed.
    torch._inductor.config.compile_threads = 1
    torch._functorch.config.donated_buffer = False
    try:
        timed = calls(cell, row)
        for direction in DIRECTIONS:
            row.times[direction] = in_turn(timed[direction], rounds, at_least)
    except torch.cuda.OutOfMemoryError:
        _note(row, "the GPU's memory does not hold it")
    except Exception as error:
        # One library may not be up to a cell; the others are still worth having.
        _note(row, f"{type(error).__name__}: {' '.join(str(error).split())[:160]}")
    row.found = counters["inductor"]["fxgraph_cache_hit"]
    row.missed = counters["inductor"]["fxgraph_cache_miss"]
    return row


def _note(row: Row, text: str) -> None:
    for direction in DIRECTIONS:
        if direction not in row.times:
            row.notes[direction] = text


def in_turn(timed: dict[str, Callable[[], Any]], rounds: int, at_least: float) -> dict[str, float]:
    """Medians over rounds."""
    repeats = {name: max(1, int(at_least / max(1e-3, milliseconds(run, 2)))) for name, run in timed.items()}
    taken: dict[str, list[float]] = {name: [] for name in timed}
    for _ in range(rounds):
        for name, run in timed.items():
            taken[name].append(milliseconds(run, repeats[name]))
    return {name: statistics.median(ms) for name, ms in taken.items()}


def calls(cell: Cell, row: Row) -> Calls:
    """Both passes of both libraries, compiled; notes where they disagree."""
    variant = mask_cases.VARIANTS[cell.name](cell)
    q, k, v, do = mask_cases.tensors(cell)
    kernel = mask_cases.kernel(cell, variant)
    out, lse = kernel(q, k, v)
    grads = kernel.backward(do, q, k, v, out, lse)

    attention = mask_cases.flex(cell, variant)
    plain = [heads_first(x) for x in (q, k, v)]
    with_gradients = [heads_first(x).requires_grad_() for x in (q, k, v)]
    flex_out, flex_do = attention(*with_gradients), heads_first(do)
    attention(*plain)

    def flex_backward() -> Any:
        return torch.autograd.grad(flex_out, with_gradients, flex_do, retain_graph=True)

    results = {"forward": ((out,), (flex_out,)), "backward": (grads, flex_backward())}
    for direction, (mine, theirs) in results.items():
        error = max(relative_error(x, y.detach().transpose(1, 2)) for x, y in zip(mine, theirs, strict=True))
        if not error < TOLERANCE:
            row.notes[direction] = f"the two disagree: relative error {error:.3g}"
    return {
        "forward": {"flashgen": lambda: kernel(q, k, v), "flex": lambda: attention(*plain)},
        "backward": {"flashgen": lambda: kernel.backward(do, q, k, v, out, lse), "flex": flex_backward},
    }


def relative_error(mine: torch.Tensor, theirs: torch.Tensor) -> float:
    """By the Frobenius norm."""
    mine, theirs = mine.float(), theirs.float()
    return ((mine - theirs).norm() / theirs.norm()).item()
