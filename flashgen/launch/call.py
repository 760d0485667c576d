"""Prepared calls: everything that shapes, strides and dtypes settle, worked out once per combination."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

from flashgen.errors import ArgumentError
from flashgen.launch.array import ArrayInfo, contiguous_strides
from flashgen.launch.cache_arrays import append_order
from flashgen.launch.packing import POINTERS, Packer, Value, parameter_values
from flashgen.launch.side import SideArguments
from flashgen.launch.target import Buffer, Ready, Step, Target
from flashgen.launch.variant import Variant
from flashgen.plan.cache import PARTIALS
from flashgen.plan.captured import gradient_parameters
from flashgen.plan.expressions import captured_parameters
from flashgen.plan.model import AttentionPlan, KernelPlan, Problem, Role

#: Launch order of a backward pass; roles that a plan lacks are left out.
BACKWARD_ROLES: tuple[Role, ...] = ("survey", "prepare", "main", "query", "finish")
#: How many of the outputs of a pass are results; gradients of captured tensors come after them, then workspaces.
FORWARD_RESULTS, BACKWARD_RESULTS = 2, 3
#: The most blocks a grid has along x, y and z.
MAX_GRID = (2**31 - 1, 65535, 65535)
#: Where a parameter table's name differs from the argument's (``do`` is a keyword of C++).
PARAMETER_NAMES = {"do": "dout", "out": "o"}


class Output(NamedTuple):
    """An array that a call allocates, whether to return it or as a workspace."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    def at(self, pointer: int) -> ArrayInfo:
        """The array once it has an address."""
        return ArrayInfo(self.name, pointer, self.shape, contiguous_strides(self.shape), self.dtype, 0)


#: Puts the addresses of a call's arrays and outputs in the order of parameters. Behind them comes a 0, for all others.
Order = Callable[[Sequence[int]], tuple[int, ...]]


class Call(NamedTuple):
    """A validated combination of arguments, ready for any addresses."""

    device: int
    steps: tuple[Step, ...]
    outputs: tuple[Output, ...]
    #: The outputs as their library is told of them.
    layouts: tuple[Any, ...]
    #: None where addresses are in order as they come.
    order: Order | None


def make_ready(variant: Variant, target: Target, device: int) -> dict[Role, Ready]:
    """A variant's kernels, loaded, by role, with what every launch of them needs."""
    handles = target.load(variant, device)
    # Every kernel of a call is handed the same addresses, whether it reads what was captured or not.
    numbers, every = SideArguments(variant.plan.spec).number_names, addressed(variant.plan)
    ready = {}
    for role, kernel in variant.kernels.items():
        plan = kernel.plan
        order = (*append_order(plan.spec), *POINTERS) if plan.role == "append" else (*numbers, *every)
        packer = Packer(plan.params, order, boxes=plan.boxes, map_address=target.map_address)
        most = target.multiprocessors(device) * plan.min_blocks if plan.is_persistent else None
        ready[role] = Ready(handles[role], plan, plan.smem.bytes, packer, most)
    return ready


def addressed(plan: AttentionPlan) -> tuple[str, ...]:
    """The parameters that hold addresses of a call's arrays, in the order in which it hands these over."""
    expressions = plan.kernels[0].expressions
    partials = PARTIALS if plan.spec.cache else ()
    first = (*SideArguments(plan.spec).places, *captured_parameters(expressions), *partials)
    return (*first, *POINTERS, *gradient_parameters(expressions))


def order_of(names: Sequence[str], wanted: Sequence[str]) -> Order | None:
    """How the addresses of arrays by these names come to be in the order wanted."""
    if tuple(names) == tuple(wanted):
        return None
    places = {name: i for i, name in enumerate(names)}
    return itemgetter(*(places.get(name, -1) for name in wanted))


def make_steps(
    kernels: Mapping[Role, Ready],
    roles: Sequence[Role],
    problem: Problem,
    values: Mapping[str | None, Value],
    maps: Mapping[Role, Mapping[str | None, Value]],
) -> tuple[Step, ...]:
    """The launches for those of ``roles`` that exist and have anything to do; each has tensor maps of its own."""
    steps = []
    for role in roles:
        kernel = kernels.get(role)
        if kernel is None:
            continue
        grid = kernel.plan.grid(problem)
        if any(size > limit for size, limit in zip(grid, MAX_GRID, strict=True)):
            raise ArgumentError(
                f"batch={problem.batch}, heads={problem.heads_q}, len_q={problem.len_q} and "
                f"len_kv={problem.len_kv} need {grid} thread blocks; "
                f"CUDA launches at most {MAX_GRID}: split the batch or the heads"
            )
        if all(grid):
            own = {**tile_counts(kernel.plan, problem), **maps.get(role, {})}
            template = kernel.packer.template({**values, **own})
            started = _started(kernel, grid)
            arguments = (kernel.handle, *started, kernel.plan.threads, 1, 1, kernel.smem_bytes)
            steps.append(Step(kernel, started, template, arguments))
    return tuple(steps)


def _started(kernel: Ready, grid: tuple[int, int, int]) -> tuple[int, int, int]:
    """The blocks to start."""
    return grid if kernel.most_blocks is None else (min(grid[0], kernel.most_blocks), 1, 1)


def tile_counts(plan: KernelPlan, problem: Problem) -> dict[str | None, Value]:
    """What a kernel whose blocks take tiles from a counter is told of these, and of the sum that it adds to."""
    counts: dict[str | None, Value] = {} if plan.sums is None else {"sum_heads": plan.sums.heads(problem)}
    if not plan.is_persistent:
        return counts
    counts["tiles"] = plan.grid(problem)[0]
    for side, length in (("q", problem.len_q), ("kv", problem.len_kv)):
        counts[f"{side}_tiles"] = -(-length // int(plan.constant(f"tile_{side}")))
    return counts


def forward_outputs(problem: Problem, head_dim_v: int, dtype: str) -> tuple[Output, ...]:
    """``o`` and ``lse``."""
    return (
        Output("o", (problem.batch, problem.len_q, problem.heads_q, head_dim_v), dtype),
        Output("lse", (problem.batch, problem.heads_q, problem.len_q), "fp32"),
    )


def backward_outputs(
    problem: Problem, head_dim: int, head_dim_v: int, dtype: str, workspaces: Mapping[str, int]
) -> tuple[Output, ...]:
    """``dq``, ``dk``, ``dv``, and the workspaces ``dsum`` and those that the plan has of the others."""
    batch, heads_kv, len_kv = problem.batch, problem.heads_kv, problem.len_kv
    return (
        Output("dq", (batch, problem.len_q, problem.heads_q, head_dim), dtype),
        Output("dk", (batch, len_kv, heads_kv, head_dim), dtype),
        Output("dv", (batch, len_kv, heads_kv, head_dim_v), dtype),
        Output("dsum", (batch, problem.heads_q, problem.len_q), "fp32"),
        Output("dq_accum", (workspaces.get("dq_accum", 0),), "fp32"),
        Output("row_stats", (workspaces.get("row_stats", 0),), "fp32"),
        Output("head_counts", (workspaces.get("head_counts", 0),), "fp32"),
        Output("turns", (workspaces.get("turns", 0),), "fp32"),
    )


def call_values(
    problem: Problem,
    band: tuple[int, int],
    scale: float,
    inputs: Sequence[ArrayInfo],
    outputs: Sequence[Output],
) -> dict[str | None, Value]:
    """All parameter values but addresses; arrays without strides of their own (lse, dsum ...) bring none."""
    strides = [(PARAMETER_NAMES.get(a.name, a.name), a.strides) for a in inputs if len(a.shape) == 4]
    strides += [(o.name, contiguous_strides(o.shape)) for o in outputs if len(o.shape) == 4]
    return parameter_values(problem, band, scale, strides)


def host_buffer(info: ArrayInfo, item_bytes: int, *, writable: bool) -> Buffer:
    """The stretch of memory an array spans."""
    if 0 in info.shape:
        return Buffer(info.name, info.pointer, 0, writable)
    steps = [(size - 1) * stride for size, stride in zip(info.shape, info.strides, strict=True)]
    low, high = sum(s for s in steps if s < 0), sum(s for s in steps if s > 0)
    return Buffer(info.name, info.pointer + low * item_bytes, (high - low + 1) * item_bytes, writable)
