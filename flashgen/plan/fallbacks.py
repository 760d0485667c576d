"""The plans that take a plan's place: if the assembler runs out of registers, or for less aligned arguments."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from flashgen.plan import plan
from flashgen.plan.hopper.forward_table import LEAST_KV
from flashgen.plan.model.plans import AttentionPlan
from flashgen.plan.portable.forward import copies_asynchronously
from flashgen.spec import BackwardSchedule, Schedule


def fallbacks(attention: AttentionPlan) -> Iterator[AttentionPlan]:
    """The plans to compile instead, in order, if the assembler has too few registers for the forward kernel.

    Only the assembler knows, because masks and scores can be of any size. Each plan is made when the iterator
    reaches it. There is none if nothing else can be planned, or if the schedule asks for this very kernel.
    """
    forward = attention.kernel("forward")
    asked = forward.schedule or Schedule()
    if not forward.boxes or replace(asked, backward=BackwardSchedule()) != Schedule():
        return
    least = LEAST_KV[forward.spec.head_dim, forward.spec.head_dim_v]
    if least < int(forward.constant("tile_kv")):
        yield _planned_by(replace(asked, tile_kv=least), attention, forward.access_bytes)
    yield _planned_by(replace(asked, algorithm="fa2"), attention, forward.access_bytes)


def for_alignment(attention: AttentionPlan, access_bytes: int) -> AttentionPlan:
    """The plan for arguments that are aligned to fewer bytes, by the same schedule as far as it applies."""
    forward = attention.kernel("forward")
    asked = forward.schedule or Schedule()
    if forward.boxes:
        # The copy engine needs full alignment, so another kernel runs the forward pass. The schedule is not about it.
        asked = Schedule(backward=asked.backward)
    if not copies_asynchronously(attention.arch, access_bytes):
        asked = _with_one_stage(asked)
    return _planned_by(asked, attention, access_bytes)


def _with_one_stage(asked: Schedule) -> Schedule:
    """The schedule without the stages that only asynchronous copies can fill."""
    backward = asked.backward
    if (backward.stages or 1) > 1:
        backward = replace(backward, stages=None)
    return replace(asked, stages=None if (asked.stages or 1) > 1 else asked.stages, backward=backward)


def _planned_by(schedule: Schedule, attention: AttentionPlan, access_bytes: int) -> AttentionPlan:
    return plan(attention.spec, schedule, attention.arch, access_bytes=access_bytes)
