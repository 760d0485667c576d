"""Run a kernel's source on the CPU, thread by thread, and report what a GPU would hide.

``load(source)`` compiles the very text that NVRTC compiles, against host meanings of the primitives.
"""

from __future__ import annotations

from flashgen.emulator.guard import GuardedCall, guarded_copy
from flashgen.emulator.kernel import Buffer, EmulatedKernel, load
from flashgen.emulator.traffic import LaunchTraffic

__all__ = ["Buffer", "EmulatedKernel", "GuardedCall", "LaunchTraffic", "guarded_copy", "load"]
