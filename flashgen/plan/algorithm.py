"""Which algorithm a forward kernel runs by, and on Hopper why, in words."""

from __future__ import annotations

from flashgen.arch import ARCHS, Arch
from flashgen.plan.forward_sm90 import why_not
from flashgen.plan.model import KernelPlan
from flashgen.spec import Schedule


def why_not_fa3(kernel: KernelPlan) -> str | None:
    """Why a forward kernel for a Hopper GPU is not FlashAttention-3's, in a clause; None of any other kernel."""
    if kernel.role != "forward" or not _is_hopper(kernel.arch):
        return None
    return why_not(kernel.spec, kernel.schedule or Schedule(), kernel.arch, kernel.access_bytes)


def describe_algorithm(kernel: KernelPlan) -> str:
    """``FlashAttention-2, not FlashAttention-3: it is made for head_dim 64 ...``."""
    reason = why_not_fa3(kernel)
    return kernel.algorithm if reason is None else f"{kernel.algorithm}, not FlashAttention-3: {reason}"


def _is_hopper(arch: Arch) -> bool:
    """Whether some architecture for these GPUs has what FlashAttention-3 needs."""
    return any(row.has_wgmma for row in ARCHS.values() if row.capability == arch.capability)
