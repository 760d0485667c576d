"""Read the assembler's report: registers, spills, stack and shared memory of a kernel."""

from __future__ import annotations

import re

from flashgen.compile.binary import Resources

_ENTRY = re.compile(r"Compiling entry function '([^']+)'")
_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
_CUMULATIVE = re.compile(r"(\d+) bytes cumulative stack size")
_SMEM = re.compile(r"(\d+)(?:\+\d+)? bytes smem")
#: The messages that say wgmma instructions wait for each other; C7517 tells of one harmless wait.
_SERIALISED = re.compile(r"\(C75(?!17)\d\d\)")


def parse_resources(log: str, name: str) -> Resources | None:
    """What the log of ``--ptxas-options=-v`` says of a kernel; None when it does not mention it."""
    lines = iter(log.splitlines())
    for line in lines:
        entry = _ENTRY.search(line)
        if entry and entry[1] == name:
            break
    else:
        return None
    stack = spills = 0
    for line in lines:
        # The kernel's own frame, and those of functions it calls, come before the line with the registers.
        if frame := _FRAME.search(line):
            stack = max(stack, int(frame[1]))
            spills += int(frame[2]) + int(frame[3])
        if registers := _REGISTERS.search(line):
            cumulative, smem = _CUMULATIVE.search(line), _SMEM.search(line)
            return Resources(
                registers=int(registers[1]),
                spill_bytes=spills,
                stack_bytes=max(stack, int(cumulative[1]) if cumulative else 0),
                static_smem_bytes=int(smem[1]) if smem else 0,
            )
    return None


def serialisation_warnings(log: str) -> list[str]:
    """The lines of a log that say the assembler gave up overlapping wgmma instructions."""
    return [line for line in log.splitlines() if _SERIALISED.search(line)]
