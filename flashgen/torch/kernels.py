"""Which kernel a call on tensors means; each combination is built once and then found in a dictionary."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from flashgen.api import KERNELS_KEPT, Kernel, build, build_on, built, emulated_arch
from flashgen.arch import Arch, arch_for_capability, get_arch
from flashgen.common.recent import Recent
from flashgen.errors import ArgumentError, LaunchError, PlanError
from flashgen.launch.arrays.array import HOST, dtype_name
from flashgen.launch.driver.cuda import get_driver
from flashgen.plan import plan
from flashgen.spec import AttentionSpec, KVCache
from flashgen.spec.attention import MAX_HEAD_DIM, CacheKind
from flashgen.torch.program import Limits, Program, spec_of
from flashgen.torch.replay import forget_host
from flashgen.torch.scales import out_dtype_of
from flashgen.torch.sdpa.switch import Switch

_HALVES = (torch.float16, torch.bfloat16)
_DTYPES = (*_HALVES, torch.float32)
#: Of caches that do not have q's dtype.
EIGHT_BITS = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
#: The one that queries may have.
EIGHT_BIT_INPUTS = torch.float8_e4m3fn
#: The decode kernel runs calls with so few queries and so many keys, or more extreme ones. With fewer keys a call takes
#: no longer than its launch.
_FEW_QUERIES, _MANY_KEYS = 16, 256
#: The cache of such a call.
ALL_KEYS = KVCache()

_kernels: Recent[Any, Kernel] = Recent(KERNELS_KEPT)
#: How often ``emulate_cpu`` was called and not taken back.
_emulating = 0


def kernel_for(
    q: Any,
    v: Any,
    program: Program,
    *,
    gradients: bool,
    deterministic: bool,
    drops: bool = False,
    packed: bool = False,
) -> Kernel:
    """The kernel for these tensors, on their device."""
    options = gradients, gradients and deterministic, drops, packed
    key = (q.shape[-1], v.shape[-1], q.dtype, program.rule, *options, q.get_device())
    kernel = _kernels.get(key)
    if kernel is None:
        kernel = _kernels.keep(key, _build(*key))
    return kernel


def forward_kernel(
    q: Any, v: Any, program: Program, *, deterministic: bool, drops: bool = False, packed: bool = False
) -> Kernel:
    """A kernel that has at least the forward pass: one built for training too, if there is one already."""
    for reproducible in (deterministic, not deterministic):
        key = (q.shape[-1], v.shape[-1], q.dtype, program.rule, True, reproducible, drops, packed, q.get_device())
        kernel = _kernels.get(key)
        if kernel is not None:
            return kernel
    return kernel_for(q, v, program, gradients=False, deterministic=False, drops=drops, packed=packed)


def cached_kernel_for(
    q: Any,
    v_cache: Any,
    program: Program,
    cache: CacheKind,
    *,
    page_scales: bool = False,
    has_qv: bool = False,
    out_dtype: Any = None,
) -> Kernel:
    """The kernel for queries that attend to a cache, on their device."""
    dims, more = (q.shape[-1], v_cache.shape[-1]), {"page_scales": page_scales, "has_qv": has_qv}
    more["out_dtype"] = out_dtype
    return cached_kernel(*dims, q.dtype, program, cache, q.get_device(), v_cache.dtype, **more)


def eight_bit_kernel(
    q: Any, v: Any, program: Program, scale_block: int | None, out_dtype: str, *, packed: bool
) -> Kernel:
    """The kernel for 8-bit queries, keys and values."""
    key = (q.shape[-1], v.shape[-1], q.dtype, program.rule, scale_block, out_dtype, packed, q.get_device())
    kernel = _kernels.get(key)
    if kernel is None:
        dims: dict[str, Any] = {"head_dim": q.shape[-1], "head_dim_v": v.shape[-1], "dtype": EIGHT_BITS[q.dtype]}
        more: dict[str, Any] = {"out_dtype": out_dtype, "scale_block": scale_block, "varlen": packed}
        spec = replace(spec_of(program.rule), direction="forward", **dims, **more)
        kernel = _kernels.keep(key, _build_on(q.get_device(), spec))
    return kernel


def decode_kernel_for(q: Any, v: Any, program: Program) -> Kernel:
    """The kernel for a call that ``suits_decode``: k and v have q's dtype."""
    return cached_kernel(q.shape[-1], v.shape[-1], q.dtype, program, "contiguous", q.get_device())


def cached_kernel(
    head_dim: int,
    head_dim_v: int,
    dtype: torch.dtype,
    program: Program,
    cache: CacheKind,
    device: int,
    cache_dtype: torch.dtype | None = None,
    *,
    page_scales: bool = False,
    has_qv: bool = False,
    out_dtype: Any = None,
) -> Kernel:
    """The kernel for a cache that is still to come. One that is not in 8 bits has q's dtype.

    ``out_dtype`` is for 8-bit queries. Values that only calls with ``qv`` take have such a kernel in any case.
    """
    has_qv = has_qv or head_dim_v > MAX_HEAD_DIM
    if dtype is EIGHT_BIT_INPUTS:
        cache_dtype, out_dtype = cache_dtype or dtype, out_dtype_of(out_dtype)
    of_keys = None if cache_dtype is None else EIGHT_BITS.get(cache_dtype)
    key = (head_dim, head_dim_v, dtype, program.rule, cache, of_keys, page_scales, has_qv, out_dtype, device)
    kernel = _kernels.get(key)
    if kernel is None:
        of_cache: dict[str, Any] = {"cache": cache, "cache_dtype": of_keys, "page_scales": page_scales, "qv": has_qv}
        of_cache["out_dtype"] = None if out_dtype is None else dtype_name(str(out_dtype))
        spec = _spec(head_dim, head_dim_v, dtype, program.rule, direction="forward", **of_cache)
        kernel = _kernels.keep(key, _build_on(device, spec))
    return kernel


def quantizing_kernel_for(q: Any, v: Any, program: Program, block: int, *, packed: bool) -> Kernel:
    """The kernel that quantizes 16-bit tensors to e4m3 and attends to them, on their device."""
    if q.dtype not in _HALVES:
        raise ArgumentError(f"q is {q.dtype}; convert it: fp8_attention quantizes float16 and bfloat16")
    key = (q.shape[-1], v.shape[-1], q.dtype, program.rule, "e4m3", block, packed, q.get_device())
    kernel = _kernels.get(key)
    if kernel is None:
        dims: dict[str, Any] = {"head_dim": q.shape[-1], "head_dim_v": v.shape[-1], "scale_block": block}
        dims |= {"dtype": "e4m3", "out_dtype": dtype_name(str(q.dtype)), "varlen": packed, "direction": "forward"}
        kernel = _kernels.keep(key, _build_on(q.get_device(), replace(spec_of(program.rule), **dims)))
    return kernel


def suits_decode(q: Any, k: Any, *, drops: bool = False, packed: bool = False) -> bool:
    """Whether the forward pass of a call is one for the decode kernel: few queries that attend to many keys.

    Its keys are then a cache that is full. Each is read once for all query heads that share it. Only shapes decide, so
    that eager and compiled calls, with and without gradients, have the same bits.
    """
    return not drops and not packed and q.dtype in _HALVES and _has_few_queries(q, k)


def eight_bits_suit_decode(q: Any, k: Any, scale_block: int | None, *, packed: bool) -> bool:
    """The same for 8-bit queries, keys and values. The decode kernel takes no scales of blocks."""
    return not packed and scale_block is None and _has_few_queries(q, k)


def _has_few_queries(q: Any, k: Any) -> bool:
    return bool(q.dim() == k.dim() == 4 and q.shape[1] <= _FEW_QUERIES and k.shape[1] >= _MANY_KEYS)


def emulate_cpu() -> Switch:
    """Runs calls on CPU tensors on the emulator, which is slow, until the result's ``remove()`` or ``with`` ends.

    For tests and for learning: the kernels are those for sm_80, and a stray access of theirs is an error.
    """
    global _emulating
    _emulating += 1
    return Switch(_stop_emulating)


def is_emulating() -> bool:
    """Whether CPU tensors may be attended to."""
    return _emulating > 0


def can_build(device: int) -> bool:
    """Whether kernels for a device can be built now: CPU tensors need the emulator."""
    return device != HOST or is_emulating()


def _stop_emulating() -> None:
    global _emulating
    _emulating -= 1
    if not _emulating:
        _kernels.forget(lambda key: key[-1] == HOST)
        forget_host()


def _build(
    head_dim: int,
    head_dim_v: int,
    dtype: torch.dtype,
    rule: Limits | str,
    gradients: bool,
    deterministic: bool,
    drops: bool,
    packed: bool,
    device: int,
) -> Kernel:
    options = {"deterministic": deterministic, "dropout": drops, "varlen": packed}
    spec = _spec(head_dim, head_dim_v, dtype, rule, direction="both" if gradients else "forward", **options)
    return _build_on(device, spec)


def _spec(head_dim: int, head_dim_v: int, dtype: torch.dtype, rule: Limits | str, **fields: Any) -> AttentionSpec:
    if dtype not in _DTYPES and dtype is not EIGHT_BIT_INPUTS:
        raise ArgumentError(
            f"q is {dtype}; convert it: attention computes in float16, bfloat16, float32 and float8_e4m3fn"
        )
    dims: dict[str, Any] = {"head_dim": head_dim, "head_dim_v": head_dim_v, "dtype": dtype_name(str(dtype))}
    return replace(spec_of(rule), **dims, **fields)


@lru_cache(maxsize=1024)
def is_planned(
    program: Program,
    head_dim: int,
    head_dim_v: int,
    dtype: torch.dtype,
    gradients: bool,
    drops: bool,
    device: int,
) -> bool:
    """Whether there is a plan for such a call. It builds nothing, so it can be asked while torch.compile records."""
    direction = "both" if gradients else "forward"
    spec = _spec(head_dim, head_dim_v, dtype, program.rule, direction=direction, dropout=drops)
    try:
        plan(spec, None, get_arch(emulated_arch(spec)) if device == HOST else _arch_of(device))
    except PlanError:
        return False
    return True


def _build_on(device: int, spec: AttentionSpec) -> Kernel:
    if device != HOST:
        return _built_before(spec, _arch_of(device), device) if _is_capturing() else build_on(device, spec)
    if not _emulating:
        raise ArgumentError(
            "q is on the CPU, but attention runs on NVIDIA GPUs; move it there with q.cuda(), or call "
            "flashgen.torch.emulate_cpu() to run tiny cases on the emulator"
        )
    return build(spec, target="emulator")


def _arch_of(device: int) -> Arch:
    return arch_for_capability(get_driver().capability(device))


def _is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _built_before(spec: AttentionSpec, arch: Arch, device: int) -> Kernel:
    """What is not built yet cannot be captured: compiling and loading are not work for a stream."""
    kernel = built(spec, arch, device) or built(replace(spec, direction="both"), arch, device)
    if kernel is None:
        raise LaunchError(
            "a CUDA graph is being captured, and no kernel for this call is built yet; make the same call once "
            "before the capture, or call flashgen.build(spec).warmup() for it"
        )
    return kernel
