"""Prepared calls: everything that depends only on shapes, strides and dtypes, computed once per combination."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from flashgen.dtypes import RESULTS
from flashgen.errors import ArgumentError
from flashgen.launch.arrays.array import ArrayInfo, Framework, contiguous_strides
from flashgen.launch.call.offsets import Offsets
from flashgen.launch.call.packing import Packer, Value, parameter_values
from flashgen.launch.driver.launch_attributes import LaunchShape
from flashgen.launch.target import Buffer, Ready, Step, Target
from flashgen.launch.variant import Variant
from flashgen.plan.cache import DECODE, PREFILL
from flashgen.plan.model.plans import AttentionPlan, KernelPlan, Pass, Problem, Role

#: Launch order of each pass; roles that a plan lacks are left out.
FORWARD_ROLES: tuple[Role, ...] = ("survey", "scores", "softmax", "forward", PREFILL, DECODE)
BACKWARD_ROLES: tuple[Role, ...] = ("survey", "prepare", "main", "query", "repair", "finish", "ds", "dv", "dq", "dk")
#: How many of the outputs of a pass are results; gradients of captured tensors come after them, then workspaces.
FORWARD_RESULTS, BACKWARD_RESULTS = 2, 3
#: The most blocks a grid has along x, y and z.
MAX_GRID = (2**31 - 1, 65535, 65535)
#: Where a parameter table's name differs from the argument's (``do`` is a keyword of C++).
PARAMETER_NAMES = {"do": "dout", "out": "o", "p": "probabilities"}
#: How many combinations of shapes and strides are remembered per kernel and pass.
_CALLS_KEPT = 1024
#: Workspaces that share an allocation begin at multiples of so many bytes, each with some to spare before the next.
_APART = 256


class Output(NamedTuple):
    """An array that a call allocates, whether to return it or as a workspace."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    def at(self, pointer: int) -> ArrayInfo:
        """The array at its address."""
        return ArrayInfo(self.name, pointer, self.shape, contiguous_strides(self.shape), self.dtype, 0)

    def stretch(self) -> Buffer:
        """The memory around its address."""
        return stretch_of(self.at(0), RESULTS[self.dtype].bytes, writable=True)


class Call(NamedTuple):
    """A validated combination of arguments, ready for any addresses: those of its arrays, then of its outputs."""

    device: int
    steps: tuple[Step, ...]
    #: Results, then workspaces.
    outputs: tuple[Output, ...]
    #: What is allocated, in the terms of the arrays' library.
    layouts: tuple[Any, ...]
    #: Where workspaces begin in the last that is allocated, in bytes; empty where each has an array of its own.
    offsets: tuple[int, ...]
    #: On the host, the stretch of memory around each address.
    stretches: tuple[Buffer, ...]
    #: On the host, the arrays whose values are checked at every call.
    checked: tuple[Offsets, ...] = ()

    def run(
        self,
        target: Target,
        framework: Framework,
        like: Any,
        pointers: Sequence[int],
        stream: Any,
        numbers: Sequence[int] = (),
    ) -> list[Any]:
        """Allocates and launches, on the device of ``like``; the results, first of all that is allocated."""
        device, steps, _, layouts, offsets, stretches, checked = self
        for array in checked:
            array.check(pointers)
        handle = framework.stream(device, stream)
        made, added = framework.allocate(like, layouts, handle)
        if steps:
            if offsets:
                base = added.pop()
                added += [base + offset for offset in offsets]
            addresses = (*pointers, *added)
            buffers: Sequence[Buffer] = ()
            if stretches:
                buffers = [x.at(address) for x, address in zip(stretches, addresses, strict=True)]
            target.launch(steps, device, handle, addresses, buffers, numbers)
        return made


def remember(calls: dict[Any, Call], key: Any, call: Call) -> None:
    """Caches prepared calls."""
    if len(calls) >= _CALLS_KEPT:
        calls.clear()
    calls[key] = call


def make_call(
    framework: Framework,
    device: int,
    steps: tuple[Step, ...],
    results: Sequence[Output],
    workspaces: Sequence[Output] = (),
    stretches: Iterable[Buffer] | None = None,
    checked: Iterable[Offsets] = (),
) -> Call:
    """The call of these steps; ``stretches`` are those of its arrays, on the host.

    Elsewhere workspaces share one allocation, which takes time. On the host the emulator watches the ends of each.
    """
    outputs = allocated = (*results, *workspaces)
    offsets: list[int] = []
    if workspaces and stretches is None:
        shared, offsets = shared_allocation(workspaces)
        allocated = (*results, shared)
    layouts = tuple(framework.layout(output.shape, output.dtype) for output in allocated)
    around = () if stretches is None else (*stretches, *(output.stretch() for output in outputs))
    return Call(device, steps, outputs, layouts, tuple(offsets), around, tuple(checked))


def shared_allocation(workspaces: Iterable[Output]) -> tuple[Output, list[int]]:
    """The one array that holds all workspaces of a call, and where each begins in it, in bytes."""
    places = [0]
    for output in workspaces:
        end = places[-1] + math.prod(output.shape) * RESULTS[output.dtype].bytes
        places.append((end // _APART + 2) * _APART)
    *offsets, end = places
    return Output("workspaces", (end // 4,), "fp32"), offsets


def make_ready(variant: Variant, target: Target, device: int) -> dict[Role, Ready]:
    """A variant's kernels, loaded, by role, with what every launch of them needs."""
    handles = target.load(variant, device)
    ready = {}
    for role, kernel in variant.kernels.items():
        plan = kernel.plan
        packer = Packer(plan.params, boxes=plan.boxes, map_address=target.map_address)
        is_limited = plan.is_persistent or plan.is_cooperative
        most = target.multiprocessors(device) * plan.min_blocks if is_limited else None
        if plan.role == DECODE and most is not None:
            # Each block may need a counter of its own.
            most = min(most, plan.counters)
        ready[role] = Ready(handles[role], plan, plan.smem.bytes, packer, most)
    return ready


def make_steps(
    kernels: Mapping[Role, Ready],
    roles: Sequence[Role],
    problem: Problem,
    values: Mapping[str | None, Value],
    maps: Mapping[Role, Mapping[str | None, Value]],
    names: Sequence[str],
) -> tuple[Step, ...]:
    """The launches for those of ``roles`` that exist and have anything to do; each has tensor maps of its own.

    ``names`` are the parameters for what a call hands over, in that order.
    """
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
            started = started_grid(kernel, grid)
            arguments = (kernel.handle, *started, kernel.plan.threads, 1, 1, kernel.smem_bytes)
            places, shape = kernel.packer.places(names, own), _shape(kernel, started)
            steps.append(Step(kernel, started, template, places, arguments, shape))
    return tuple(steps)


def started_grid(kernel: Ready, grid: tuple[int, int, int]) -> tuple[int, int, int]:
    """The grid to launch."""
    if not kernel.plan.is_persistent or kernel.most_blocks is None:
        return grid
    return min(grid[0], kernel.most_blocks), 1, 1


def _shape(kernel: Ready, started: tuple[int, int, int]) -> LaunchShape | None:
    """The launch attributes that the plan needs."""
    plan = kernel.plan
    if not plan.overlaps_predecessor and not plan.is_cooperative:
        return None
    return LaunchShape(
        started,
        plan.threads,
        kernel.smem_bytes,
        cooperative=plan.is_cooperative,
        overlaps_predecessor=plan.overlaps_predecessor,
    )


def tile_counts(plan: KernelPlan, problem: Problem) -> dict[str | None, Value]:
    """The arguments of a kernel whose blocks draw tiles from a counter, and of the sum that it adds to."""
    counts: dict[str | None, Value] = {} if plan.sums is None else {"sum_heads": plan.sums.heads(problem)}
    if plan.failures is not None:
        counts.update(query_flags=plan.failures.query_flags(problem), flags=plan.failures.flags(problem))
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


def workspace_outputs(plan: AttentionPlan, pass_: Pass, problem: Problem) -> tuple[Output, ...]:
    """The arrays that kernels of the pass leave for those after them, as the plan declares them."""
    return tuple(
        Output(workspace.name, kernel.extents(workspace, problem), workspace.dtype or plan.spec.dtype)
        for kernel in plan.kernels
        if kernel.pass_ == pass_
        for workspace in kernel.workspaces
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
        Output("dq_semaphore", (workspaces.get("dq_semaphore", 0),), "fp32"),
        Output("failed_tiles", (workspaces.get("failed_tiles", 0),), "fp32"),
    )


def call_values(
    problem: Problem,
    band: tuple[int, int],
    scale: float,
    inputs: Sequence[ArrayInfo],
    outputs: Sequence[Output],
) -> dict[str | None, Value]:
    """All parameter values except addresses. Arrays such as lse and dsum have no stride parameters."""
    strides = [(PARAMETER_NAMES.get(a.name, a.name), a.strides) for a in inputs if len(a.shape) == 4]
    strides += [(o.name, contiguous_strides(o.shape)) for o in outputs if len(o.shape) == 4]
    return parameter_values(problem, band, scale, strides)


def stretch_of(info: ArrayInfo, item_bytes: int, *, writable: bool) -> Buffer:
    """The memory that an array spans, as far from 0 as it is from the array's address."""
    if 0 in info.shape:
        return Buffer(info.name, 0, 0, writable)
    steps = [(size - 1) * stride for size, stride in zip(info.shape, info.strides, strict=True)]
    low, high = sum(s for s in steps if s < 0), sum(s for s in steps if s > 0)
    return Buffer(info.name, low * item_bytes, (high - low + 1) * item_bytes, writable)
