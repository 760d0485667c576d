"""``io_model(spec, len_q, ...)``: bytes to and from device memory, by algorithm."""

from __future__ import annotations

from collections.abc import Iterable
from typing import get_args

from flashgen.arch import Arch, get_arch
from flashgen.common.checks import is_one_of, is_whole
from flashgen.common.show import show
from flashgen.errors import ArgumentError, SpecError
from flashgen.lab.io.decode import attending_role, split_of
from flashgen.lab.io.planned import launched, planned
from flashgen.lab.io.registry import rows, spec_of_pass
from flashgen.lab.io.result import IOModel
from flashgen.lab.io.sizes import MULTIPROCESSORS, Sizes
from flashgen.plan import plan
from flashgen.plan.cache import DECODE
from flashgen.plan.model.plans import Pass
from flashgen.spec import AttentionSpec, Schedule

_MOST = 2**30
DECODE_NOTE = (
    "keys and values move once for all query heads that share them; {}; the table of pages and scales are left out"
)
NOTE = "each array as the kernels of this plan move it; a reduction counts once; tile counters and flags are left out"


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
    multiprocessors: int = MULTIPROCESSORS,
) -> IOModel:
    """Bytes that each algorithm, and the plan of ``spec``, reads from and writes to device memory.

    Rows of basis ``paper`` are the algorithms as the papers print them. Rows of basis ``kernel`` are flashgen's kernels
    of each algorithm, from the tiles, passes and workspaces of their plans: :func:`count_io` agrees with those.

    ``len_kv`` is by default ``len_q``, and ``heads_kv`` is ``heads``. ``sram`` is the on-chip memory of a block in
    bytes, M of the papers, by default the most that ``arch`` gives one. No cache of the GPU is modeled: whatever a
    block reads twice counts twice.

    With a cache of keys and values, all sequences have ``len_kv`` keys in it. Few new tokens use the decode kernel,
    and ``multiprocessors`` decides into how many parts it splits the keys.
    """
    sizes = sizes_of(spec, len_q, len_kv, batch, heads, heads_kv, sram, arch, pass_, multiprocessors)
    attention = plan(spec_of_pass(sizes), schedule, sizes.arch)
    attending = attending_role(sizes, attention) if spec.cache else None
    note = DECODE_NOTE.format(split_of(sizes, attention.kernel(DECODE)).describe()) if attending == DECODE else NOTE
    own = planned("plan", sizes, attention, launched(attention, pass_, attending=attending), note)
    return IOModel(sizes, (*rows(sizes), own))


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
    multiprocessors: int = MULTIPROCESSORS,
) -> Sizes:
    """The sizes of a call, checked."""
    if not isinstance(spec, AttentionSpec):
        raise SpecError(f"spec={show(spec)} is not an AttentionSpec; write AttentionSpec(head_dim=128, dtype='bf16')")
    if spec.varlen:
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
    _check_whole((("heads_kv", heads_kv, 1), ("sram", sram, 1024), ("multiprocessors", multiprocessors, 1)))
    if heads % heads_kv:
        raise ArgumentError(f"heads={heads} is not a multiple of heads_kv={heads_kv}; use a divisor of {heads}")
    return Sizes(spec, batch, heads, heads_kv, len_q, len_kv, row, sram, pass_, multiprocessors)


def _check_whole(numbers: Iterable[tuple[str, object, int]]) -> None:
    for name, number, least in numbers:
        if not is_whole(number, least, _MOST):
            raise ArgumentError(f"{name}={show(number)} is out of range; use a whole number from {least} to 2**30")
