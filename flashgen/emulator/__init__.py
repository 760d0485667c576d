"""Runs a kernel's source on the CPU, thread by thread, and reports bugs that a GPU would hide.

``load(source)`` compiles the text that NVRTC compiles, with host implementations of the primitives.
"""

from __future__ import annotations

from flashgen.emulator.guard import GuardedCall, guarded_copy
from flashgen.emulator.kernel import Buffer, EmulatedKernel, load
from flashgen.emulator.traffic import LaunchTraffic

__all__ = ["Buffer", "EmulatedKernel", "GuardedCall", "LaunchTraffic", "guarded_copy", "load"]
