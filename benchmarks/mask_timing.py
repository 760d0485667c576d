"""Times one cell of the benchmark of masks and scores, after checking that both libraries mean the same."""

from __future__ import annotations

import contextlib
import gc
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import mask_cases
import torch
import torch._dynamo.config
import torch._functorch.config
import torch._inductor.config
from mask_cases import heads_first
from mask_pool import LostContextError
from mask_rows import DIRECTIONS, Cell, Row
from timing import milliseconds
from torch._dynamo.utils import counters

#: Relative error (Frobenius norm) above which two implementations disagree.
TOLERANCE = 2e-2

#: For each pass, what either library is called by.
Calls = dict[str, dict[str, Callable[[], Any]]]
#: For each pass, what comes of it, (batch, length, heads, head_dim).
Outcome = dict[str, tuple[torch.Tensor, ...]]


def set_up() -> None:
    """Tells torch what a process of the benchmark needs."""
    # There is a process for each core already, and a pool of its own would run beside what is timed.
    torch._inductor.config.compile_threads = 1
    torch.set_num_threads(1)
    # A backward pass is repeated, for which its buffers must stay.
    torch._functorch.config.donated_buffer = False
    # Each cell is compiled for its shape alone, and all of a process stay.
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 1000


class Contest:
    """Both libraries, or one, on one cell: compiled by ``prepare``, and timed by ``time`` on new tensors."""

    def __init__(self, cell: Cell, libraries: Sequence[str], rounds: int, at_least: float) -> None:
        set_up()
        self.cell = cell
        self.rounds, self.at_least = rounds, at_least
        self.variant = mask_cases.VARIANTS[cell.name](cell)
        self.kernel = mask_cases.kernel(cell, self.variant)
        self.attention = mask_cases.flex(cell, self.variant) if "flex" in libraries else None

    def prepare(self) -> str:
        """Compiles everything by running it; says where the two disagree."""
        return _alone(lambda: _disagreement(self._calls()[1]))

    def time(self) -> Row:
        """Each library in turn, round after round, each for ``at_least`` milliseconds or one call."""
        counters.clear()
        times = _alone(lambda: self._times(self._calls()[0]))
        found, missed = (counters["inductor"][f"fxgraph_cache_{way}"] for way in ("hit", "miss"))
        return Row(self.cell, times, found=found, missed=missed)

    def _times(self, calls: Calls) -> dict[str, dict[str, float]]:
        return {direction: in_turn(calls[direction], self.rounds, self.at_least) for direction in DIRECTIONS}

    def _calls(self) -> tuple[Calls, dict[str, Outcome]]:
        """Both passes of each library on new tensors, called once; and what that gave."""
        q, k, v, do = mask_cases.tensors(self.cell)
        kernel, attention = self.kernel, self.attention
        out, lse = kernel(q, k, v)
        calls: Calls = {
            "forward": {"flashgen": lambda: kernel(q, k, v)},
            "backward": {"flashgen": lambda: kernel.backward(do, q, k, v, out, lse)},
        }
        outcomes: dict[str, Outcome] = {"flashgen": {"forward": (out,), "backward": calls["backward"]["flashgen"]()}}
        if attention is not None:
            plain = [heads_first(x) for x in (q, k, v)]
            with_gradients = [heads_first(x).requires_grad_() for x in (q, k, v)]
            flex_out, flex_do = attention(*with_gradients), heads_first(do)
            attention(*plain)
            calls["forward"]["flex"] = lambda: attention(*plain)
            calls["backward"]["flex"] = lambda: torch.autograd.grad(
                flex_out, with_gradients, flex_do, retain_graph=True
            )
            results = {"forward": (flex_out,), "backward": calls["backward"]["flex"]()}
            outcomes["flex"] = {pass_: tuple(x.detach().transpose(1, 2) for x in y) for pass_, y in results.items()}
        torch.cuda.synchronize()
        return calls, outcomes


def _alone(step: Callable[[], Any]) -> Any:
    """What a step comes to; of the GPU's memory nothing is kept that other processes may have use for."""
    try:
        return step()
    except Exception as error:
        raise _told(error) from None
    finally:
        gc.collect()
        with contextlib.suppress(RuntimeError):
            torch.cuda.empty_cache()


def _told(error: Exception) -> Exception:
    """The error in a line, as one of those that the pool knows."""
    if isinstance(error, torch.cuda.OutOfMemoryError):
        return RuntimeError("the GPU's memory does not hold it")
    text = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return LostContextError(text)
    return RuntimeError(text)


def in_turn(timed: dict[str, Callable[[], Any]], rounds: int, at_least: float) -> dict[str, float]:
    """Medians over rounds."""
    repeats = {name: max(1, int(at_least / max(1e-3, milliseconds(run, 2)))) for name, run in timed.items()}
    taken: dict[str, list[float]] = {name: [] for name in timed}
    for _ in range(rounds):
        for name, run in timed.items():
            taken[name].append(milliseconds(run, repeats[name]))
    return {name: statistics.median(ms) for name, ms in taken.items()}


def _disagreement(outcomes: dict[str, Outcome]) -> str:
    """Where two libraries mean different things."""
    if len(outcomes) < 2:
        return ""
    mine, theirs = outcomes["flashgen"], outcomes["flex"]
    errors = {
        direction: max(relative_error(*pair) for pair in zip(mine[direction], theirs[direction], strict=True))
        for direction in DIRECTIONS
    }
    found = [f"{direction} {error:.3g}" for direction, error in errors.items() if not error < TOLERANCE]
    return f"the two disagree: relative error {', '.join(found)}" if found else ""


def relative_error(mine: torch.Tensor, theirs: torch.Tensor) -> float:
    """By the Frobenius norm."""
    mine, theirs = mine.float(), theirs.float()
    return ((mine - theirs).norm() / theirs.norm()).item()
