"""Bytes between device memory and the chip: of a kernel, and of an algorithm."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class KernelIO:
    """What one kernel reads from and writes to device memory, by array. A reduction counts once, as a write."""

    name: str
    reads: Mapping[str, int]
    writes: Mapping[str, int]

    @property
    def read(self) -> int:
        """Bytes read."""
        return sum(self.reads.values())

    @property
    def written(self) -> int:
        """Bytes written."""
        return sum(self.writes.values())

    @property
    def total(self) -> int:
        """Bytes read and written."""
        return self.read + self.written

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as for JSON."""
        return {
            "kernel": self.name,
            "read": self.read,
            "written": self.written,
            "reads": dict(self.reads),
            "writes": dict(self.writes),
        }


@dataclass(frozen=True, slots=True)
class AlgorithmIO:
    """What an algorithm moves, kernel by kernel, and what it stores between them."""

    algorithm: str
    kernels: tuple[KernelIO, ...]
    #: Bytes of each array in device memory that is neither an argument, O nor a gradient.
    stored: Mapping[str, int] = field(default_factory=dict)
    #: What the numbers assume.
    assumptions: str = ""
    #: Rows of a tile of queries and of keys; None where there are no tiles.
    tile: tuple[int, int] | None = None
    #: Whether a count on the emulator agrees within 5 %.
    exact: bool = False
    #: A paper's algorithm as printed, or kernels that flashgen builds.
    basis: Literal["paper", "kernel"] = "kernel"

    @property
    def read(self) -> int:
        """Bytes read by all kernels."""
        return sum(kernel.read for kernel in self.kernels)

    @property
    def written(self) -> int:
        """Bytes written by all kernels."""
        return sum(kernel.written for kernel in self.kernels)

    @property
    def total(self) -> int:
        """Bytes read and written by all kernels."""
        return self.read + self.written

    @property
    def memory(self) -> int:
        """Bytes of device memory beside the arguments, O and the gradients."""
        return sum(self.stored.values())

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as for JSON."""
        return {
            "algorithm": self.algorithm,
            "basis": self.basis,
            "tile": None if self.tile is None else list(self.tile),
            "read": self.read,
            "written": self.written,
            "total": self.total,
            "memory": self.memory,
            "stored": dict(self.stored),
            "exact": self.exact,
            "assumptions": self.assumptions,
            "kernels": [kernel.as_dict() for kernel in self.kernels],
        }
