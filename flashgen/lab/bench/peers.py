"""Other libraries as candidates: NumPy here, and what needs torch in ``torch_peers``."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec

from flashgen.errors import ArgumentError
from flashgen.lab.bench.candidate import Call, Candidate, RefusedError
from flashgen.lab.bench.case import Case, Inputs, expected_all
from flashgen.lab.timing.device import Device, HostDevice

#: Names, and the modules that each needs.
PEERS: dict[str, tuple[str, ...]] = {
    "torch-math": ("torch",),
    "torch-efficient": ("torch",),
    "torch-cudnn": ("torch",),
    "torch-flash": ("torch",),
    "flex": ("torch", "triton"),
    "flash-attn": ("torch", "flash_attn.flash_attn_interface"),
    "flash-attn-3": ("torch", "flash_attn_interface"),
    "flash-attn-4": ("torch", "flash_attn.cute"),
    "numpy": ("numpy",),
}
#: NumPy takes seconds for so many floating-point operations.
_MOST_NUMPY_FLOPS = 1e11


def missing(name: str) -> str | None:
    """Why a peer cannot run here, as a clause; None if it can."""
    absent = [module for module in PEERS[name] if not _is_installed(module)]
    return f"{absent[0]} is not installed" if absent else None


def installed() -> tuple[str, ...]:
    """The peers that can run here."""
    return tuple(name for name in PEERS if missing(name) is None)


def check_peers(names: Iterable[str]) -> tuple[str, ...]:
    """The same names; an ArgumentError about one that is unknown or cannot run here."""
    found = tuple(dict.fromkeys(names))
    for name in found:
        if name not in PEERS:
            raise ArgumentError(f"peers={name!r} is unknown; use some of {', '.join(PEERS)}")
        if reason := missing(name):
            raise ArgumentError(f"peers={name!r} cannot run: {reason}; install it, or leave it out")
    return found


def peers(names: Iterable[str]) -> tuple[Candidate, ...]:
    """Candidates by name."""
    return tuple(_candidate(name) for name in check_peers(names))


def _candidate(name: str) -> Candidate:
    if name == "numpy":
        return Candidate(name, _numpy, peer=True, device=HostDevice())
    from flashgen.lab.bench.torch_peers import PREPARE

    return Candidate(name, PREPARE[name], peer=True)


def _numpy(case: Case, inputs: Inputs, device: Device) -> Call:
    if case.is_decode:
        raise RefusedError("it has no function for a cache")
    if case.flops > _MOST_NUMPY_FLOPS:
        raise RefusedError(f"{case.flops:.1g} floating-point operations take it too long")
    return lambda: expected_all(case, inputs)


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):
        # The package that holds it is missing, or broken.
        return False
