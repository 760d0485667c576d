"""Python's share of a call with a cache: what is left of it when the driver does nothing. It needs no GPU.

    python benchmarks/python_share.py

Calls run once on the emulator, and then through a driver whose functions return at once. Outputs are allocated by
torch. A figure is the best of many short windows, and the limit is 15 us.
"""

from __future__ import annotations

import collections
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

import flashgen as fg
from flashgen import serving
from flashgen.compat.flash_attn_interface import flash_attn_with_kvcache as fa3
from flashgen.launch.gpu import GpuTarget
from flashgen.torch import replay

LIMIT, WINDOWS, CALLS = 15.0, 40, 100


class NoDriver:
    """As much of a driver as a launch needs, and nothing behind it."""

    process = os.getpid()
    success = 0
    overlaps_grids = True

    def current_context(self) -> int:
        """The only one."""
        return 1

    def launch_kernel(self, *_: Any) -> tuple[int]:
        """Says that all went well."""
        return (0,)

    launch_kernel_ex = launch_kernel


class NoCounter:
    """Stands for the words that a scheduler's blocks count in."""

    def address(self, stream: int) -> int:
        """Somewhere."""
        return 4096


def calls() -> dict[str, Callable[[], Any]]:
    """The calls by name: a token for each of two sequences."""
    torch.manual_seed(0)
    token, k, v = torch.randn(3, 2, 1, 1, 64).half()
    caches = [torch.zeros(2, 256, 1, 64).half() for _ in range(2)]
    lengths = torch.tensor([20, 200], dtype=torch.int32)
    pages, table = [x.view(32, 16, 1, 64) for x in caches], torch.arange(32, dtype=torch.int32).view(2, 16)
    mask, cache = fg.causal(), fg.KVCache(lengths, block_table=table)
    starts, slots = torch.arange(3, dtype=torch.int32), torch.tensor([20, 200])
    sizes = {"num_tokens": 2, "max_query_len": 1, "page_size": 16}
    step, rows = serving.plan(starts, lengths, table, slots, **sizes), [x[:, 0] for x in (token, k, v)]
    both = {"cache_seqlens": lengths, "causal": True}
    pages8, scale = [x.to(torch.float8_e4m3fn) for x in pages], torch.ones(1)
    scales = {"k_scale": scale, "v_scale": scale.clone()}
    descales = {"k_descale": scale, "v_descale": scales["v_scale"], "block_table": table}
    return {
        "fg.flash_attn_with_kvcache": lambda: fg.flash_attn_with_kvcache(token, *caches, **both),
        "fg.flash_attn_with_kvcache, a new token": lambda: fg.flash_attn_with_kvcache(token, *caches, k, v, **both),
        "the same, in pages": lambda: fg.flash_attn_with_kvcache(token, *pages, k, v, **both, block_table=table),
        "the same, in pages of float8": lambda: fg.flash_attn_with_kvcache(token, *pages8, k, v, **both, **descales),
        "FlashAttention-3's, a new token in pages": lambda: fa3(token, *pages, k, v, **both, page_table=table),
        "serving.append": lambda: serving.append(step, rows[1], rows[2], *pages),
        "serving.run": lambda: serving.run(step, rows[0], *pages),
        "serving.append, in pages of float8": lambda: serving.append(step, rows[1], rows[2], *pages8, **scales),
        "serving.run, in pages of float8": lambda: serving.run(step, rows[0], *pages8, **scales),
        "fg.attention, in pages": lambda: fg.attention(token, *pages, mask=mask, cache=cache),
    }


def without_driver() -> None:
    """From now on, calls like those before launch nothing."""
    target: Any = GpuTarget(NoDriver())  # type: ignore[arg-type]
    target._contexts[-1], target._counters = 1, collections.defaultdict(NoCounter)
    for key, known in replay._replays.items():
        bare = [x._replace(target=target, call=x.call._replace(stretches=(), checked=())) for x in known]
        replay._replays[key] = tuple(bare)


def microseconds(call: Callable[[], Any]) -> float:
    """The best time of a call."""
    best = float("inf")
    for _ in range(WINDOWS):
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        best = min(best, (time.perf_counter() - start) / CALLS)
    return best * 1e6


def main() -> int:
    """Print the table; 1 when a figure is over the limit."""
    figures = {}
    with fg.torch.emulate_cpu():
        known = calls()
        for call in known.values():
            call()
        without_driver()
        for name, call in known.items():
            figures[name] = microseconds(call)
            print(f"{name:42} {figures[name]:5.1f} us")
    return int(any(figure > LIMIT for figure in figures.values()))


if __name__ == "__main__":
    sys.exit(main())
