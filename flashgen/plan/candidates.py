"""The schedules that are worth trying for a spec: those of the plan's own tables that can be planned."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from flashgen.arch import Arch
from flashgen.errors import PlanError, SpecError
from flashgen.plan import plan
from flashgen.plan.hopper.forward import why_not
from flashgen.plan.hopper.forward_tiles import row_of
from flashgen.plan.model.limits import Tiling
from flashgen.plan.model.plans import AttentionPlan, Pass
from flashgen.plan.portable.backward_rows import main_rows
from flashgen.plan.portable.forward import forward_rows
from flashgen.spec import AttentionSpec, BackwardSchedule, Schedule, WarpPartition, full

_STAGES = (1, 2, 3)
_HOPPER_CONSUMERS = (2, 3)
_HOPPER_STAGES = (2, 3, 4)
#: Keys of a tile beside those of the table.
_KEYS_AROUND = (0, -16, 16, -32, 32, -48, 48)


def schedules(spec: AttentionSpec, arch: Arch, pass_: Pass) -> tuple[Schedule, ...]:
    """Schedules of one pass, the plan's own choice first; no two give the same kernels.

    The kernels of the other pass stay as they are: a forward schedule of FlashAttention-2 takes that backward, too.
    """
    other: Pass = "backward" if pass_ == "forward" else "forward"
    default = plan(spec, Schedule(), arch)
    found: dict[object, Schedule] = {_kernels(default, pass_): Schedule()}
    for schedule in _forward(spec, arch) if pass_ == "forward" else _backward(spec, arch):
        try:
            made = plan(spec, schedule, arch)
        except (PlanError, SpecError):
            continue
        if _kernels(made, other) == _kernels(default, other):
            found.setdefault(_kernels(made, pass_), schedule)
    return tuple(found.values())


def _kernels(made: AttentionPlan, pass_: Pass) -> object:
    """What tells two plans apart."""
    own = [kernel for kernel in made.kernels if kernel.pass_ == pass_]
    return tuple((k.role, k.algorithm, k.template, k.threads, k.config, k.smem.bytes, k.switches) for k in own)


def _forward(spec: AttentionSpec, arch: Arch) -> Iterator[Schedule]:
    if arch.has_wgmma and why_not(spec, Schedule(), arch, 16) is None:
        yield from _hopper(spec)
    # A mask and no mask have rows of their own, and each may be good for the other.
    rows = [*forward_rows(spec, arch), *forward_rows(replace(spec, mask=full()), arch)]
    for tiling in _with_stages(rows):
        yield Schedule(
            tile_q=tiling.tile_q,
            tile_kv=tiling.tile_kv,
            stages=tiling.stages,
            warps=WarpPartition("split_q", tiling.warps),
            algorithm="fa2",
        )


def _hopper(spec: AttentionSpec) -> Iterator[Schedule]:
    row = row_of(spec)
    for consumers in sorted(_HOPPER_CONSUMERS, key=lambda n: n != row.consumers):
        for around in _KEYS_AROUND:
            for stages in sorted(_HOPPER_STAGES, key=lambda n: abs(n - row.stages)):
                tile_kv = row.tile_kv + around
                if 16 <= tile_kv <= 256:
                    yield Schedule(
                        tile_kv=tile_kv,
                        stages=stages,
                        warps=WarpPartition("specialized", consumers=consumers),
                        algorithm="fa3",
                    )


def _backward(spec: AttentionSpec, arch: Arch) -> Iterator[Schedule]:
    # FlashAttention-3's backward kernels have no schedule, and the others are no match for them.
    if plan(spec, None, arch).kernel("main").algorithm == "FlashAttention-3":
        return
    for tiling in _with_stages(main_rows(spec, arch)):
        yield Schedule(backward=BackwardSchedule(tiling.tile_q, tiling.tile_kv, tiling.stages, tiling.warps))


def _with_stages(rows: Iterable[Tiling]) -> Iterator[Tiling]:
    listed = list(rows)
    yield from listed
    for row in listed:
        yield from (replace(row, stages=stages) for stages in _STAGES if stages != row.stages)
