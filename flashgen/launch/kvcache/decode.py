"""Calls of the decode kernel: the parameters and workspaces that only it has."""

from __future__ import annotations

from typing import NamedTuple

from flashgen.launch.call.call_options import Side
from flashgen.launch.call.packing import Value
from flashgen.launch.call.prepared import Output, started_grid
from flashgen.launch.target import Ready
from flashgen.plan.decode.parts import TEAM, part_tiles, partial_count, partial_rows, team_size
from flashgen.plan.decode.tiles import padded_dims
from flashgen.plan.model.plans import Problem


class Parts(NamedTuple):
    """How a call cuts the keys into parts, and where their results go."""

    values: dict[str | None, Value]
    outputs: tuple[Output, ...]

    @classmethod
    def of(cls, decode: Ready, problem: Problem, side: Side) -> Parts:
        """The parts of a call."""
        plan = decode.plan
        tiles = part_tiles(plan, problem, side.num_splits, batch_invariant=side.batch_invariant)
        rows = partial_rows(plan, problem)
        blocks = started_grid(decode, plan.grid(problem))[0]
        count = partial_count(plan, problem, tiles, blocks) * rows
        _, columns = padded_dims(plan.spec)
        outputs = Output("o_partial", (count * columns,), "fp32"), Output("row_partial", (count * 2,), "fp32")
        values: dict[str | None, Value] = {"part_tiles": tiles, "partial_rows": rows}
        values[TEAM] = team_size(plan, problem, blocks)
        return cls(values, outputs if count else ())
