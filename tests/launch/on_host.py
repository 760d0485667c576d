"""Calls on NumPy arrays that are prepared and checked as ever, without kernels to run."""

from __future__ import annotations

from typing import Any

import flashgen as fg
from flashgen.launch.executor import Executor
from flashgen.launch.host import HostTarget
from flashgen.launch.variant import Loadable, Variant
from flashgen.plan import plan, workspaces


class Nothing:
    """In place of a kernel."""

    def launch(self, *_: Any, **__: Any) -> None:
        pass


def executor(**options: Any) -> Executor:
    """The calls of a spec for heads of 16 floats, unless ``options`` say otherwise."""
    attention = plan(fg.AttentionSpec(16, **{"dtype": "fp32", **options}), None, "sm_80")
    kernels = {kernel.role: Loadable(kernel, None) for kernel in attention.kernels}
    variant = Variant(attention, kernels)
    return Executor(variant, lambda access: variant, HostTarget(lambda source: Nothing()), workspaces)
