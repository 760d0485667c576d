"""Which calls a TMA kernel accepts, apart from alignment."""

from __future__ import annotations

import math

from flashgen.plan.model.plans import KernelPlan, Problem, Role

#: Kernels count tiles in 32 bits.
MOST_TILES = 2**31 - 1
#: The smallest scale that a kernel may divide a log-sum-exp by without overflow.
SMALLEST_DIVISOR = 1e-30


#: The launches that take the place of a cooperative one.
PHASES: tuple[Role, ...] = ("grid_maxima", "grid_products", "grid_merge")


def runs_at_once(kernel: KernelPlan, problem: Problem, most_blocks: int) -> bool:
    """Whether all blocks of a cooperative kernel run at the same time, of which the GPU holds ``most_blocks``."""
    return math.prod(kernel.grid(problem)) <= most_blocks


def takes_call(kernel: KernelPlan, problem: Problem, scale: float) -> bool:
    """Whether a TMA kernel accepts a call of these sizes and this scale."""
    if kernel.divides_by_scale and abs(scale) < SMALLEST_DIVISOR:
        return False
    # Without keys the backward kernels have no tiles to launch for, and nothing would write dQ, which is 0.
    if kernel.pass_ == "backward" and not problem.len_kv:
        return False
    grid = kernel.grid(problem)
    return not all(grid) or max(grid) <= MOST_TILES
