"""Which calls a TMA kernel accepts, apart from alignment."""

from __future__ import annotations

from flashgen.plan.model.plans import KernelPlan, Problem

#: Kernels count tiles in 32 bits.
MOST_TILES = 2**31 - 1
#: The smallest scale that a kernel may divide a log-sum-exp by without overflow.
SMALLEST_DIVISOR = 1e-30


def takes_call(kernel: KernelPlan, problem: Problem, scale: float) -> bool:
    """Whether a TMA kernel accepts a call of these sizes and this scale."""
    if kernel.divides_by_scale and abs(scale) < SMALLEST_DIVISOR:
        return False
    # Without keys the backward kernels have no tiles to launch for, and nothing would write dQ, which is 0.
    if kernel.pass_ == "backward" and not problem.len_kv:
        return False
    grid = kernel.grid(problem)
    return not all(grid) or max(grid) <= MOST_TILES
