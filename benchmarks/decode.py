"""Decoding, one new token a sequence, in CUDA graphs: GB/s of keys and values read, beside peers.

    python benchmarks/decode.py                                     # 16-bit and 8-bit caches, and installed peers
    python benchmarks/decode.py --kinds paged,fa3,cudnn --json decode.json
    python benchmarks/decode.py --latent                            # caches of latent vectors, also in TFLOP/s

All implementations of a row are timed in turn; figures are medians over rounds. A row's keys and values are drawn
anew for each implementation, because graphs keep the addresses.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as functional
from attention_peers import vllm_fa3
from torch.nn.attention import SDPBackend, sdpa_kernel

import flashgen as fg

#: Calls of a graph.
CALLS = 10
DTYPES = {None: torch.bfloat16, "e4m3": torch.float8_e4m3fn}


@dataclass(frozen=True)
class Problem:
    """One line of the table. ``keys`` are a sequence's, or the longest and the shortest of ragged ones."""

    batch: int
    heads: int
    heads_kv: int
    head_dim: int
    keys: int
    page: int
    shortest: int = 0
    new: int = 1
    #: Columns of values that are part of the keys; 0 where values are others.
    latent: int = 0

    def lengths(self) -> list[int]:
        """Keys of each sequence: equal, or spread evenly on a logarithmic scale."""
        if not self.shortest:
            return [self.keys] * self.batch
        steps = max(1, self.batch - 1)
        return [round(self.shortest * (self.keys / self.shortest) ** (i / steps)) for i in range(self.batch)]

    def bytes(self, of_element: int) -> int:
        """Keys and values read once."""
        columns = self.head_dim + (self.latent or self.head_dim)
        return sum(self.lengths()) * self.heads_kv * columns * of_element

    def flops(self) -> int:
        """Those of both products for all pairs of queries and keys."""
        values = self.latent or self.head_dim
        return 2 * sum(self.lengths()) * self.new * self.heads * (self.head_dim + self.latent + values)


ROWS = (
    Problem(1, 32, 8, 128, 8192, 64),
    Problem(1, 32, 8, 128, 131072, 64),
    Problem(8, 32, 8, 128, 8192, 16),
    Problem(64, 32, 8, 128, 8192, 16),
    Problem(128, 32, 8, 128, 2048, 16),
    Problem(64, 64, 8, 128, 8192, 64),
    Problem(16, 128, 1, 128, 16384, 64),
    Problem(64, 32, 32, 128, 4096, 64),
    Problem(64, 16, 8, 256, 4096, 64),
    Problem(64, 32, 8, 64, 8192, 64),
    Problem(64, 32, 8, 128, 32768, 16, shortest=100),
    Problem(64, 32, 8, 128, 8192, 16, new=4),
)

LATENT_ROWS = (
    *(Problem(128, heads, 1, 64, keys, 64, latent=512) for heads in (128, 64, 16) for keys in (4096, 8192)),
    *(Problem(32, heads, 1, 64, 32768, 64, latent=512) for heads in (128, 64, 16)),
    Problem(1, 128, 1, 64, 32768, 64, latent=512),
    Problem(128, 128, 1, 64, 32768, 64, shortest=100, latent=512),
    Problem(128, 128, 1, 64, 4096, 64, new=2, latent=512),
)

Call = Callable[[], Any]


def paged(problem: Problem, cache_dtype: str | None, page_scales: bool = False) -> tuple[Call, int]:
    """flashgen's kernel over pages."""
    fields: dict[str, Any] = {"cache_dtype": cache_dtype, "page_scales": page_scales} if cache_dtype else {}
    spec = fg.AttentionSpec(problem.head_dim, mask=fg.causal(), direction="forward", cache="paged", **fields)
    kernel = fg.build(spec)
    q, k, v, table, lengths = pages_of(problem, DTYPES[cache_dtype])
    scales = {}
    if cache_dtype:
        count = k.shape[0] if page_scales else problem.batch
        scales = {n: torch.rand(count, problem.heads_kv, device="cuda") + 0.5 for n in ("k_scale", "v_scale")}
    cache = fg.KVCache(lengths, block_table=table, **scales)
    return lambda: kernel(q, k, v, cache=cache), k.element_size()


def contiguous(problem: Problem) -> tuple[Call, int]:
    """flashgen's kernel over a dense cache."""
    kernel = fg.build(fg.AttentionSpec(problem.head_dim, mask=fg.causal(), direction="forward", cache="contiguous"))
    q, k, v = dense(problem)
    cache = fg.KVCache(torch.tensor(problem.lengths(), dtype=torch.int32, device="cuda"))
    return lambda: kernel(q, k, v, cache=cache), 2


def fa3(problem: Problem) -> tuple[Call, int]:
    """vLLM's build of FlashAttention-3 over pages, which FA3_LIBRARY names."""
    q, k, v, table, lengths = pages_of(problem, torch.bfloat16)
    starts = torch.arange(0, (problem.batch + 1) * problem.new, problem.new, device="cuda", dtype=torch.int32)
    more = {"longest": (problem.new, problem.keys), "causal": True, "lengths_k": lengths, "table": table}
    return lambda: vllm_fa3(q.flatten(0, 1), k, v, starts, None, **more), 2


def cudnn(problem: Problem) -> tuple[Call, int]:
    """cuDNN through torch, over a dense cache of equal lengths."""
    if problem.shortest or problem.new > 1:
        raise ValueError("it has neither ragged lengths nor a causal mask that ends at the last key")
    q, k, v = (x.transpose(1, 2) for x in dense(problem))

    def run() -> Any:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return functional.scaled_dot_product_attention(q, k, v, enable_gqa=problem.heads != problem.heads_kv)

    return run, 2


def latent(problem: Problem) -> tuple[Call, int]:
    """flashgen's kernel over pages of latent vectors."""
    more: dict[str, Any] = {"head_dim_v": problem.latent, "qv": True, "direction": "forward", "cache": "paged"}
    kernel = fg.build(fg.AttentionSpec(problem.head_dim, mask=fg.causal(), **more))
    q, qv, k, v, table, lengths = latent_pages_of(problem)
    cache = fg.KVCache(lengths, block_table=table)
    return lambda: kernel(q, k, v, qv=qv, cache=cache), 2


def latent_fa3(problem: Problem) -> tuple[Call, int]:
    """vLLM's build of FlashAttention-3 with ``qv``."""
    q, qv, k, v, table, lengths = latent_pages_of(problem)
    starts = torch.arange(0, (problem.batch + 1) * problem.new, problem.new, device="cuda", dtype=torch.int32)
    more = {"longest": (problem.new, problem.keys), "causal": True, "lengths_k": lengths, "table": table}
    q, qv = q.flatten(0, 1), qv.flatten(0, 1)
    return lambda: vllm_fa3(q, k, v, starts, None, **more, qv=qv), 2


def latent_pages_of(problem: Problem) -> tuple[torch.Tensor, ...]:
    """Both queries, keys and values that are views of one buffer, the table of pages, and the lengths."""
    columns = problem.latent + problem.head_dim
    q, vectors, _, table, lengths = pages_of(replace(problem, head_dim=columns), torch.bfloat16)
    (qv, q), (v, k) = (x.split([problem.latent, problem.head_dim], -1) for x in (q, vectors))
    return q.contiguous(), qv.contiguous(), k, v, table, lengths


def dense(problem: Problem) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values."""
    shape = (problem.batch, problem.keys, problem.heads_kv, problem.head_dim)
    q = torch.randn(problem.batch, problem.new, problem.heads, problem.head_dim, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in "kv")
    return q, k, v


def pages_of(problem: Problem, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Queries, keys and values in pages in random order, their table, and the lengths."""
    each = -(-problem.keys // problem.page)
    lengths = torch.tensor(problem.lengths(), dtype=torch.int32, device="cuda")
    used = -(-lengths // problem.page)
    count = int(used.sum())
    table = torch.zeros(problem.batch, each, dtype=torch.int32, device="cuda")
    places = torch.arange(each, device="cuda") < used[:, None]
    table[places] = torch.randperm(count, device="cuda").int()
    q = torch.randn(problem.batch, problem.new, problem.heads, problem.head_dim, device="cuda", dtype=torch.bfloat16)
    shape = (count, problem.page, problem.heads_kv, problem.head_dim)
    k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16).to(dtype) for _ in "kv")
    return q, k, v, table, lengths


KINDS: dict[str, Callable[[Problem], tuple[Call, int]]] = {
    "paged": lambda problem: paged(problem, None),
    "contiguous": contiguous,
    "e4m3": lambda problem: paged(problem, "e4m3"),
    "e4m3-pages": lambda problem: paged(problem, "e4m3", page_scales=True),
    "fa3": fa3,
    "cudnn": cudnn,
    "latent": latent,
    "latent-fa3": latent_fa3,
}
LATENT_KINDS = ("latent", "latent-fa3")
PEERS = ("fa3", "cudnn", "latent-fa3")


@dataclass
class Row:
    """A problem's figures in GB/s and microseconds by kind, and why some have none."""

    problem: Problem
    rates: dict[str, float] = field(default_factory=dict)
    times: dict[str, float] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)

    @property
    def ratio(self) -> float | None:
        """The rate of pages over that of the better peer."""
        peers = [self.rates[n] for n in PEERS if n in self.rates]
        own = self.rates.get("latent" if self.problem.latent else "paged")
        return own / max(peers) if peers and own else None


def graph_of(call: Call) -> Callable[[], float]:
    """A function that replays calls and returns the milliseconds of one."""
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def milliseconds(_tensors: Call = call) -> float:
        # Holds the call, because its tensors must outlive the graph.
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / CALLS

    return milliseconds


def measure(problem: Problem, kinds: list[str], rounds: int) -> Row:
    """Times all kinds of a row in turn."""
    row, runs, sizes = Row(problem), {}, {}
    for name in kinds:
        try:
            call, sizes[name] = KINDS[name](problem)
            runs[name] = graph_of(call)
        except Exception as fault:
            if name not in PEERS:
                raise
            row.notes[name] = f"{type(fault).__name__}: {' '.join(str(fault).split())[:160]}"
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(rounds + 2):
        for name, run in runs.items():
            one = run()
            # The first turns warm up.
            if turn >= 2:
                taken[name].append(one)
    for name, all_of_it in taken.items():
        middle = statistics.median(all_of_it)
        row.times[name] = middle * 1e3
        row.rates[name] = problem.bytes(sizes[name]) / middle / 1e6
    return row


def shown_rate(row: Row, kind: str) -> str:
    """GB/s, and beside wide products TFLOP/s."""
    if kind not in row.rates:
        return "-"
    products = f" ({row.problem.flops() / row.times[kind] / 1e6:.0f} TFLOP/s)" if row.problem.latent else ""
    return f"{row.rates[kind]:.0f}{products}"


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", help=f"comma-separated: {', '.join(KINDS)}")
    parser.add_argument("--latent", action="store_true", help="rows of 576 columns, of which 512 are values, too")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="also write every figure here")
    options = parser.parse_args()
    of_rows = [kind for kind in KINDS if (kind in LATENT_KINDS) == options.latent]
    kinds = options.kinds.split(",") if options.kinds else of_rows
    if unknown := set(kinds) - set(of_rows):
        parser.error(f"{', '.join(sorted(unknown))} is not known for these rows; use {', '.join(of_rows)}")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    print(f"| B, heads, D, keys, page | {' | '.join(kinds)} | vs the better peer |")
    print("|" + " --- |" * (2 + len(kinds)))
    rows = []
    for problem in LATENT_ROWS if options.latent else ROWS:
        row = measure(problem, kinds, options.rounds)
        rows.append(row)
        p, shown = problem, [shown_rate(row, n) for n in kinds]
        words = f"{p.batch}, {p.heads}/{p.heads_kv}, {p.head_dim}, {p.keys}, {p.page}"
        words += (f", from {p.shortest}" if p.shortest else "") + (f", {p.new} tokens" if p.new > 1 else "")
        print(f"| {words} | {' | '.join(shown)} | {f'{row.ratio:.2f}' if row.ratio else '-'} |", flush=True)
        torch.cuda.empty_cache()
    if ratios := [row.ratio for row in rows if row.ratio]:
        print(f"\nGeometric mean over the better peer: {math.exp(statistics.fmean(map(math.log, ratios))):.3f}")
    for row in rows:
        for name, note in row.notes.items():
            print(f"- {row.problem}, {name}: {note}")
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
