"""Planning the portable forward kernel."""

from __future__ import annotations

from collections.abc import Iterator

from flashgen.arch import Arch
from flashgen.errors import PlanError
from flashgen.plan.model.limits import Tiling, choose, smem_fault, stages_fault
from flashgen.plan.model.naming import kernel_name
from flashgen.plan.model.params import FORWARD, FORWARD_SCORE, with_input_scales
from flashgen.plan.model.plans import Constant, KernelPlan, SmemMap
from flashgen.plan.model.smem import SmemLayout
from flashgen.spec import AttentionSpec, Schedule, WarpPartition

WARP = 32
#: Registers a thread may spend on accumulators before the compiler has to spill.
_MAX_ACCUMULATORS = 208


def padded(dim: int) -> int:
    """Head dims are padded inside the kernel to whole steps of the tensor cores."""
    return -(-dim // 16) * 16


def copies_asynchronously(arch: Arch, access_bytes: int) -> bool:
    """Whether tiles go straight to shared memory: cp.async exists, and moves 4, 8 or 16 bytes."""
    return arch.has_cp_async and access_bytes >= 4


def check_eight_bit_inputs(spec: AttentionSpec, arch: Arch) -> None:
    """Raises PlanError if no kernel of an architecture takes 8-bit queries, keys and values."""
    if not arch.multiplies_eight_bits:
        raise PlanError(
            f"dtype={spec.dtype!r} needs tensor cores of sm_89 or later, and arch={arch.name!r} has none for it; "
            "use dtype='bf16' or 'fp16'."
        )


def plan_forward(spec: AttentionSpec, schedule: Schedule, arch: Arch, access_bytes: int) -> KernelPlan:
    """The forward kernel of a spec."""
    split_k = schedule.warps is not None and schedule.warps.kind == "split_k"
    asynchronous = copies_asynchronously(arch, access_bytes)

    def check(tiling: Tiling) -> str | None:
        return _fault(spec, arch, tiling, split_k, asynchronous)

    rows = _SPLIT_K if split_k else tuple(forward_rows(spec, arch))
    tiling = choose("forward", rows, _given(schedule), arch, check, lambda t: _smem(spec, t, split_k).bytes)
    smem = _smem(spec, tiling, split_k)
    dim, dim_v = _tile_columns(spec, spec.head_dim), _tile_columns(spec, spec.head_dim_v)
    q_in_registers = tiling.hold_q and _q_fits(spec, tiling)
    words = ["splitk"] if split_k else []
    params = FORWARD if spec.score is None else FORWARD_SCORE
    return KernelPlan(
        name=kernel_name(spec, "forward", arch, *words),
        pass_="forward",
        role="forward",
        algorithm="FlashAttention-2",
        template="forward.cu.j2",
        spec=spec,
        arch=arch,
        threads=tiling.warps * WARP,
        config_type="ForwardConfig",
        config=(
            Constant("head_dim", spec.head_dim, _padding_note(spec.head_dim, dim)),
            Constant("head_dim_v", spec.head_dim_v, _padding_note(spec.head_dim_v, dim_v)),
            Constant("tile_q", tiling.tile_q, "B_r: query rows per block"),
            Constant("tile_kv", tiling.tile_kv, "B_c: keys per step"),
            Constant("stages", tiling.stages, "slots for K and V"),
            Constant("warps", tiling.warps),
            Constant("split_k", split_k, "each warp owns keys, not query rows"),
            Constant("has_lower", spec.mask.has_lower, "the band has a lower bound on k - q"),
            Constant("has_upper", spec.mask.has_upper, "the band has an upper bound on k - q"),
            Constant("q_in_registers", q_in_registers),
            Constant("access_bytes", access_bytes, "alignment of rows in global memory"),
            Constant("async_copy", asynchronous),
            Constant("turing", not arch.has_cp_async, "mma.m16n8k8, as Turing has no k16"),
        ),
        params=with_input_scales(params) if spec.element.is_eight_bit else params,
        smem=smem,
        grid_tile=tiling.tile_q,
        grid_over="q",
        grid_heads="q",
        access_bytes=access_bytes,
        reasons=(tiling.reason,) if tiling.reason else (),
        schedule=schedule if schedule != Schedule() else None,
    )


def chosen_schedule(kernel: KernelPlan) -> Schedule:
    """The schedule that would give this plan."""
    kind = "split_k" if kernel.constant("split_k") else "split_q"
    return Schedule(
        tile_q=int(kernel.constant("tile_q")),
        tile_kv=int(kernel.constant("tile_kv")),
        stages=int(kernel.constant("stages")),
        warps=WarpPartition("split_k" if kind == "split_k" else "split_q", int(kernel.constant("warps"))),
    )


def _tile_columns(spec: AttentionSpec, dim: int) -> int:
    """Columns of a tile of Q, K or V in shared memory: whole steps of the tensor cores."""
    return -(-dim // 32) * 32 if spec.element.is_eight_bit else padded(dim)


def _padding_note(dim: int, padded_dim: int) -> str:
    return "" if dim == padded_dim else f"padded to {padded_dim} inside the kernel"


def _given(schedule: Schedule) -> dict[str, int]:
    given = {n: getattr(schedule, n) for n in ("tile_q", "tile_kv", "stages")}
    given["warps"] = schedule.warps.warps if schedule.warps else None
    return {n: v for n, v in given.items() if v is not None}


def _fault(spec: AttentionSpec, arch: Arch, tiling: Tiling, split_k: bool, asynchronous: bool) -> str | None:
    rows = tiling.tile_q if split_k else tiling.tile_q / tiling.warps
    keys = tiling.tile_kv / tiling.warps if split_k else tiling.tile_kv
    if rows % 16 or rows < 16:
        return (
            f"{tiling.describe()} gives each warp {rows:g} query rows, which must be a multiple of 16; "
            f"use tile_q={16 * tiling.warps} or a multiple of it."
        )
    step = 32 if spec.element.is_eight_bit else 16
    if keys % step or keys < step:
        least = step * tiling.warps if split_k else step
        return (
            f"{tiling.describe()} gives each warp {keys:g} keys, which must be a multiple of {step}; "
            f"use tile_kv={least} or a multiple of it."
        )
    for count, name in ((rows, "query rows"), (keys, "keys")):
        if spec.scale_block and spec.scale_block % count:
            return (
                f"{tiling.describe()} gives each warp {count:g} {name}, which must divide scale_block="
                f"{spec.scale_block}; use smaller tiles."
            )
    if tiling.stages > 1 and not asynchronous:
        return stages_fault(arch, tiling)
    accumulators = rows * (keys + padded(spec.head_dim_v)) / WARP
    if accumulators > _MAX_ACCUMULATORS:
        return (
            f"{tiling.describe()} needs {accumulators:g} registers per thread for scores and output alone "
            f"(at most {_MAX_ACCUMULATORS}); use a smaller tile_q or tile_kv, or more warps."
        )
    return smem_fault(arch, tiling, _smem(spec, tiling, split_k).bytes)


def _smem(spec: AttentionSpec, tiling: Tiling, split_k: bool) -> SmemMap:
    size = spec.element.bytes
    dim, dim_v = _tile_columns(spec, spec.head_dim), _tile_columns(spec, spec.head_dim_v)
    out_dim = padded(spec.head_dim_v)
    layout = SmemLayout()
    layout.then("q", tiling.tile_q * dim * size, "Q_i")
    layout.then("k", tiling.stages * tiling.tile_kv * dim * size, "K_j" + _ring(tiling))
    layout.then("v", tiling.stages * tiling.tile_kv * dim_v * size, "V_j" + _ring(tiling))
    layout.over("o", tiling.tile_q * out_dim * spec.out_element.bytes, "O_i, once the loop is over")
    if split_k:
        merge = 4 * tiling.tile_q * (out_dim + 2 * tiling.warps)
        layout.over("merge", merge, "the warps' partial results, once the loop is over")
    return layout.map()


def _ring(tiling: Tiling) -> str:
    return f", {tiling.stages} slots" if tiling.stages > 1 else ""


def _q_fits(spec: AttentionSpec, tiling: Tiling) -> bool:
    """Whether Q's fragments fit in registers beside the accumulators."""
    rows = tiling.tile_q // tiling.warps
    held = padded(spec.head_dim) * spec.element.bytes / 4
    words = rows * (held + tiling.tile_kv + padded(spec.head_dim_v)) / WARP
    return words <= _MAX_ACCUMULATORS


_SPLIT_K = (
    Tiling(16, 64, 4, 2, "warps split the keys, so 16 queries keep all four busy"),
    Tiling(16, 64, 4, 1, "one stage is what fits"),
    Tiling(16, 32, 2, 1, "two warps and one stage are what fits"),
)


def forward_rows(spec: AttentionSpec, arch: Arch) -> Iterator[Tiling]:
    """The schedule table: rows in order of preference, each with its reason."""
    dim = max(padded(spec.head_dim), padded(spec.head_dim_v))
    if spec.element.is_eight_bit:
        yield from _rows_eight_bits(dim, arch)
        return
    if not spec.element.is_half:
        yield from _rows_float(dim, spec.mask.is_full, arch)
    elif not arch.has_cp_async:
        yield Tiling(64, 64, 4, 1, "16 rows per warp leave registers for prefetched tiles")
        yield Tiling(64, 32, 4, 1, _FITS)
        yield Tiling(32, 32, 2, 1, _FITS)
    else:
        if spec.dropout and dim <= 128:
            stages = 2 if dim <= 64 else 1
            yield Tiling(64, 64, 4, stages, "16 rows per warp leave registers for the dropout mask", blocks=2)
        if spec.cache:
            reason = "16 rows per warp leave registers for cache addresses; calls with a cache have few queries"
            yield Tiling(64, 64 if dim <= 128 else 32, 4, 2, reason)
        yield from _rows_ampere(dim, spec.mask.is_full, arch)
    yield Tiling(16, 16, 1, 1, _FITS)


_FITS = "the largest tile that shared memory holds"
_TWICE = "32 rows per warp use each fragment of K and V twice"


def _rows_ampere(dim: int, is_full: bool, arch: Arch) -> Iterator[Tiling]:
    if dim <= 64:
        if is_full and not arch.spills_wide_tiles:
            yield Tiling(128, 128, 4, 1, f"{_TWICE}; without a mask, wide tiles save barriers", blocks=2)
        yield Tiling(128, 64, 4, 2, f"{_TWICE}; registers hold Q, and a second stage", hold_q=True, blocks=2)
    if dim <= 128 and not arch.spills_wide_tiles:
        yield Tiling(128, 64, 4, 1, f"{_TWICE}; with one stage two blocks share a multiprocessor", blocks=2)
    if dim <= 128:
        yield Tiling(128, 32, 4, 1, f"{_TWICE}; narrow tiles let two blocks share a multiprocessor", blocks=2)
    if dim > 192:
        yield Tiling(128, 32, 8, 2, "16 rows per warp leave room for Q beside a wide output", hold_q=True)
    yield Tiling(128, 64, 8, 1, "16 rows per warp keep a wide output in registers")
    yield Tiling(64, 64, 4, 1, _FITS)
    yield Tiling(64, 32, 4, 1, _FITS)
    yield Tiling(32, 16, 2, 1, _FITS)


def _rows_eight_bits(dim: int, arch: Arch) -> Iterator[Tiling]:
    if dim > 64 and arch.widens_eight_bits:
        yield Tiling(128, 32, 8, 2, "16 rows per warp and narrow tiles leave registers for converted operands")
    yield Tiling(128, 64, 8, 2, "16 rows per warp leave registers for the sums of a tile beside those of all")
    yield Tiling(64, 64, 4, 1, _FITS)
    yield Tiling(64, 32, 4, 1, _FITS)
    yield Tiling(16, 32, 1, 1, _FITS)


def _rows_float(dim: int, is_full: bool, arch: Arch) -> Iterator[Tiling]:
    wide = "16 rows per warp: float fragments take four times the registers"
    if arch.has_cp_async:
        if dim <= 64:
            yield Tiling(64, 64, 4, 1, wide)
        if dim <= 96 or is_full:
            yield Tiling(64, 32, 4, 1, wide)
        if arch.spills_float_copies:
            yield Tiling(128, 16, 8, 1, f"{wide}; eight warps share the copies, which avoids spills")
        yield Tiling(64, 16, 4, 1, wide)
    else:
        # Without cp.async the next tiles are prefetched into registers, and floats leave few.
        if dim <= 64:
            yield Tiling(64, 32, 4, 1, wide)
        yield Tiling(64, 16, 4, 1, wide)
    yield Tiling(32, 16, 2, 1, _FITS)
