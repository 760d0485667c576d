"""Speed of what trainers and engines call: packed sequences, dropout, paged prefill and other head dims, on one GPU.

    python benchmarks/callers.py                                   # every kind against the peers that are installed
    python benchmarks/callers.py --kinds packed,paged --peers fa3,fa4 --json callers.json
    python benchmarks/callers.py --kinds equal --peers batch       # packed sequences and a batch
    python benchmarks/callers.py --kinds paged --peers invariant   # what batch_invariant=True costs prompts

Every implementation gets the same tensors and is timed in turn with CUDA events, in an order drawn anew for each round;
figures are medians over rounds, in TFLOP/s of the pairs that the mask allows. Implementations must agree with each
other, except under dropout, where each draws its own pattern.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as functional
from attention_peers import CannotError, vllm_fa3
from attention_rows import OURS, mean
from caller_rows import KINDS, Problem
from timing import milliseconds
from torch.nn.attention import SDPBackend, sdpa_kernel

import flashgen as fg

DEVICE = "cuda"
TOLERANCE = 2e-2
#: flashgen with equal sequences as a batch, and with ``batch_invariant=True``: no peers, but what other ways cost.
BATCH, INVARIANT = "batch", "invariant"
Call = Callable[[], tuple[torch.Tensor, ...]]
Tensors = tuple[torch.Tensor, ...]


@dataclass
class Row:
    """A problem's figures by implementation, and why some have none."""

    problem: Problem
    tflops: dict[str, float] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)

    @property
    def ratio(self) -> float | None:
        """How many times as fast as the best peer."""
        peers = [x for name, x in self.tflops.items() if name not in (OURS, BATCH, INVARIANT)]
        return self.tflops[OURS] / max(peers) if peers and OURS in self.tflops else None


# ---- Their tensors: (tokens, heads, head_dim), or pages of keys and values


@dataclass(frozen=True)
class Given:
    """What all implementations get."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    starts_q: torch.Tensor
    starts_k: torch.Tensor
    lengths_k: torch.Tensor
    table: torch.Tensor | None

    @staticmethod
    def of(problem: Problem) -> Given:
        """Normal numbers, and pages in random order."""
        torch.manual_seed(0)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16)

        def starts(lengths: Sequence[int]) -> torch.Tensor:
            return torch.tensor([0, *np.cumsum(lengths)], device=DEVICE, dtype=torch.int32)

        tokens, keys = sum(problem.queries), sum(problem.keys)
        rows, table = (keys,), None
        if problem.page:
            each = -(-max(problem.keys) // problem.page)
            count = each * len(problem.keys)
            table = torch.randperm(count, device=DEVICE, dtype=torch.int32).view(len(problem.keys), each)
            rows = (count, problem.page)
        q = normal(tokens, problem.heads, problem.head_dim)
        k = normal(*rows, problem.kv_heads, problem.head_dim)
        v = normal(*rows, problem.kv_heads, problem.head_dim_v)
        lengths_k = torch.tensor(problem.keys, device=DEVICE, dtype=torch.int32)
        return Given(q, k, v, starts(problem.queries), starts(problem.keys), lengths_k, table)


# ---- The implementations


def ours(problem: Problem, x: Given, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """This project's kernels behind flash-attn's names."""
    longest = max(problem.queries), max(problem.keys)
    if problem.page:
        return in_pages(problem, x, q, k, v)
    if problem.kind in ("packed", "equal"):
        return fg.flash_attn_varlen_func(q, k, v, x.starts_q, x.starts_k, *longest, causal=problem.causal)
    return as_batch(problem, x, q, k, v)


def as_batch(problem: Problem, _: Given, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """This project's kernels for sequences of the same lengths."""
    if problem.kind not in ("equal", "dropout", "dims"):
        raise CannotError("it has no lengths of its own and no pages")
    rows_q, rows_k, rows_v = batched(problem, q, k, v)
    out = fg.flash_attn_func(rows_q, rows_k, rows_v, dropout_p=problem.dropout, causal=problem.causal)
    return out.reshape(q.shape[0], *out.shape[2:])


def in_pages(
    problem: Problem, x: Given, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch_invariant: bool = False
) -> torch.Tensor:
    """Queries over a cache."""
    rows = q.view(len(problem.queries), -1, *q.shape[1:])
    where: dict[str, Any] = {"cache_seqlens": x.lengths_k, "block_table": x.table}
    out = fg.flash_attn_with_kvcache(rows, k, v, **where, causal=problem.causal, batch_invariant=batch_invariant)
    return out.view(q.shape[0], *out.shape[2:])


def invariant(problem: Problem, x: Given, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The same with the same bits in any batch, for which prompts use the decode kernel."""
    if not problem.page:
        raise CannotError("only calls with a cache have batch_invariant")
    return in_pages(problem, x, q, k, v, batch_invariant=True)


def batched(problem: Problem, *tensors: torch.Tensor) -> Tensors:
    """The tensors of sequences of equal lengths as (batch, length, heads, head_dim)."""
    return tuple(x.view(len(problem.queries), -1, *x.shape[1:]) for x in tensors)


def sdpa(which: SDPBackend) -> Callable[..., torch.Tensor]:
    """A backend of torch's scaled_dot_product_attention, or FlashAttention-2 for packed sequences."""

    def run(problem: Problem, x: Given, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if problem.page:
            raise CannotError("it has no pages")
        if problem.kind in ("packed", "equal"):
            if which is not SDPBackend.FLASH_ATTENTION:
                raise CannotError("torch packs sequences for FlashAttention alone")
            longest = max(problem.queries), max(problem.keys)
            group = problem.heads // problem.kv_heads
            k, v = (t.repeat_interleave(group, dim=1) if group > 1 else t for t in (k, v))
            return torch.ops.aten._flash_attention_forward(
                q, k, v, x.starts_q, x.starts_k, *longest, 0.0, problem.causal, False
            )[0]
        rows = (t.transpose(1, 2) for t in batched(problem, q, k, v))
        with sdpa_kernel(which):
            out = functional.scaled_dot_product_attention(*rows, dropout_p=problem.dropout, is_causal=problem.causal)
        return out.transpose(1, 2).reshape(q.shape[0], *out.shape[1:2], out.shape[3])

    return run


def fa3(problem: Problem, x: Given, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """vLLM's build of FlashAttention-3, which FA3_LIBRARY names."""
    if problem.direction == "backward" or problem.dropout:
        raise CannotError("this build has no backward pass and no dropout")
    return vllm_fa3(
        q,
        k,
        v,
        starts_q=x.starts_q,
        starts_k=None if problem.page else x.starts_k,
        lengths_k=x.lengths_k if problem.page else None,
        table=x.table,
        longest=(max(problem.queries), max(problem.keys)),
        causal=problem.causal,
    )


def fa4(problem: Problem, x: Given, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """FlashAttention-4, where its package is installed."""
    from flash_attn.cute.interface import flash_attn_varlen_func

    if problem.dropout or problem.page:
        raise CannotError("it has neither dropout nor, in this build, pages")
    out = flash_attn_varlen_func(q, k, v, cu_seqlens_q=x.starts_q, cu_seqlens_k=x.starts_k, causal=problem.causal)
    return out[0] if isinstance(out, tuple) else out


PEERS: dict[str, Callable[..., torch.Tensor]] = {
    "fa2": sdpa(SDPBackend.FLASH_ATTENTION),
    "cudnn": sdpa(SDPBackend.CUDNN_ATTENTION),
    "fa3": fa3,
    "fa4": fa4,
}
#: This project in other ways.
WAYS: dict[str, Callable[..., torch.Tensor]] = {BATCH: as_batch, INVARIANT: invariant}
IMPLEMENTATIONS = {**PEERS, **WAYS, OURS: ours}


# ---- Timing


def prepared(problem: Problem, x: Given, name: str) -> Call:
    """What to time of one implementation."""
    attention = IMPLEMENTATIONS[name]
    if problem.direction == "forward":
        return lambda: (attention(problem, x, x.q, x.k, x.v),)
    inputs = [t.detach().requires_grad_() for t in (x.q, x.k, x.v)]
    out = attention(problem, x, *inputs)
    gradient = torch.ones_like(out)
    return lambda: torch.autograd.grad(out, inputs, gradient, retain_graph=True)


def measure(problem: Problem, names: Sequence[str], rounds: int, budget: float) -> Row:
    """Times every implementation in turn, round after round."""
    row, x, timed = Row(problem), Given.of(problem), {}
    first: Tensors | None = None
    for name in names:
        try:
            run = prepared(problem, x, name)
            got = tuple(t.float() for t in run())
        except CannotError as why:
            row.notes[name] = str(why)
            continue
        except Exception as fault:
            if name == OURS:
                raise
            row.notes[name] = f"{type(fault).__name__}: {' '.join(str(fault).split())[:160]}"
            continue
        first = first or got
        error = max(((a - b).norm() / b.norm()).item() for a, b in zip(got, first, strict=True))
        if problem.dropout or error < TOLERANCE:
            timed[name] = run
        else:
            row.notes[name] = f"it disagrees with the first: relative difference {error:.3g}"
    repeats = {name: max(1, int(budget / max(1e-3, milliseconds(run, 3)))) for name, run in timed.items()}
    found: dict[str, list[float]] = {name: [] for name in timed}
    for number in range(rounds):
        order = list(timed)
        random.Random(number).shuffle(order)
        for name in order:
            found[name].append(milliseconds(timed[name], repeats[name]))
    row.tflops = {name: problem.flops / statistics.median(ms) / 1e9 for name, ms in found.items()}
    return row


def table(rows: Sequence[Row], names: Sequence[str]) -> str:
    """The figures as Markdown, and geometric means of each kind and pass."""
    lines = [f"| problem | {' | '.join(names)} | vs the best |", "|" + " --- |" * (2 + len(names))]
    for row in rows:
        shown = [f"{row.tflops[n]:.0f}" if n in row.tflops else "-" for n in names]
        lines.append(f"| {row.problem} | {' | '.join(shown)} | {f'{row.ratio:.2f}' if row.ratio else '-'} |")
    for kind, direction in dict.fromkeys((row.problem.kind, row.problem.direction) for row in rows):
        own = [row for row in rows if (row.problem.kind, row.problem.direction) == (kind, direction)]
        ratios = [row.ratio for row in own if row.ratio is not None]
        if ratios:
            lines += ["", f"{kind}, {direction}: {mean(ratios):.3f} of the best peer; lowest {min(ratios):.2f}."]
    notes = [f"- {row.problem}, {name}: {note}" for row in rows for name, note in row.notes.items()]
    return "\n".join([*lines, "", *notes])


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", default=",".join(KINDS), help=f"comma-separated: {', '.join(KINDS)}")
    parser.add_argument("--directions", default="forward,backward")
    parser.add_argument("--peers", default=",".join(PEERS), help=f"comma-separated: {', '.join([*PEERS, *WAYS])}")
    parser.add_argument("--every", type=int, default=1, help="takes one problem in so many")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--milliseconds", type=float, default=20.0, help="per implementation and round")
    parser.add_argument("--json", type=Path, help="also write every figure here")
    options = parser.parse_args()
    names = [*options.peers.split(","), OURS]
    for given, known in ((options.kinds, KINDS), (options.peers, [*PEERS, *WAYS])):
        if unknown := set(given.split(",")) - set(known):
            parser.error(f"{', '.join(sorted(unknown))} is not known; use {', '.join(known)}")
    rows: list[Row] = []
    wanted: list[Any] = [p for kind in options.kinds.split(",") for p in KINDS[kind]()]
    wanted = [p for p in wanted if p.direction in options.directions.split(",")]
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    for problem in wanted[:: options.every]:
        rows.append(measure(problem, names, options.rounds, options.milliseconds))
        print(problem, {n: round(x) for n, x in rows[-1].tflops.items()}, flush=True)
        if options.json:
            options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    print(table(rows, names))


if __name__ == "__main__":
    main()
