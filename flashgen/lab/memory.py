"""``memory(spec, len_q, ...)``: the device memory that a forward and a backward call take."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from flashgen.arch import Arch
from flashgen.dtypes import RESULTS
from flashgen.errors import ArgumentError
from flashgen.lab.io.model import sizes_of
from flashgen.lab.io.sizes import Sizes
from flashgen.lab.text import bytes_text, html_table, table
from flashgen.launch.call.prepared import (
    BACKWARD_RESULTS,
    Output,
    backward_outputs,
    forward_outputs,
    shared_allocation,
    workspace_outputs,
)
from flashgen.launch.call.probabilities import computing_workspaces
from flashgen.plan import plan, workspaces
from flashgen.plan.model.plans import AttentionPlan, Pass
from flashgen.spec import AttentionSpec, Schedule

#: torch's caching allocator hands out multiples of so many bytes.
ROUNDING = 512

_COLUMNS = ("pass", "arguments", "results", "workspaces", "peak")


@dataclass(frozen=True, slots=True)
class PassMemory:
    """The arrays of one pass, by name, in bytes as the allocator rounds them."""

    pass_: Pass
    arguments: Mapping[str, int]
    results: Mapping[str, int]
    #: The workspaces of a call share one allocation.
    workspaces: Mapping[str, int]

    @property
    def allocated(self) -> int:
        """What the call allocates: its results and workspaces."""
        return sum(self.results.values()) + sum(self.workspaces.values())

    @property
    def peak(self) -> int:
        """All that is alive while the kernels run."""
        return sum(self.arguments.values()) + self.allocated

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as for JSON."""
        return {
            "pass": self.pass_,
            "arguments": dict(self.arguments),
            "results": dict(self.results),
            "workspaces": dict(self.workspaces),
            "peak": self.peak,
        }


@dataclass(frozen=True, slots=True)
class Memory:
    """Peak device memory of the passes of a spec; ``str()`` draws a table."""

    sizes: Sizes
    passes: tuple[PassMemory, ...]

    def __getitem__(self, pass_: str) -> PassMemory:
        for found in self.passes:
            if found.pass_ == pass_:
                return found
        raise KeyError(pass_)

    @property
    def peak(self) -> int:
        """The larger peak of the two passes."""
        return max(found.peak for found in self.passes)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as for JSON."""
        return {"peak": self.peak, "passes": [found.as_dict() for found in self.passes]}

    def __str__(self) -> str:
        return "\n".join([table(self._cells()), f"each array in blocks of {ROUNDING} bytes"])

    def _repr_html_(self) -> str:
        return html_table(self._cells(), f"device memory of {self.sizes.spec.describe()}")

    def _cells(self) -> Iterator[tuple[str, ...]]:
        yield _COLUMNS
        for found in self.passes:
            parts = (sum(part.values()) for part in (found.arguments, found.results, found.workspaces))
            yield (found.pass_, *map(bytes_text, parts), bytes_text(found.peak))


def memory(
    spec: AttentionSpec,
    len_q: int,
    len_kv: int | None = None,
    *,
    batch: int = 1,
    heads: int = 1,
    heads_kv: int | None = None,
    arch: str | Arch = "sm_80",
    schedule: Schedule | None = None,
) -> Memory:
    """Device memory of a forward and, if the spec has one, a backward call of a built kernel.

    With ``Schedule(algorithm="standard")`` the forward call does not return P, and the backward call computes it again.
    Arguments are contiguous arrays of their own. Each array takes a multiple of 512 bytes, as in torch's caching
    allocator. Left out: code, the driver's own memory, blocks that the allocator keeps but does not use, and up to
    1 MiB by which it may not split a block.
    """
    sizes = sizes_of(spec, len_q, len_kv, batch, heads, heads_kv, None, arch, "forward")
    if spec.tensors:
        raise ArgumentError(
            f"{spec.describe()} captures tensors, whose tables depend on their sizes; leave the tensors out"
        )
    attention = plan(spec, schedule, sizes.arch)
    passes = [_forward(sizes, attention)]
    if spec.needs_backward:
        passes.append(_backward(sizes, attention))
    return Memory(sizes, tuple(passes))


def _forward(sizes: Sizes, attention: AttentionPlan) -> PassMemory:
    results = forward_outputs(sizes.problem, sizes.spec.head_dim_v, sizes.spec.dtype)
    needed = workspace_outputs(attention, "forward", sizes.problem)
    return PassMemory("forward", _inputs(sizes), _rounded(results), _shared(needed))


def _backward(sizes: Sizes, attention: AttentionPlan) -> PassMemory:
    spec, problem = sizes.spec, sizes.problem
    outputs = backward_outputs(problem, spec.head_dim, spec.head_dim_v, spec.dtype, workspaces(attention, problem))
    results, needed = outputs[:BACKWARD_RESULTS], outputs[BACKWARD_RESULTS:]
    needed += workspace_outputs(attention, "backward", problem)
    if attention.stores_probabilities:
        needed += computing_workspaces(attention, problem)
    forward = forward_outputs(problem, spec.head_dim_v, spec.dtype)
    arguments = {**_inputs(sizes), **_rounded(forward), "do": _round_up(sizes.o)}
    return PassMemory("backward", arguments, _rounded(results), _shared(needed))


def _shared(workspaces: Iterable[Output]) -> dict[str, int]:
    """The allocation that the workspaces of a call share, if it has any."""
    needed = [w for w in workspaces if 0 not in w.shape]
    return _rounded((shared_allocation(needed)[0],)) if needed else {}


def _inputs(sizes: Sizes) -> dict[str, int]:
    return {"q": _round_up(sizes.q), "k": _round_up(sizes.k), "v": _round_up(sizes.v)}


def _rounded(outputs: Iterable[Output]) -> dict[str, int]:
    return {o.name: _round_up(math.prod(o.shape) * RESULTS[o.dtype].bytes) for o in outputs}


def _round_up(size: int) -> int:
    return -(-size // ROUNDING) * ROUNDING
