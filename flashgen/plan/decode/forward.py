"""Planning the decode kernel: few new queries and a cache, by mma.sync and cp.async."""

from __future__ import annotations

from dataclasses import replace

from flashgen.arch import Arch
from flashgen.errors import PlanError
from flashgen.plan.cache import DECODE, query_scale_params, scale_params
from flashgen.plan.decode.config import COUNTERS, decode_config
from flashgen.plan.decode.parts import PROMPT_QUERIES
from flashgen.plan.decode.tiles import holds_queries, padded_dims, smem_of, tiles_of
from flashgen.plan.model.naming import kernel_name
from flashgen.plan.model.params import DECODE_FORWARD
from flashgen.plan.model.plans import Constant, KernelPlan, ParamTable
from flashgen.plan.portable.forward import copies_asynchronously
from flashgen.spec import AttentionSpec, Schedule

#: What becomes of the rows of Q with an 8-bit cache, by their dtype.
_QUERY_REASONS = {
    "bf16": ", and each row of Q becomes fp16 times a power of two",
    "e4m3": ", and so does Q, whose scales are factors of the scores",
}


def can_decode(spec: AttentionSpec, schedule: Schedule, arch: Arch, access_bytes: int) -> bool:
    """Whether calls with a cache and few new queries can use this kernel."""
    if spec.cache is None or spec.dropout or not spec.element.is_half or schedule != Schedule():
        return False
    return copies_asynchronously(arch, access_bytes) and tiles_of(spec, arch) is not None


def plan_decode(
    spec: AttentionSpec, arch: Arch, access_bytes: int, why_not_hopper: str | None, why_not_prefill: str | None
) -> KernelPlan:
    """The kernel for calls with a cache and few new queries.

    The last two arguments say, in a clause, why Hopper's kernels do not read the cache: that for few queries, and that
    for many.
    """
    tiles = tiles_of(spec, arch)
    assert tiles is not None, "can_decode says whether there are any"
    dim, dim_v = padded_dims(spec)
    return KernelPlan(
        name=kernel_name(spec, DECODE, arch),
        pass_="forward",
        role=DECODE,
        algorithm="Flash-Decoding",
        template="decode/forward.cu.j2",
        spec=spec,
        arch=arch,
        threads=32 * tiles.warps,
        config_type="DecodeConfig",
        config=decode_config(
            spec,
            rows=tiles.rows,
            keys=tiles.keys,
            stages=tiles.stages,
            warps=Constant("warps", tiles.warps),
            access_bytes=access_bytes,
            tile_bytes=tiles.keys * (dim + dim_v) * spec.cache_element.bytes,
            blocks=tiles.blocks,
            columns=dim_v,
            holds_queries=holds_queries(spec),
        ),
        params=DECODE_FORWARD if spec.cache_dtype is None else _eight_bit_params(spec),
        smem=smem_of(spec, tiles),
        grid_tile=tiles.keys,
        grid_over="kv",
        grid_heads="kv",
        access_bytes=access_bytes,
        min_blocks=tiles.blocks,
        is_persistent=True,
        counters=COUNTERS,
        reasons=(
            tiles.reason,
            *_eight_bit_reasons(spec, arch, why_not_prefill),
            *((f"not by wgmma and TMA: {why_not_hopper}",) if arch.has_wgmma else ()),
        ),
    )


def check_eight_bits(spec: AttentionSpec, schedule: Schedule, arch: Arch, access_bytes: int) -> None:
    """Raises PlanError if no kernel reads such an 8-bit cache."""
    if schedule != Schedule():
        raise PlanError(f"cache_dtype={spec.cache_dtype!r} has one schedule; leave the schedule out.")
    if not arch.has_cp_async:
        raise PlanError(
            f"cache_dtype={spec.cache_dtype!r} needs asynchronous copies of sm_80 or later, and arch={arch.name!r} has "
            "none; use a 16-bit cache."
        )
    if not copies_asynchronously(arch, access_bytes):
        raise PlanError(
            f"cache_dtype={spec.cache_dtype!r} needs rows aligned to 4 bytes, and access_bytes={access_bytes}; "
            "pass contiguous q, k and v."
        )
    if tiles_of(spec, arch) is None:
        raise PlanError(
            f"{spec.describe()} has no tiles that fit the shared memory of arch={arch.name!r}; use narrower heads."
        )


def _eight_bit_reasons(spec: AttentionSpec, arch: Arch, why_not_prefill: str | None) -> tuple[str, ...]:
    if spec.cache_dtype is None:
        return ()
    if why_not_prefill is None:
        prompts = (
            f"{PROMPT_QUERIES} new tokens and more run the kernel prefill, which takes no num_splits, no "
            "batch_invariant, no left pad in pages, and only pages of a multiple of 8 keys"
        )
    else:
        prompts = "it takes any number of queries; each tile of rows of a long prompt reads all keys once"
        prompts += f"; prompts are not for FlashAttention-3: {why_not_prefill}" if arch.has_wgmma else ""
    return (
        f"{spec.cache_dtype} keys and values become fp16 on their way to tensor cores, which is exact"
        + _QUERY_REASONS.get(spec.dtype, ""),
        prompts,
    )


def _eight_bit_params(spec: AttentionSpec) -> ParamTable:
    """Its parameters for an 8-bit cache."""
    declared = {"k": "const cache_t*", "v": "const cache_t*"}
    own = scale_params(spec)
    if spec.element.is_eight_bit:
        declared["o"] = f"{spec.out_element.cuda}*"
        own += query_scale_params()
    params = [replace(p, declared=declared.get(p.name, p.declared)) for p in DECODE_FORWARD.params]
    return ParamTable.widest_first((*params, *own))
