"""Decoding from 8-bit caches beside 16-bit ones, in CUDA graphs, interleaved.

    python benchmarks/eight_bit_caches.py [--rounds 7] [--page-size 16]

Each row is a batch of sequences with one new token each. The last column is the 8-bit time over the 16-bit time.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch

import flashgen as fg

#: Batch, query heads, key/value heads, head dim, keys of a sequence.
ROWS = (
    (64, 32, 8, 128, 8192),
    (128, 32, 8, 128, 4096),
    (64, 64, 8, 128, 4096),
    (16, 32, 8, 128, 16384),
    (1, 32, 8, 128, 131072),
    (64, 32, 32, 64, 4096),
    (32, 128, 1, 128, 16384),
    (32, 16, 4, 256, 8192),
)
KINDS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "e4m3": {"cache_dtype": "e4m3"},
    "e5m2": {"cache_dtype": "e5m2"},
    "e4m3, pages": {"cache_dtype": "e4m3", "page_scales": True},
}
#: Calls of a graph.
CALLS = 10


def graph_of(row: tuple[int, ...], fields: dict[str, Any], page_size: int) -> Callable[[], float]:
    """A function that replays calls on a filled cache, and returns the milliseconds of one."""
    batch, heads, heads_kv, dim, keys = row
    spec = fg.AttentionSpec(dim, mask=fg.causal(), direction="forward", cache="paged", **fields)
    kernel, each = fg.build(spec), -(-keys // page_size)
    q = torch.randn(batch, 1, heads, dim, device="cuda").bfloat16()
    kinds = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, None: torch.bfloat16}
    shape = (batch * each, page_size, heads_kv, dim)
    k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16).to(kinds[spec.cache_dtype]) for _ in "kv")
    table = torch.randperm(batch * each, device="cuda").view(batch, each).int()
    lengths = torch.full((batch,), keys, dtype=torch.int32, device="cuda")
    scales = {}
    if spec.cache_dtype:
        count = batch * each if spec.page_scales else batch
        scales = {name: torch.rand(count, heads_kv, device="cuda") + 0.5 for name in ("k_scale", "v_scale")}
    cache = fg.KVCache(lengths, block_table=table, **scales)
    kernel(q, k, v, cache=cache)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            kernel(q, k, v, cache=cache)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def milliseconds() -> float:
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / CALLS

    return milliseconds


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--page-size", type=int, default=16)
    options = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, pages of {options.page_size}, median of {options.rounds} rounds")
    for row in ROWS:
        batch, _, heads_kv, dim, keys = row
        runs = {name: graph_of(row, fields, options.page_size) for name, fields in KINDS.items()}
        times: dict[str, list[float]] = {name: [] for name in runs}
        for turn in range(options.rounds + 2):
            for name, run in runs.items():
                taken = run()
                # The first turns warm up.
                if turn >= 2:
                    times[name].append(taken)
        wide = statistics.median(times["bf16"])
        for name, taken in times.items():
            middle = statistics.median(taken)
            size = 2 * batch * keys * heads_kv * dim * (1 if KINDS[name] else 2)
            print(f"{row!s:28} {name:12} {middle * 1e3:9.1f} us {size / middle / 1e9:6.2f} TB/s {middle / wide:6.2f}")
        del runs
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
