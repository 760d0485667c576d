"""``io_model(spec, len_q, ...)``: bytes to and from device memory, by algorithm."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import get_args

from flashgen.arch import Arch, get_arch
from flashgen.common.checks import is_one_of, is_whole
from flashgen.common.show import show
from flashgen.errors import ArgumentError, SpecError
from flashgen.lab.io.planned import planned
from flashgen.lab.io.registry import MODELS
from flashgen.lab.io.result import IOModel
from flashgen.lab.io.sizes import Sizes
from flashgen.lab.io.traffic import AlgorithmIO
from flashgen.plan import plan
from flashgen.plan.model.plans import Pass
from flashgen.spec import AttentionSpec, Schedule

_MOST = 2**30


def io_model(
    spec: AttentionSpec,
    len_q: int,
    len_kv: int | None = None,
    *,
    batch: int = 1,
    heads: int = 1,
    heads_kv: int | None = None,
    sram: int | None = None,
    arch: str | Arch = "sm_80",
    schedule: Schedule | None = None,
    pass_: Pass = "forward",
) -> IOModel:
    """Bytes that each algorithm, and the plan of ``spec``, reads from and writes to device memory.

    ``len_kv`` is by default ``len_q``, and ``heads_kv`` is ``heads``. ``sram`` is the on-chip memory of a block in
    bytes, by default the most that ``arch`` gives one. No cache is modelled: whatever a block reads twice counts twice.
    """
    sizes = sizes_of(spec, len_q, len_kv, batch, heads, heads_kv, sram, arch, pass_)
    found = (model(sizes) for model in MODELS.values())
    return IOModel(sizes, (*(row for row in found if row is not None), plan_model(sizes, schedule)))


def plan_model(sizes: Sizes, schedule: Schedule | None) -> AlgorithmIO:
    """The row of the plan. A schedule of another algorithm than FlashAttention-2 and 3 has that algorithm's model."""
    algorithm = None if schedule is None else schedule.algorithm
    if algorithm in MODELS and algorithm not in ("fa2", "fa3"):
        found = MODELS[algorithm](sizes)
        if found is None:
            raise ArgumentError(f"algorithm={algorithm!r} has no {sizes.pass_} pass; use pass_='forward'")
        return replace(found, algorithm="plan")
    spec = replace(sizes.spec, direction="forward") if sizes.pass_ == "forward" else sizes.spec
    return planned(sizes, plan(spec, schedule, sizes.arch))


def sizes_of(
    spec: AttentionSpec,
    len_q: int,
    len_kv: int | None,
    batch: int,
    heads: int,
    heads_kv: int | None,
    sram: int | None,
    arch: str | Arch,
    pass_: Pass,
) -> Sizes:
    """The sizes of a call, checked."""
    if not isinstance(spec, AttentionSpec):
        raise SpecError(f"spec={show(spec)} is not an AttentionSpec; write AttentionSpec(head_dim=128, dtype='bf16')")
    if spec.has_own_lengths:
        raise ArgumentError(f"{spec.describe()} has lengths of its own for each sequence; model a spec without them")
    if not is_one_of(pass_, get_args(Pass)):
        raise ArgumentError(f"pass_={show(pass_)} is unknown; use 'forward' or 'backward'")
    if pass_ == "backward" and not spec.needs_backward:
        raise ArgumentError("pass_='backward' needs a spec with a backward pass; use direction='both'")
    row = get_arch(arch)
    len_kv = len_q if len_kv is None else len_kv
    heads_kv = heads if heads_kv is None else heads_kv
    sram = row.max_smem_per_block if sram is None else sram
    _check_whole((("len_q", len_q, 0), ("len_kv", len_kv, 0), ("batch", batch, 1), ("heads", heads, 1)))
    _check_whole((("heads_kv", heads_kv, 1), ("sram", sram, 1024)))
    if heads % heads_kv:
        raise ArgumentError(f"heads={heads} is not a multiple of heads_kv={heads_kv}; use a divisor of {heads}")
    return Sizes(spec, batch, heads, heads_kv, len_q, len_kv, row, sram, pass_)


def _check_whole(numbers: Iterable[tuple[str, object, int]]) -> None:
    for name, number, least in numbers:
        if not is_whole(number, least, _MOST):
            raise ArgumentError(f"{name}={show(number)} is out of range; use a whole number from {least} to 2**30")
