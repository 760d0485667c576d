"""Exit codes, and which error gives which."""

from __future__ import annotations

from enum import IntEnum

from flashgen.errors import (
    ArgumentError,
    CompileError,
    EmulationError,
    FlashgenError,
    LaunchError,
    NoGpuError,
    PlanError,
    SpecError,
)


class UsageError(FlashgenError):
    """The command line asks for something that cannot be; the message says what to write instead."""


class Exit(IntEnum):
    """What the process tells its parent."""

    OK = 0
    CHECK_FAILED = 1
    USAGE = 2
    NO_GPU = 3
    COMPILE = 4
    MACHINE = 5
    INTERRUPTED = 130


def exit_code(error: FlashgenError) -> Exit:
    """The exit code for an error of ours."""
    if isinstance(error, (SpecError, PlanError, UsageError, ArgumentError)):
        return Exit.USAGE
    if isinstance(error, NoGpuError):
        return Exit.NO_GPU
    if isinstance(error, CompileError):
        return Exit.COMPILE
    if isinstance(error, (LaunchError, EmulationError)):
        return Exit.CHECK_FAILED
    return Exit.MACHINE
