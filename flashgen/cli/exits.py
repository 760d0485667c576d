"""Exit codes, and which error gives which."""

from __future__ import annotations

from enum import IntEnum

from flashgen.errors import CompileError, FlashgenError, NoGpuError, PlanError, SpecError


class UsageError(FlashgenError):
    """The command line asks for something that cannot be; the message says what to write instead."""


class Exit(IntEnum):
    """What the process tells its parent."""

    OK = 0
    CHECK_FAILED = 1
    USAGE = 2
    NO_GPU = 3
    COMPILE = 4
    INTERRUPTED = 130


def exit_code(error: FlashgenError) -> Exit:
    """The exit code for an error of ours."""
    if isinstance(error, (SpecError, PlanError, UsageError)):
        return Exit.USAGE
    if isinstance(error, NoGpuError):
        return Exit.NO_GPU
    if isinstance(error, CompileError):
        return Exit.COMPILE
    return Exit.CHECK_FAILED
