"""The kernels of one spec for each alignment of the arguments: chosen for a call, made and loaded on first use."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

from flashgen.errors import LaunchError
from flashgen.launch.arrays.array import ArrayInfo
from flashgen.launch.call.boxes import encoded_maps
from flashgen.launch.call.packing import Value
from flashgen.launch.call.prepared import make_ready
from flashgen.launch.target import Ready, Target
from flashgen.launch.variant import Variant
from flashgen.plan.fallbacks import access_for_call, access_without_maps
from flashgen.plan.model.plans import AttentionPlan, KernelPlan, Pass, Problem, Role

MakeVariant = Callable[[int], Variant]
Maps = Mapping[Role, Mapping[str | None, Value]]


class Variants:
    """The variants of one built kernel; safe to use from many threads."""

    def __init__(self, variant: Variant, make_variant: MakeVariant, target: Target) -> None:
        self._make_variant = make_variant
        self._target = target
        #: The alignment, in bytes, that the widest accesses of the kernels need.
        self.default = variant.plan.access_bytes
        self._made = {self.default: variant}
        self._loaded: dict[tuple[int, int, bool], Mapping[Role, Ready]] = {}
        self._lock = threading.Lock()

    def plan(self, access: int) -> AttentionPlan:
        """The plan for an alignment."""
        return self._made[access].plan

    def mapped(
        self, pass_: Pass, access: int, problem: Problem, scale: float, arrays: Sequence[ArrayInfo], device: int
    ) -> tuple[int, Maps]:
        """The alignment to use for a call, and its tensor maps: only the widest alignment has any."""
        maps: dict[Role, Mapping[str | None, Value]] = {}
        if access < self.default:
            return access, maps

        def has_maps(kernel: KernelPlan) -> bool:
            encoded = encoded_maps(kernel, problem, arrays, self._target, device)
            if encoded is not None:
                maps[kernel.role] = encoded
            return encoded is not None

        chosen = access_for_call(self.plan(access), pass_, problem, scale, has_maps)
        return chosen, maps if chosen == access else {}

    def kernels(self, access: int, device: int, stream: int | None, *, captured: bool = False) -> Mapping[Role, Ready]:
        """The loaded kernels for an alignment, those of captured gradients or the others, in the order in which
        they run; the only place that compiles or loads."""
        key = access, device, captured
        kernels = self._loaded.get(key)
        if kernels is not None:
            return kernels
        if stream is not None and self._target.is_capturing(stream, device):
            raise LaunchError(
                f"a CUDA graph is being captured, and the kernel for {access}-byte aligned arguments is not "
                f"loaded on cuda:{device}; call kernel.warmup({device}, access_bytes={access}"
                f"{', captured_gradients=True' if captured else ''}) first, or call it once before"
            )
        with self._lock:
            if access not in self._made:
                self._made[access] = self._make_variant(access)
            if key not in self._loaded:
                self._loaded[key] = make_ready(self._made[access].part(captured=captured), self._target, device)
        return self._loaded[key]

    def load(self, device: int, access_bytes: int | None = None, captured_gradients: bool = False) -> None:
        """Compiles and loads a variant now (the default one unless ``access_bytes`` names another)."""
        access = self.default if access_bytes is None else min(access_bytes, self.default)
        self.kernels(access, device, None)
        if access == self.default:
            without = access_without_maps(self.plan(access))
            if without != access and not self._target.takes_maps(device):
                self.kernels(without, device, None)
        if captured_gradients:
            self.kernels(access, device, None, captured=True)
