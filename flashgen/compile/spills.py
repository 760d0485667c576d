"""What a user can do about a kernel that spills: another NVRTC, or a smaller tile."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flashgen.compile.binary import Resources
    from flashgen.plan.model.plans import KernelPlan

#: The NVRTC release of docs/reference/compile-matrix.md. Older ones spill in a few kernels where it does not.
MEASURED_RELEASE = (13, 5)
_VERSION = re.compile(r"release \d+\.\d+, V(\d+\.\d+[\d.]*)")


def spill_warning(plan: KernelPlan, resources: Resources, build_id: str) -> str | None:
    """A sentence about the spills of a kernel and their remedy; None when nothing spills.

    ``build_id`` is that of the NVRTC in use, as ``compiler_build_id`` returns it.
    """
    if not resources.spill_bytes:
        return None
    version = _VERSION.search(build_id)
    compiler = version[1] if version else f"of build {build_id!r}"
    spills = f"{plan.name} spills {resources.spill_bytes} bytes per thread with NVRTC {compiler}"
    if nvrtc_release(build_id) < MEASURED_RELEASE and _is_measured_without_spills(plan):
        wanted = ".".join(map(str, MEASURED_RELEASE))
        remedy = f"NVRTC {wanted} compiles it without spills: pip install 'nvidia-cuda-nvrtc>={wanted},<14'"
    else:
        backward = "backward-" if plan.pass_ == "backward" else ""
        remedy = f"try smaller tiles (--{backward}tile-q, --{backward}tile-kv)"
    return f"{spills}; {remedy}"


def nvrtc_release(build_id: str) -> tuple[int, int]:
    """The release that a build belongs to, such as (13, 0); one that names none counts as the measured one."""
    version = _VERSION.search(build_id)
    if version is None:
        return MEASURED_RELEASE
    major, minor, *_ = version[1].split(".")
    return int(major), int(minor)


def _is_measured_without_spills(plan: KernelPlan) -> bool:
    """Whether docs/reference/compile-matrix.md has no spills for such kernels: planned tiles, band mask, no score."""
    if plan.schedule is not None or plan.expressions is not None:
        return False
    head_dim = max(plan.spec.head_dim, plan.spec.head_dim_v)
    most = 96 if not plan.arch.has_cp_async else 128 if plan.spec.dtype == "fp32" else 256
    return head_dim <= most
