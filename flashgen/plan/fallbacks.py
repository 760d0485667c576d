"""The plans that take a plan's place: if the assembler runs out of registers, or for less aligned arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from flashgen.plan import plan
from flashgen.plan.cache import DECODE, PREFILL
from flashgen.plan.calls import takes_call
from flashgen.plan.hopper.forward_tiles import fallback_tile_kv
from flashgen.plan.model.plans import AttentionPlan, KernelPlan, Pass, Problem
from flashgen.plan.portable.forward import chosen_schedule, copies_asynchronously, plan_forward
from flashgen.spec import BackwardSchedule, Schedule

#: TMA needs 16 bytes, so the kernels for this alignment do not use it.
_WITHOUT_TMA = 8


def fallbacks(attention: AttentionPlan) -> Iterator[AttentionPlan]:
    """The plans to compile instead, in order, if the assembler has too few registers for a forward kernel.

    Only the assembler knows, because masks and scores can be of any size. Each plan is made when the iterator
    reaches it. There is none if nothing else can be planned, or if the schedule asks for this very kernel. The backward
    kernels stay as they are.
    """
    forward = attention.forward
    if attention.spec.cache:
        yield from _without_kernels_for_caches(attention)
        return
    asked = forward.schedule or Schedule()
    if not forward.boxes or replace(asked, backward=BackwardSchedule()) != Schedule():
        return
    access = forward.access_bytes
    least = fallback_tile_kv(forward.spec)
    if least < int(forward.constant("tile_kv")):
        yield plan(forward.spec, replace(asked, tile_kv=least), forward.arch, access_bytes=access)
    # algorithm="fa2" would apply to both passes; a partition of warps is of the forward kernel alone.
    portable = chosen_schedule(plan_forward(forward.spec, asked, forward.arch, access))
    yield plan(forward.spec, replace(asked, warps=portable.warps), forward.arch, access_bytes=access)


def _without_kernels_for_caches(attention: AttentionPlan) -> Iterator[AttentionPlan]:
    """The plan without the kernels of Hopper that another kernel can stand in for."""
    if attention.forward.role == DECODE:
        # No other kernel can stand in for the decode kernel.
        if attention.forward.boxes:
            yield for_alignment(attention, _WITHOUT_TMA)
        elif attention.has(PREFILL):
            yield replace(attention, kernels=tuple(kernel for kernel in attention.kernels if kernel.role != PREFILL))
        return
    left = attention.kernels
    for role in ("prefill", "decode"):
        kept = tuple(kernel for kernel in left if not (kernel.role == role and kernel.boxes))
        if kept != left:
            left = kept
            yield replace(attention, kernels=left)


def for_alignment(attention: AttentionPlan, access_bytes: int) -> AttentionPlan:
    """The plan for arguments that are aligned to fewer bytes, by the same schedule as far as it applies."""
    forward = attention.forward
    # A tuned schedule was timed with aligned arguments only.
    asked = Schedule() if attention.tuning else forward.schedule or Schedule()
    if forward.boxes:
        # TMA needs 16-byte alignment, so the portable kernel runs the forward pass. The schedule is not for it.
        asked = Schedule(backward=asked.backward)
    if not copies_asynchronously(attention.arch, access_bytes):
        asked = _with_one_stage(asked)
    return plan(attention.spec, asked, attention.arch, access_bytes=access_bytes)


def access_without_maps(attention: AttentionPlan) -> int:
    """The alignment whose plan ``for_alignment`` makes for a driver that has no tensor maps; often the plan's own."""
    return _WITHOUT_TMA if any(kernel.boxes for kernel in attention.kernels) else attention.access_bytes


def access_for_call(
    attention: AttentionPlan, pass_: Pass, problem: Problem, scale: float, has_maps: Callable[[KernelPlan], bool]
) -> int:
    """The alignment whose plan takes a call that is aligned as this plan needs.

    ``has_maps`` says whether the driver describes the call's tensors to a kernel that uses TMA.
    """
    for kernel in attention.kernels:
        if kernel.pass_ == pass_ and kernel.boxes and not (takes_call(kernel, problem, scale) and has_maps(kernel)):
            return access_without_maps(attention)
    return attention.access_bytes


def _with_one_stage(asked: Schedule) -> Schedule:
    """The schedule without the stages that only asynchronous copies can fill."""
    backward = asked.backward
    if (backward.stages or 1) > 1:
        backward = replace(backward, stages=None)
    return replace(asked, stages=None if (asked.stages or 1) > 1 else asked.stages, backward=backward)
