"""The algorithm of each pass, and on Hopper why it is not the newest, in words."""

from __future__ import annotations

from flashgen.arch import ARCHS, Arch
from flashgen.plan.hopper.backward import why_not_backward
from flashgen.plan.hopper.forward import why_not, why_not_prefill
from flashgen.plan.model.plans import KernelPlan
from flashgen.spec import Schedule

#: Why a plan with the kernel prefill also has a forward kernel.
_BESIDE_PREFILL = (
    "the kernel prefill is; this one takes num_splits, left pads in pages, and pages of a size that is not a multiple "
    "of 8"
)


def why_not_fa3(kernel: KernelPlan) -> str | None:
    """Why a forward or main kernel for a Hopper GPU is not FlashAttention-3's, in a clause; None of any other."""
    if kernel.role not in ("forward", "main") or not _is_hopper(kernel.arch):
        return None
    given = kernel.spec, kernel.schedule or Schedule(), kernel.arch, kernel.access_bytes
    if kernel.role == "main":
        return why_not_backward(*given)
    return why_not(*given) if kernel.spec.cache is None else why_not_prefill(*given) or _BESIDE_PREFILL


def describe_algorithm(kernel: KernelPlan) -> str:
    """``FlashAttention-2, not FlashAttention-3: it is made for head_dim 64 ...``."""
    reason = why_not_fa3(kernel)
    return kernel.algorithm if reason is None else f"{kernel.algorithm}, not FlashAttention-3: {reason}"


def _is_hopper(arch: Arch) -> bool:
    """Whether some architecture for these GPUs has what FlashAttention-3 needs."""
    return any(row.has_wgmma for row in ARCHS.values() if row.capability == arch.capability)
