"""Compiles what the benchmark of masks and scores will call, in many processes at once, before anything is timed.

They fill torch's caches and flashgen's, which the benchmark then finds; all of them have ended by then.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from importlib import import_module

import mask_cases
import torch
import torch._functorch.config
import torch._inductor.config
from mask_rows import Cell

#: What is compiled by itself: FlexAttention's forward pass alone, its two passes for training, flashgen's kernels.
PARTS = ("flex forward", "flex training", "flashgen")


def compile_ahead(cells: Sequence[Cell], workers: int) -> Iterator[str]:
    """Compiles for these cells; yields what went wrong, if anything did."""
    jobs = [(part, cell) for part in PARTS for cell in (_distinct(cells) if part == "flashgen" else cells)]
    if not jobs:
        return
    spawn = multiprocessing.get_context("spawn")
    # torch comes first, as in the process that asks: keys of its cache name the earliest module that has its constants.
    with ProcessPoolExecutor(min(workers, len(jobs)), spawn, import_module, ("torch",)) as pool:
        running: dict[Future[float], str] = {pool.submit(compile_one, *job): f"{job[0]} of {job[1]}" for job in jobs}
        for done in as_completed(running):
            if (error := done.exception()) is not None:
                yield f"compiling {running[done]} ahead failed: {type(error).__name__}: {str(error)[:200]}"


def _distinct(cells: Sequence[Cell]) -> list[Cell]:
    """One cell for each of flashgen's kernels, which are the same for all lengths."""
    return list({(cell.name, cell.head_dim): cell for cell in reversed(cells)}.values())


def compile_one(part: str, cell: Cell) -> float:
    """Compiles one part for one cell, and says how many seconds it took."""
    start = time.perf_counter()
    # There is a process for each core already.
    torch._inductor.config.compile_threads = 1
    # The benchmark repeats a backward pass, for which its buffers must stay; what is cached differs in that.
    torch._functorch.config.donated_buffer = False
    torch.set_num_threads(1)
    torch._dynamo.reset()
    variant = mask_cases.VARIANTS[cell.name](cell)
    if part == "flashgen":
        mask_cases.kernel(cell, variant)
    else:
        attention = mask_cases.flex(cell, variant)
        q, k, v, do = map(mask_cases.heads_first, mask_cases.tensors(cell))
        if part == "flex forward":
            attention(q, k, v)
        else:
            inputs = [x.requires_grad_() for x in (q, k, v)]
            torch.autograd.grad(attention(*inputs), inputs, do)
        del attention, q, k, v, do
    del variant
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    return time.perf_counter() - start
