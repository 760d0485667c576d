"""Decoding, one new token a sequence, in CUDA graphs: GB/s of keys and values read, and those of peers.

    python benchmarks/decode.py                                     # 16-bit and 8-bit caches, and installed peers
    python benchmarks/decode.py --kinds paged,fa3,cudnn --json decode.json
    python benchmarks/decode.py --kinds e4m3,e4m3-queries,fa3-e4m3  # 8-bit caches
    python benchmarks/decode.py --kinds paged,portable              # the kernel for all GPUs, on this one
    python benchmarks/decode.py --latent                            # caches of latent vectors, also in TFLOP/s

All implementations of a row are timed in turn; figures are medians over rounds. A row's keys and values are drawn
anew for each implementation, because graphs keep the addresses. FA3_LIBRARY names vLLM's build of FlashAttention-3,
which says itself into how many parts it splits keys.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as functional
from attention_peers import vllm_fa3
from decode_rows import LATENT_ROWS, PEERS, ROWS, Problem, Row, ancestors, head, means
from torch.nn.attention import SDPBackend, sdpa_kernel

import flashgen as fg

DEVICE = "cuda"
#: Calls of a graph.
CALLS = 10
#: Hopper without its own instructions, so that plans are those for all GPUs from sm_80 on.
PORTABLE = "sm_90"
E4M3 = torch.float8_e4m3fn

Call = Callable[[], Any]


def mask_of(problem: Problem) -> fg.Mask:
    """New tokens in a row, or in a tree of guesses."""
    if not problem.tree:
        return fg.causal()
    above = torch.from_numpy(ancestors(problem.new)).to(DEVICE)

    def tree(b: Any, h: Any, q: Any, k: Any) -> Any:
        before = fg.k_len - fg.q_len
        return (k < before) | above[q, fg.maximum(k - before, 0)]

    return fg.Mask.of(tree)


def spec_of(problem: Problem, cache: str = "paged", **fields: Any) -> fg.AttentionSpec:
    """The spec of flashgen's kernels."""
    return fg.AttentionSpec(problem.head_dim, mask=mask_of(problem), direction="forward", cache=cache, **fields)


def paged(problem: Problem, arch: str | None = None) -> tuple[Call, int]:
    """flashgen's kernel over pages."""
    kernel = fg.build(spec_of(problem), arch=arch)
    q, k, v, table, lengths = pages_of(problem, torch.bfloat16)
    cache = fg.KVCache(lengths, block_table=table)
    return lambda: kernel(q, k, v, cache=cache), 2


def e4m3(problem: Problem, page_scales: bool = False, queries: bool = False) -> tuple[Call, int]:
    """flashgen's kernel over pages in e4m3, with scales of sequences or pages; with ``queries`` these are e4m3, too."""
    fields = {"dtype": "e4m3"} if queries else {"cache_dtype": "e4m3", "page_scales": page_scales}
    kernel = fg.build(spec_of(problem, **fields))
    q, k, v, table, lengths = pages_of(problem, E4M3)
    k_scale, v_scale = (scales(k.shape[0] if page_scales else problem.batch, problem.heads_kv) for _ in "kv")
    cache = fg.KVCache(lengths, block_table=table, k_scale=k_scale, v_scale=v_scale)
    if not queries:
        return lambda: kernel(q, k, v, cache=cache), 1
    q8, q_scale = q.to(E4M3), scales(problem.batch, problem.heads_kv)
    return lambda: kernel(q8, k, v, cache=cache, q_scale=q_scale), 1


def contiguous(problem: Problem) -> tuple[Call, int]:
    """flashgen's kernel over a dense cache."""
    kernel = fg.build(spec_of(problem, "contiguous"))
    q, k, v = dense(problem)
    cache = fg.KVCache(torch.tensor(problem.lengths(), dtype=torch.int32, device=DEVICE))
    return lambda: kernel(q, k, v, cache=cache), 2


def fa3(problem: Problem, dtype: torch.dtype = torch.bfloat16) -> tuple[Call, int]:
    """vLLM's build of FlashAttention-3 over pages; with an 8-bit cache its queries have 8 bits, too."""
    q, k, v, table, lengths = pages_of(problem, dtype)
    more = fa3_arguments(problem, table, lengths)
    if dtype == E4M3:
        more["descales"] = tuple(scales(problem.batch, problem.heads_kv) for _ in "qkv")
    rows = q.flatten(0, 1).to(dtype)
    return lambda: vllm_fa3(rows, k, v, **more), dtype.itemsize


def fa3_arguments(problem: Problem, table: torch.Tensor, lengths: torch.Tensor) -> dict[str, Any]:
    """What it gets besides queries, keys and values."""
    if problem.tree:
        raise ValueError("it has no trees")
    end, new = problem.batch * problem.new, problem.new
    starts = torch.arange(0, end + 1, new, device=DEVICE, dtype=torch.int32)
    return {"starts_q": starts, "longest": (new, problem.keys), "causal": True, "lengths_k": lengths, "table": table}


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
    kernel = fg.build(spec_of(problem, head_dim_v=problem.latent, qv=True))
    q, qv, k, v, table, lengths = latent_pages_of(problem)
    cache = fg.KVCache(lengths, block_table=table)
    return lambda: kernel(q, k, v, qv=qv, cache=cache), 2


def latent_fa3(problem: Problem) -> tuple[Call, int]:
    """vLLM's build of FlashAttention-3 with ``qv``."""
    q, qv, k, v, table, lengths = latent_pages_of(problem)
    more = fa3_arguments(problem, table, lengths)
    q, qv = q.flatten(0, 1), qv.flatten(0, 1)
    return lambda: vllm_fa3(q, k, v, **more, qv=qv), 2


def latent_pages_of(problem: Problem) -> tuple[torch.Tensor, ...]:
    """Both queries, keys and values that are views of one buffer, the table of pages, and the lengths."""
    columns = problem.latent + problem.head_dim
    q, vectors, _, table, lengths = pages_of(replace(problem, head_dim=columns), torch.bfloat16)
    (qv, q), (v, k) = (x.split([problem.latent, problem.head_dim], -1) for x in (q, vectors))
    return q.contiguous(), qv.contiguous(), k, v, table, lengths


def dense(problem: Problem) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values."""
    shape = (problem.batch, problem.keys, problem.heads_kv, problem.head_dim)
    q = torch.randn(problem.batch, problem.new, problem.heads, problem.head_dim, device=DEVICE, dtype=torch.bfloat16)
    k, v = (torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) for _ in "kv")
    return q, k, v


def scales(*shape: int) -> torch.Tensor:
    """Scales of e4m3 numbers."""
    return torch.rand(shape, device=DEVICE) + 0.5


def pages_of(problem: Problem, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Queries, keys and values in pages in random order, their table, and the lengths."""
    each = -(-problem.keys // problem.page)
    lengths = torch.tensor(problem.lengths(), dtype=torch.int32, device=DEVICE)
    used = -(-lengths // problem.page)
    count = int(used.sum())
    table = torch.zeros(problem.batch, each, dtype=torch.int32, device=DEVICE)
    places = torch.arange(each, device=DEVICE) < used[:, None]
    table[places] = torch.randperm(count, device=DEVICE).int()
    q = torch.randn(problem.batch, problem.new, problem.heads, problem.head_dim, device=DEVICE, dtype=torch.bfloat16)
    shape = (count, problem.page, problem.heads_kv, problem.head_dim)
    k, v = (torch.randn(shape, device=DEVICE, dtype=torch.bfloat16).to(dtype) for _ in "kv")
    return q, k, v, table, lengths


KINDS: dict[str, Callable[[Problem], tuple[Call, int]]] = {
    "paged": paged,
    "contiguous": contiguous,
    "portable": lambda problem: paged(problem, PORTABLE),
    "e4m3": e4m3,
    "e4m3-pages": lambda problem: e4m3(problem, page_scales=True),
    "e4m3-queries": lambda problem: e4m3(problem, queries=True),
    "fa3": fa3,
    "fa3-e4m3": lambda problem: fa3(problem, E4M3),
    "cudnn": cudnn,
    "latent": latent,
    "latent-fa3": latent_fa3,
}
LATENT_KINDS = ("latent", "latent-fa3")


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
    print(head(kinds))
    rows = []
    for problem in LATENT_ROWS if options.latent else ROWS:
        rows.append(measure(problem, kinds, options.rounds))
        print(rows[-1].line(kinds), flush=True)
        torch.cuda.empty_cache()
    print("", *means(rows, kinds), sep="\n")
    for row in rows:
        for name, note in row.notes.items():
            print(f"- {row.problem}, {name}: {note}")
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
