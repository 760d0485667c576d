"""What a bench times: an implementation of attention under a name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from flashgen.lab.bench.case import Case, Inputs
from flashgen.lab.timing.device import Device

#: A prepared call; it returns O, or dQ, dK and dV.
Call = Callable[[], Sequence[Any]]


class RefusedError(Exception):
    """An implementation does not cover a case; the text says why, as a clause."""


class Prepare(Protocol):
    """Makes the call of a case for inputs on a device, with everything done that is not to be timed."""

    def __call__(self, case: Case, inputs: Inputs, device: Device) -> Call:
        """A RefusedError if the case is not covered."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """An implementation to be timed."""

    name: str
    prepare: Prepare
    #: Whether it belongs to another library.
    peer: bool = False
    #: Where it runs instead of the bench's device.
    device: Device | None = None
