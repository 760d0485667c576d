"""Every exception flashgen raises on purpose; each message names the thing, its value and the remedy.

Messages show values by ``flashgen.common.show.show``, which keeps them short. What still grows too long, such as
the log of a compiler or a list of many violations, is cut; ``log`` and ``violations`` hold all of it.
"""

from __future__ import annotations

#: No message is longer.
LONGEST_MESSAGE = 2000


class FlashgenError(Exception):
    """Base of all flashgen errors."""

    def __str__(self) -> str:
        # Not in __init__, which torch.compile would have to trace.
        return cut(super().__str__())


def cut(message: str, longest: int = LONGEST_MESSAGE) -> str:
    """The message, or its begin where it is longer than that."""
    if len(message) <= longest:
        return message
    kept = longest - 60
    return f"{message[:kept]}\n... and {len(message) - kept} more characters"


class SpecError(FlashgenError, ValueError):
    """A spec or schedule contradicts itself; ``violations`` lists every problem found, not only the first."""

    def __init__(self, *violations: str) -> None:
        self.violations = tuple(violations)
        super().__init__("\n".join(violations))


class TraceError(SpecError):
    """A mask or score is not in the expression language; the message shows the user's own line."""


class PlanError(FlashgenError, ValueError):
    """The spec is sound, but no kernel for it fits the chosen architecture and schedule."""


class CompileError(FlashgenError, RuntimeError):
    """NVRTC or the host compiler refused the source; ``log`` is what it printed, by template line."""

    def __init__(self, message: str, log: str = "") -> None:
        self.log = log
        super().__init__(message + ("\n" + log if log else ""))


class RegistersError(CompileError):
    """The assembler has too few registers for a kernel that is no use without them; another kernel may be."""


class SerialisedError(RegistersError):
    """The assembler makes tensor-core instructions wait for each other, mostly for want of registers."""


class SpillError(RegistersError):
    """Registers leave for local memory in a kernel whose inner loop has no time for that."""


class CacheError(FlashgenError, RuntimeError):
    """The kernel cache directory is not safe to read from."""


class LaunchError(FlashgenError, RuntimeError):
    """A call's arguments, device or stream do not allow the launch; nothing was launched."""


class DriverError(LaunchError):
    """A call of the CUDA driver failed; ``status`` is the driver's name for why, such as CUDA_ERROR_OUT_OF_MEMORY."""

    def __init__(self, message: str, status: str) -> None:
        self.status = status
        super().__init__(message)


class ArgumentError(LaunchError, ValueError):
    """A tensor argument has a shape, dtype, stride or device the kernel does not accept."""


class NoGpuError(LaunchError):
    """No NVIDIA GPU (or no driver) was found and the operation needs one."""


class EmulationError(FlashgenError, RuntimeError):
    """The emulator found a fault in the kernel it ran.

    The attributes hold what the message says; an unknown one is None. ``kind`` is such as ``"race"``
    or ``"deadlock"``, ``file`` and ``line`` are the innermost place in the kernel's source, ``block`` is
    ``(x, y, z)``, and ``schedule``, ``seed``, ``race`` and ``resident`` repeat the launch.
    """

    def __init__(
        self,
        message: str,
        *,
        kind: str | None = None,
        kernel: str | None = None,
        file: str | None = None,
        line: int | None = None,
        block: tuple[int, int, int] | None = None,
        warp: int | None = None,
        lane: int | None = None,
        schedule: str | None = None,
        seed: int | None = None,
        race: bool | None = None,
        resident: int | None = None,
    ) -> None:
        self.kind = kind
        self.kernel = kernel
        self.file = file
        self.line = line
        self.block = block
        self.warp = warp
        self.lane = lane
        self.schedule = schedule
        self.seed = seed
        self.race = race
        self.resident = resident
        super().__init__(message)
