"""The options every kernel is compiled with; they are part of the cache key."""

from __future__ import annotations

from flashgen.arch import Arch, get_arch

_COMMON = (
    "--std=c++20",
    # A function without __device__ is a device function: constexpr helpers, structs as template arguments.
    "-default-device",
    # Prints registers, spills and shared memory of each kernel, and the assembler's warnings about wgmma.
    "--ptxas-options=-v",
    # With a driver present NVRTC keeps a cache of its own, and on a hit prints none of that.
    "--no-cache",
)
# Not among them: --use_fast_math. It would also change divisions that are meant to be exact and flush
# subnormal numbers everywhere; kernels name the approximate instructions that they want.


def options_for(arch: str | Arch) -> tuple[str, ...]:
    """NVRTC's options, in order, for a cubin that runs on ``arch``."""
    return (f"--gpu-architecture={get_arch(arch).name}", *_COMMON)


def ptx_options_for(arch: str | Arch) -> tuple[str, ...]:
    """The same for PTX: a virtual architecture, so that no time goes into assembling."""
    return (f"--gpu-architecture={get_arch(arch).name.replace('sm_', 'compute_')}", *_COMMON[:2])
