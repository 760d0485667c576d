"""``build(spec) -> Kernel``: the whole path, from a spec to something that can be called."""

from __future__ import annotations

from flashgen.arch import Arch, get_arch
from flashgen.common.checks import is_one_of
from flashgen.common.recent import Recent
from flashgen.common.show import show
from flashgen.errors import SpecError
from flashgen.kernel import Kernel as Kernel
from flashgen.pipeline import TargetName, plans, variant
from flashgen.spec import AttentionSpec, Schedule

#: What the emulator runs when no arch is named: the oldest that has every feature of the mma.sync kernels.
EMULATED_ARCH = "sm_80"

#: How many kernels are remembered. Where they differ in numbers alone, as in a window's width, each is some 40 KB.
KERNELS_KEPT = 512

_kernels: Recent[tuple[AttentionSpec, Schedule | None, str, str], Kernel] = Recent(KERNELS_KEPT)


def build(
    spec: AttentionSpec,
    schedule: Schedule | None = None,
    *,
    arch: str | Arch | None = None,
    target: TargetName = "gpu",
) -> Kernel:
    """Plans, renders and compiles the kernels of a spec.

    Equal arguments return the same Kernel as long as it is remembered. If the spec captures tensors, the
    returned Kernel has its own tensors and shares everything else.

    ``arch=None`` means the current GPU's architecture; without a GPU it raises NoGpuError. If you name an
    architecture, you need no GPU to build, inspect and save a kernel, only to call it.
    """
    if not isinstance(spec, AttentionSpec):
        raise SpecError(f"spec={show(spec)} is not an AttentionSpec; write AttentionSpec(head_dim=128, dtype='bf16')")
    if schedule is not None and not isinstance(schedule, Schedule):
        raise SpecError(f"schedule={show(schedule)} is not a Schedule; write Schedule(tile_q=128), or leave it out")
    if not is_one_of(target, ("gpu", "emulator")):
        raise SpecError(f"target={show(target)} is unknown; use 'gpu' or 'emulator'")
    row = _arch(arch, target)
    key = (spec, schedule, row.name, target)
    kernel = _kernels.get(key)
    if kernel is None:
        # Two threads may build the same kernel; the cache compiles it once, and the first one here stays.
        bare = spec.declared() if spec.tensors else spec
        (attention,) = plans(bare, schedule, [row])
        built = Kernel(variant(attention, target), target)
        kernel = _kernels.keep((bare, *key[1:]), built)
    # Equal specs may have captured other tensors: those are this Kernel's, all else is shared.
    return kernel.with_tensors(spec.tensors) if spec.tensors else kernel


def built(spec: AttentionSpec, arch: str | Arch) -> Kernel | None:
    """What ``build`` made before of this spec for GPUs; it builds nothing."""
    return _kernels.get((spec, None, get_arch(arch).name, "gpu"))


def _arch(arch: str | Arch | None, target: TargetName) -> Arch:
    if arch is not None:
        return get_arch(arch)
    if target == "emulator":
        return get_arch(EMULATED_ARCH)
    from flashgen.launch.driver.cuda import current_arch

    return current_arch()
