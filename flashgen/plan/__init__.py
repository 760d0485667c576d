"""Deciding everything: spec + schedule + architecture -> ``AttentionPlan``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

from flashgen.arch import Arch, get_arch
from flashgen.errors import PlanError
from flashgen.plan.cache import DECODE, plan_cache, with_cache
from flashgen.plan.captured.gradients import plan_captured
from flashgen.plan.captured.survey import plan_survey, with_tables
from flashgen.plan.clear_gaps import plan_clear_gaps
from flashgen.plan.decode.forward import can_decode, check_eight_bits, plan_decode
from flashgen.plan.decode.latent import check_latent, plan_latent
from flashgen.plan.differences import with_differences_in_names
from flashgen.plan.dropout import with_dropout
from flashgen.plan.expressions import expressions_of, with_captures
from flashgen.plan.hopper.backward import plan_backward_sm90, why_not_backward
from flashgen.plan.hopper.decode import plan_decode_sm90, why_not_decode_by_tma
from flashgen.plan.hopper.forward import (
    chosen_schedule_sm90,
    is_planned,
    plan_forward_sm90,
    plan_prefill,
    why_not_prefill,
)
from flashgen.plan.hopper.latent import plan_latent_sm90, why_not_latent_by_tma
from flashgen.plan.lineage import LINEAGE, chosen_lineage_schedule, plan_lineage
from flashgen.plan.model.expressions import NO_EXPRESSIONS, Expressions
from flashgen.plan.model.naming import name_with
from flashgen.plan.model.plans import AttentionPlan, KernelPlan, Problem
from flashgen.plan.portable.backward import chosen_backward, plan_backward, workspace_tiles
from flashgen.plan.portable.forward import check_eight_bit_inputs, chosen_schedule, plan_forward
from flashgen.plan.quantize import plan_quantize
from flashgen.plan.score_form import score_form
from flashgen.plan.varlen import with_varlen
from flashgen.spec import AttentionSpec, Schedule, WarpPartition

__all__ = ["AttentionPlan", "KernelPlan", "Problem", "default_access_bytes", "plan", "workspaces"]


def plan(
    spec: AttentionSpec,
    schedule: Schedule | None = None,
    arch: str | Arch = "sm_80",
    *,
    access_bytes: int | None = None,
) -> AttentionPlan:
    """Plans every kernel of ``spec`` for ``arch``; refuses, in a sentence, what cannot be built.

    ``access_bytes`` is the alignment that tensors will have; by default what contiguous ones have.
    """
    row = get_arch(arch)
    asked = schedule or Schedule()
    if spec.dtype == "bf16" and not row.has_bf16:
        raise PlanError(
            f"dtype='bf16' needs tensor cores of sm_80 or later, and arch='{row.name}' has none for it; "
            "use dtype='fp16' or 'fp32'."
        )
    access = access_bytes or default_access_bytes(spec)
    if spec.multiplies_eight_bits:
        check_eight_bit_inputs(spec, row)
    if access not in (1, 2, 4, 8, 16) or access < spec.element.bytes or default_access_bytes(spec) % access:
        raise PlanError(
            f"access_bytes={access} does not divide the rows of {spec.describe()}; "
            f"use a power of two from {spec.element.bytes} to {default_access_bytes(spec)}."
        )
    made = _plan(spec, asked, row, access)
    if (asked, access) == (Schedule(), default_access_bytes(spec)):
        return made
    return with_differences_in_names(made, _defaults(spec, asked, row, access))


def _defaults(spec: AttentionSpec, asked: Schedule, arch: Arch, access: int) -> Iterator[KernelPlan]:
    """The kernels of the variant that the schedule names, those without a schedule, and those of contiguous arrays."""
    algorithm = asked.algorithm if asked.algorithm in LINEAGE else None
    split_k = WarpPartition("split_k") if asked.warps is not None and asked.warps.kind == "split_k" else None
    softmax = asked.softmax if asked.softmax == "running-max" else None
    variant = Schedule(algorithm=algorithm, warps=split_k, softmax=softmax)
    plans = ((variant, access), (Schedule(), access), (Schedule(), default_access_bytes(spec)))
    for schedule, access_bytes in dict.fromkeys(plans):
        # Perhaps only the explicit sizes fit.
        with suppress(PlanError):
            yield from _plan(spec, schedule, arch, access_bytes).kernels


def _plan(spec: AttentionSpec, asked: Schedule, row: Arch, access: int) -> AttentionPlan:
    expressions = expressions_of(spec)
    kernels: tuple[KernelPlan, ...]
    if spec.cache_dtype:
        check_eight_bits(spec, asked, row, access)
        kernels, chosen = (_plan_decode(spec, asked, row, access),), Schedule()
    elif spec.qv:
        check_latent(spec, asked, row, access)
        why_not = why_not_latent_by_tma(spec, asked, row, access)
        latent = plan_latent(spec, row, access, why_not) if why_not else plan_latent_sm90(spec, row)
        kernels, chosen = (latent,), Schedule()
    elif asked.algorithm in LINEAGE:
        kernels = plan_lineage(spec, asked, row, access)
        chosen = chosen_lineage_schedule(kernels[-1])
    elif is_planned(spec, asked, row, access):
        kernels = (plan_forward_sm90(spec, asked, row),)
        chosen = chosen_schedule_sm90(kernels[0])
    else:
        kernels = (plan_forward(spec, asked, row, access),)
        chosen = chosen_schedule(kernels[0])
    forward = kernels[-1]
    if spec.cache and why_not_prefill(spec, asked, row, access) is None:
        kernels += (plan_prefill(spec, asked, row),)
    if forward.role != DECODE and can_decode(spec, asked, row, access):
        kernels += (_plan_decode(spec, asked, row, access),)
    if spec.needs_backward:
        lineage = LINEAGE.get(asked.algorithm or "")
        if lineage is not None and lineage.plan_backward is not None:
            backward = lineage.plan_backward(spec, asked, row, access)
            if main := next((k for k in backward if k.role == "main"), None):
                chosen = replace(chosen, backward=chosen_backward(main))
        elif why_not_backward(spec, asked, row, access) is None:
            backward = plan_backward_sm90(spec, asked, row)
        else:
            backward = plan_backward(spec, asked, row, access)
            chosen = replace(chosen, backward=chosen_backward(next(k for k in backward if k.role == "main")))
        kernels += backward
        kernels += plan_captured(spec, asked, row, access, expressions)
    if expressions is not NO_EXPRESSIONS:
        expressions = with_tables(kernels, expressions)
        kernels = tuple(_with_expressions(kernel, expressions) for kernel in kernels)
        if expressions.tables:
            kernels += (plan_survey(kernels[0], expressions),)
    if spec.cache:
        kernels = (*(with_cache(kernel) for kernel in kernels), *plan_cache(forward))
    if spec.scale_block:
        kernels += (plan_quantize(forward),)
    kernels = tuple(with_varlen(with_dropout(kernel)) for kernel in kernels)
    if spec.has_own_lengths:
        kernels += (plan_clear_gaps(forward),)
    return AttentionPlan(spec, chosen, row, tuple(_with_alignment(kernel, access) for kernel in kernels))


def _plan_decode(spec: AttentionSpec, asked: Schedule, arch: Arch, access: int) -> KernelPlan:
    """The kernel for few new queries and a cache."""
    why_not = why_not_decode_by_tma(spec, arch, access)
    if why_not is None:
        return plan_decode_sm90(spec, arch)
    return plan_decode(spec, arch, access, why_not, why_not_prefill(spec, asked, arch, access))


def _with_alignment(kernel: KernelPlan, access: int) -> KernelPlan:
    """Gives the kernel a name of its own if its source differs from that for contiguous arrays.

    Otherwise one override file would replace both, although their parameter structs may differ (TMA needs maps).
    """
    depends = any(constant.name.endswith("access_bytes") for constant in kernel.config)
    if not depends or access == default_access_bytes(kernel.spec):
        return kernel
    return replace(kernel, name=name_with(kernel.name, f"align{access}"))


def _with_expressions(kernel: KernelPlan, expressions: Expressions) -> KernelPlan:
    """The kernel with what it evaluates of the mask and the score; some only move numbers, and evaluate nothing."""
    if kernel.role in ("prepare", "finish", "captured_clear", "captured_store"):
        return kernel
    return replace(
        kernel,
        expressions=expressions,
        score=score_form(kernel, expressions),
        params=with_captures(kernel.params, expressions),
    )


def default_access_bytes(spec: AttentionSpec) -> int:
    """The widest access that divides the rows of contiguous tensors of this spec."""
    size = spec.cache_element.bytes
    access = 16
    while (spec.head_dim * size) % access or (spec.head_dim_v * size) % access:
        access //= 2
    return access


def workspaces(attention: AttentionPlan, problem: Problem) -> dict[str, int]:
    """How many floats the workspaces of a backward call have; those that it does not need are left out."""
    if not attention.has("prepare"):
        return {}
    prepare = attention.kernel("prepare")
    tiles, heads, batch = prepare.grid(problem)
    all_tiles = tiles * heads * batch
    if "row_stats" in prepare.params.names:
        all_tiles = problem.query_tiles(prepare.grid_tile) * heads
    found = {name: all_tiles * floats for name, floats in workspace_tiles(prepare).items() if floats}
    if prepare.sums is not None:
        floats = workspace_tiles(prepare)["dq_accum"]
        found["dq_accum"] = prepare.sums.tiles(problem, prepare.grid_tile) * floats
        found["head_counts"] = 1 + 2 * heads * batch
    if prepare.failures is not None:
        found["failed_tiles"] = prepare.failures.flags(problem)
    return found
