"""Which algorithm each pass runs by, and on Hopper why, in words."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from flashgen.arch import ARCHS, Arch
from flashgen.plan.hopper.backward import why_not_backward
from flashgen.plan.hopper.forward import why_not
from flashgen.plan.hopper.forward_table import LEAST_KV
from flashgen.plan.model.plans import AttentionPlan, KernelPlan
from flashgen.spec import BackwardSchedule, Schedule


def why_not_fa3(kernel: KernelPlan) -> str | None:
    """Why a forward or main kernel for a Hopper GPU is not FlashAttention-3's, in a clause; None of any other."""
    if kernel.role not in ("forward", "main") or not _is_hopper(kernel.arch):
        return None
    reason = why_not if kernel.role == "forward" else why_not_backward
    return reason(kernel.spec, kernel.schedule or Schedule(), kernel.arch, kernel.access_bytes)


def describe_algorithm(kernel: KernelPlan) -> str:
    """``FlashAttention-2, not FlashAttention-3: it is made for head_dim 64 ...``."""
    reason = why_not_fa3(kernel)
    return kernel.algorithm if reason is None else f"{kernel.algorithm}, not FlashAttention-3: {reason}"


def schedules_instead(attention: AttentionPlan) -> Iterator[Schedule]:
    """The schedules to plan by, one after the other, where the assembler has no registers for the forward kernel.

    Masks and scores can be of any size, so this is known only then. None where nothing else is left to plan, or
    something was asked for that only this kernel can be.
    """
    forward = attention.kernel("forward")
    asked = forward.schedule or Schedule()
    if not forward.boxes or replace(asked, backward=BackwardSchedule()) != Schedule():
        return
    least = LEAST_KV[forward.spec.head_dim, forward.spec.head_dim_v]
    if least < int(forward.constant("tile_kv")):
        yield replace(asked, tile_kv=least)
    yield replace(asked, algorithm="fa2")


def _is_hopper(arch: Arch) -> bool:
    """Whether some architecture for these GPUs has what FlashAttention-3 needs."""
    return any(row.has_wgmma for row in ARCHS.values() if row.capability == arch.capability)
