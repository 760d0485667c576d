"""What ``build`` makes: kernels ready to be loaded. It knows nothing of how they are launched."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from flashgen.plan.model import AttentionPlan, KernelPlan, Role


class Loadable(NamedTuple):
    """A kernel ready to be loaded: its plan, its KernelSource, and for a GPU its Binary."""

    plan: KernelPlan
    source: Any
    binary: Any = None


class Variant(NamedTuple):
    """All kernels of a spec for one alignment of the arguments."""

    plan: AttentionPlan
    kernels: Mapping[Role, Loadable]
