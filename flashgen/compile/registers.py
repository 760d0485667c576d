"""What a kernel must not do for want of registers: the assembler says of it when all is compiled.

Checked of each binary, also of one that the cache had: what is refused is kept all the same, so that the next process
need not compile it to learn so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashgen.errors import SerialisedError, SpillError

if TYPE_CHECKING:
    from flashgen.compile.binary import Binary
    from flashgen.plan.model.plans import KernelPlan


def require_registers(plan: KernelPlan, binary: Binary) -> None:
    """A RegistersError where products wait for each other, or where a kernel spills that must not."""
    # Read twice, since hardly any log says so, and a build that compiles nothing does not load what reads it.
    if "(C75" in binary.log:
        from flashgen.compile.resources import serialisation_warnings

        if serialised := serialisation_warnings(binary.log):
            raise SerialisedError(
                f"{binary.name}: the assembler makes the wgmma instructions wait for each other, which costs "
                "most of their speed; keep their registers untouched between issue and wait",
                "\n".join(serialised),
            )
    if binary.resources.spill_bytes and plan.refuses_spills:
        raise SpillError(
            f"{binary.name}: {binary.resources.spill_bytes} bytes per thread leave the registers for local memory; "
            "use a smaller tile_kv in the schedule"
        )
