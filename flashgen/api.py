"""``build(spec) -> Kernel``: the whole path, from a spec to something that can be called."""

from __future__ import annotations

from functools import partial

from flashgen.arch import EIGHT_BIT_ARCHS, Arch, arch_for_capability, get_arch
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

#: The last part of a key is the CUDA ordinal where the GPU chose the architecture.
_kernels: Recent[tuple[AttentionSpec, Schedule | None, str, str, int | None], Kernel] = Recent(KERNELS_KEPT)


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
    if arch is None and target == "gpu":
        return build_on(_current_device(), spec, schedule)
    return _build(spec, schedule, get_arch(emulated_arch(spec) if arch is None else arch), target, None)


def emulated_arch(spec: AttentionSpec) -> str:
    """What the emulator runs when no arch is named."""
    return EIGHT_BIT_ARCHS[0] if spec.multiplies_eight_bits else EMULATED_ARCH


def build_on(device: int, spec: AttentionSpec, schedule: Schedule | None = None) -> Kernel:
    """The same for a GPU, by its CUDA ordinal: if a schedule was tuned there and none is given, it is used."""
    from flashgen.launch.driver.cuda import get_driver

    return _build(spec, schedule, arch_for_capability(get_driver().capability(device)), "gpu", device)


def _build(spec: AttentionSpec, schedule: Schedule | None, row: Arch, target: TargetName, device: int | None) -> Kernel:
    key = (spec, schedule, row.name, target, device)
    kernel = _kernels.get(key)
    if kernel is None:
        # Two threads may build the same kernel; the cache compiles it once, and the first one here stays.
        bare = spec.declared() if spec.tensors else spec
        gpu = None if device is None else partial(_name_of, device)
        (attention,) = plans(bare, schedule, [row], gpu=gpu)
        built = Kernel(variant(attention, target), target)
        kernel = _kernels.keep((bare, *key[1:]), built)
    # Equal specs may have captured other tensors: those are this Kernel's, all else is shared.
    return kernel.with_tensors(spec.tensors) if spec.tensors else kernel


def built(spec: AttentionSpec, arch: str | Arch, device: int | None = None) -> Kernel | None:
    """What was built before of this spec for a GPU, or for its architecture; it builds nothing."""
    name = get_arch(arch).name
    return _kernels.get((spec, None, name, "gpu", device)) or _kernels.get((spec, None, name, "gpu", None))


def forget(spec: AttentionSpec) -> None:
    """Lets the next build of a spec on a GPU look at the table of tuned schedules again."""
    _kernels.forget(lambda key: key[0] == spec and key[4] is not None)


def _current_device() -> int:
    from flashgen.launch.driver.cuda import current_device

    return current_device()


def _name_of(device: int) -> str:
    from flashgen.launch.driver.cuda import get_driver

    return get_driver().device_name(device)
