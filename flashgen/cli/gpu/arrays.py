"""The GPUs of this machine, and the architectures that a command builds for."""

from __future__ import annotations

from flashgen.arch import DEFAULT_ARCHS, EIGHT_BIT_ARCHS, Arch, arch_for_capability, get_arch
from flashgen.launch.driver.devices import Gpu as Gpu
from flashgen.launch.driver.devices import find_gpus as find_gpus
from flashgen.spec import AttentionSpec


def gpu_to_build_for(asked: tuple[Arch, ...], gpus: tuple[Gpu, ...]) -> Gpu | None:
    """The GPU that chooses the architecture; None where options name one, or there is no GPU."""
    return gpus[0] if gpus and not asked else None


def archs_to_build(asked: tuple[Arch, ...], gpus: tuple[Gpu, ...], spec: AttentionSpec) -> tuple[Arch, ...]:
    """What was asked for, else the first GPU's, else the spec's defaults."""
    if asked:
        return asked
    if gpus:
        return (arch_for_capability(gpus[0].capability),)
    return tuple(get_arch(name) for name in (EIGHT_BIT_ARCHS if spec.multiplies_eight_bits else DEFAULT_ARCHS))
