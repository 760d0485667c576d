"""Which kernel a call on tensors means; each combination is built once and then found in a dictionary."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from flashgen.api import Kernel, build
from flashgen.arch import arch_for_capability
from flashgen.errors import ArgumentError
from flashgen.launch.array import dtype_name
from flashgen.launch.driver import get_driver
from flashgen.spec import AttentionSpec, Mask
from flashgen.spec.mask import Band
from flashgen.torch.programs import spec_of

#: Limits of the mask's two bands: left and right from the last key, left and right from the first key.
Limits = tuple[int | None, int | None, int | None, int | None]
NO_LIMITS: Limits = (None, None, None, None)
#: What a kernel computes: a mask's limits, or the text of a program.
What = Limits | str

_kernels: dict[Any, Kernel] = {}


def limits_of(mask: Mask) -> Limits:
    """A mask as four numbers that an operator schema can carry."""
    bottom_right, top_left = mask.bottom_right, mask.top_left
    return bottom_right.left, bottom_right.right, top_left.left, top_left.right


def kernel_for(q: Any, v: Any, what: What, *, gradients: bool, deterministic: bool) -> Kernel:
    """The kernel for these tensors, on their device."""
    key = (q.shape[-1], v.shape[-1], q.dtype, what, gradients, gradients and deterministic, q.get_device())
    kernel = _kernels.get(key)
    if kernel is None:
        kernel = _kernels[key] = _build(*key)
    return kernel


def forward_kernel(q: Any, v: Any, what: What, *, deterministic: bool) -> Kernel:
    """A kernel that has at least the forward pass: one built for training too, if there is one already."""
    for reproducible in (deterministic, not deterministic):
        key = (q.shape[-1], v.shape[-1], q.dtype, what, True, reproducible, q.get_device())
        if key in _kernels:
            return _kernels[key]
    return kernel_for(q, v, what, gradients=False, deterministic=False)


def check_device(device: int) -> None:
    """Kernels run on GPUs only."""
    if device < 0:
        raise ArgumentError("q is on the CPU, but attention runs on NVIDIA GPUs; move it there with q.cuda()")


def _build(
    head_dim: int,
    head_dim_v: int,
    dtype: torch.dtype,
    what: What,
    gradients: bool,
    deterministic: bool,
    device: int,
) -> Kernel:
    check_device(device)
    base = spec_of(what) if isinstance(what, str) else AttentionSpec(1, mask=Mask(Band(*what[:2]), Band(*what[2:])))
    spec = replace(
        base,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        dtype=dtype_name(str(dtype)),
        direction="both" if gradients else "forward",
        deterministic=deterministic,
    )
    return build(spec, arch=arch_for_capability(get_driver().capability(device)))
