"""What ``build`` makes: kernels ready to be loaded. It knows nothing of how they are launched."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from flashgen.plan.model.plans import AttentionPlan, KernelPlan, Role


class Loadable(NamedTuple):
    """A kernel ready to be loaded: its plan, its KernelSource, and for a GPU its Binary."""

    plan: KernelPlan
    source: Any
    binary: Any = None
    #: Makes the binary of a kernel that few callers need, once one does.
    compile: Callable[[], Any] | None = None
    #: Makes the binary anew where a driver refuses the one that was kept.
    renew: Callable[[], Any] | None = None

    def compiled(self) -> Loadable:
        """The same with its binary."""
        return self if self.compile is None else self._replace(binary=self.compile(), compile=None)


class Variant(NamedTuple):
    """All kernels of a spec for one alignment of the arguments."""

    plan: AttentionPlan
    kernels: Mapping[Role, Loadable]

    def part(self, *, captured: bool) -> Variant:
        """The kernels of captured gradients, or all others; compiled."""
        chosen = {role: k for role, k in self.kernels.items() if (k.plan.captured is not None) == captured}
        return Variant(self.plan, {role: kernel.compiled() for role, kernel in chosen.items()})
