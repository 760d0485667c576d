"""The rows of the table: the papers' algorithms as printed, and flashgen's kernels of each algorithm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from flashgen.errors import PlanError
from flashgen.lab.io.paper import paper_fa1, paper_standard
from flashgen.lab.io.planned import launched, planned
from flashgen.lab.io.sizes import Sizes
from flashgen.lab.io.traffic import AlgorithmIO
from flashgen.plan import plan
from flashgen.spec import AttentionSpec, Schedule
from flashgen.spec.schedule import Algorithm


@dataclass(frozen=True, slots=True)
class KernelRow:
    """The kernels that flashgen plans for an algorithm."""

    algorithm: Algorithm
    #: What the numbers of either pass say.
    forward: str
    backward: str = ""
    #: Each step of a grid in a launch of its own.
    phased: bool = False
    #: P comes from the forward pass.
    stored_p: bool = False

    def model(self, name: str, sizes: Sizes) -> AlgorithmIO | None:
        """The row; None where the algorithm has no such pass, or no kernel for the spec or the architecture."""
        if sizes.pass_ == "forward" and self.stored_p:
            # The same as without.
            return None
        if sizes.pass_ == "backward" and not self.backward:
            # The backward kernels of such a plan are those of FlashAttention-2.
            return None
        try:
            attention = plan(spec_of_pass(sizes), Schedule(algorithm=self.algorithm), sizes.arch)
        except PlanError:
            return None
        roles = launched(attention, sizes.pass_, phased=self.phased, stored_p=self.stored_p)
        note = self.forward if sizes.pass_ == "forward" else self.backward
        return planned(name, sizes, attention, roles, note)


#: They have no kernels here.
PAPERS: tuple[Callable[[Sizes], AlgorithmIO], ...] = (paper_standard, paper_fa1)
_STANDARD = (
    "S in float32 and P in the dtype go through memory, with rows padded to 8 elements; each row of tiles reads the"
    " right operand again, and each column of tiles the left one; no tile is skipped"
)
_GRID2D = (
    "each pair of tiles that the mask leaves reads Q, K and V, and writes row maxima, sums and a part of O in float32"
)
_FLASH = "Q and O move once, K and V once per tile of queries, without the tiles that the mask skips"
_FLASH_BACKWARD = (
    "K, V, dK and dV move once; Q, dO and two floats per row once per tile of keys, without the tiles that the mask"
    " skips; dQ is summed in float32, or by a kernel of its own"
)
KERNELS: dict[str, KernelRow] = {
    "naive": KernelRow(
        "naive", "each thread reads a row of Q, a row of K and an element of V for each pair that the mask leaves"
    ),
    "standard": KernelRow("standard", _STANDARD, f"{_STANDARD}; P is computed again"),
    "standard_stored_p": KernelRow("standard", _STANDARD, f"{_STANDARD}; the forward pass stored P", stored_p=True),
    "fa1": KernelRow(
        "fa1",
        "K and V move once; Q once per tile of keys, and O, l and m in float32 there and back, without the tiles that"
        " the mask skips",
        _FLASH_BACKWARD,
    ),
    "grid1d": KernelRow("grid1d", _FLASH),
    "grid2d": KernelRow("grid2d", f"{_GRID2D}; S stays in registers while all blocks wait for each other"),
    "grid2d_phased": KernelRow(
        "grid2d", f"{_GRID2D}; three launches, for grids whose blocks do not all run at once", phased=True
    ),
    "fa2": KernelRow("fa2", _FLASH, _FLASH_BACKWARD),
    "fa3": KernelRow("fa3", _FLASH, _FLASH_BACKWARD),
}


def spec_of_pass(sizes: Sizes) -> AttentionSpec:
    """The spec to plan for: what the forward pass moves does not depend on a backward pass."""
    return replace(sizes.spec, direction="forward") if sizes.pass_ == "forward" else sizes.spec


def rows(sizes: Sizes) -> tuple[AlgorithmIO, ...]:
    """All rows that the spec, the pass and the architecture have."""
    kernels = (row.model(name, sizes) for name, row in KERNELS.items())
    return (*(paper(sizes) for paper in PAPERS), *(row for row in kernels if row is not None))
