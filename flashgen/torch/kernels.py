"""Which kernel a call on tensors means; each combination is built once and then found in a dictionary."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from flashgen.api import KERNELS_KEPT, Kernel, build, built
from flashgen.arch import Arch, arch_for_capability
from flashgen.common.recent import Recent
from flashgen.errors import ArgumentError, LaunchError
from flashgen.launch.arrays.array import HOST, dtype_name
from flashgen.launch.driver.cuda import get_driver
from flashgen.spec import AttentionSpec, Mask
from flashgen.spec.attention import CacheKind
from flashgen.spec.masks.band import Band
from flashgen.torch.replay import forget_host
from flashgen.torch.sdpa.switch import Switch
from flashgen.torch.tracing.program import Limits, spec_of

NO_LIMITS: Limits = (None, None, None, None)
#: What a kernel computes: a mask's limits, or the text of a program.
What = Limits | str

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)

_kernels: Recent[Any, Kernel] = Recent(KERNELS_KEPT)
#: How often ``emulate_cpu`` was called and not taken back.
_emulating = 0


def kernel_for(
    q: Any,
    v: Any,
    what: What,
    *,
    gradients: bool,
    deterministic: bool,
    drops: bool = False,
    packed: bool = False,
) -> Kernel:
    """The kernel for these tensors, on their device."""
    options = gradients, gradients and deterministic, drops, packed
    key = (q.shape[-1], v.shape[-1], q.dtype, what, *options, q.get_device())
    kernel = _kernels.get(key)
    if kernel is None:
        kernel = _kernels.keep(key, _build(*key))
    return kernel


def forward_kernel(
    q: Any, v: Any, what: What, *, deterministic: bool, drops: bool = False, packed: bool = False
) -> Kernel:
    """A kernel that has at least the forward pass: one built for training too, if there is one already."""
    for reproducible in (deterministic, not deterministic):
        key = (q.shape[-1], v.shape[-1], q.dtype, what, True, reproducible, drops, packed, q.get_device())
        kernel = _kernels.get(key)
        if kernel is not None:
            return kernel
    return kernel_for(q, v, what, gradients=False, deterministic=False, drops=drops, packed=packed)


def cached_kernel_for(q: Any, v_cache: Any, program: str, cache: CacheKind) -> Kernel:
    """The kernel for queries that attend to a cache, on their device."""
    key = (q.shape[-1], v_cache.shape[-1], q.dtype, program, cache, q.get_device())
    kernel = _kernels.get(key)
    if kernel is None:
        _check_dtype(q.dtype)
        dims = {"head_dim": q.shape[-1], "head_dim_v": v_cache.shape[-1], "dtype": dtype_name(str(q.dtype))}
        spec = replace(spec_of(program), **dims, direction="forward", cache=cache)
        kernel = _kernels.keep(key, _build_on(q.get_device(), spec))
    return kernel


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
    what: What,
    gradients: bool,
    deterministic: bool,
    drops: bool,
    packed: bool,
    device: int,
) -> Kernel:
    _check_dtype(dtype)
    base = spec_of(what) if isinstance(what, str) else AttentionSpec(1, mask=Mask(Band(*what[:2]), Band(*what[2:])))
    spec = replace(
        base,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        dtype=dtype_name(str(dtype)),
        direction="both" if gradients else "forward",
        deterministic=deterministic,
        dropout=drops,
        varlen=packed,
    )
    return _build_on(device, spec)


def _check_dtype(dtype: torch.dtype) -> None:
    if dtype not in _DTYPES:
        raise ArgumentError(f"q is {dtype}; convert it: attention computes in float16, bfloat16 and float32")


def _build_on(device: int, spec: AttentionSpec) -> Kernel:
    if device != HOST:
        arch = arch_for_capability(get_driver().capability(device))
        return _built_before(spec, arch) if _is_capturing() else build(spec, arch=arch)
    if not _emulating:
        raise ArgumentError(
            "q is on the CPU, but attention runs on NVIDIA GPUs; move it there with q.cuda(), or call "
            "flashgen.torch.emulate_cpu() to run tiny cases on the emulator"
        )
    return build(spec, target="emulator")


def _is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _built_before(spec: AttentionSpec, arch: Arch) -> Kernel:
    """What is not built yet cannot be captured: compiling and loading are not work for a stream."""
    kernel = built(spec, arch) or built(replace(spec, direction="both"), arch)
    if kernel is None:
        raise LaunchError(
            "a CUDA graph is being captured, and no kernel for this call is built yet; make the same call once "
            "before the capture, or call flashgen.build(spec).warmup() for it"
        )
    return kernel
