"""The IO models by the name of their algorithm."""

from __future__ import annotations

from collections.abc import Callable

from flashgen.errors import PlanError
from flashgen.lab.io.fa1 import fa1
from flashgen.lab.io.lineage import grid1d, grid2d, grid2d_phased, naive
from flashgen.lab.io.sizes import Sizes
from flashgen.lab.io.standard import standard
from flashgen.lab.io.tiled import tiled
from flashgen.lab.io.traffic import AlgorithmIO
from flashgen.plan import plan
from flashgen.spec import Schedule
from flashgen.spec.schedule import Algorithm

#: None where the algorithm has no such pass, or the architecture no such algorithm.
Model = Callable[[Sizes], AlgorithmIO | None]


def fa2(sizes: Sizes) -> AlgorithmIO | None:
    """FlashAttention-2 by the tiles that a plan of that algorithm has."""
    return _tiled_as_planned("fa2", sizes)


def fa3(sizes: Sizes) -> AlgorithmIO | None:
    """FlashAttention-3 by the tiles that a plan of that algorithm has."""
    return _tiled_as_planned("fa3", sizes)


def _tiled_as_planned(algorithm: Algorithm, sizes: Sizes) -> AlgorithmIO | None:
    try:
        attention = plan(sizes.spec, Schedule(algorithm=algorithm), sizes.arch)
    except PlanError:
        return None
    kernel = attention.kernel("forward" if sizes.pass_ == "forward" else "main")
    return tiled(algorithm, sizes, int(kernel.constant("tile_q")), int(kernel.constant("tile_kv")))


MODELS: dict[str, Model] = {
    "naive": naive,
    "standard": standard,
    "fa1": fa1,
    "grid1d": grid1d,
    "grid2d": grid2d,
    "grid2d_phased": grid2d_phased,
    "fa2": fa2,
    "fa3": fa3,
}
