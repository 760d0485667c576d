"""Quantizing Q, K and V to e4m3 on a GPU: GB/s beside those of a copy of as many bytes.

    python benchmarks/quantize.py                      # a table
    python benchmarks/quantize.py --json quantize.json

The kernel reads two bytes of an element and writes one. A copy reads and writes the same bytes in all. Both are timed
in turn; figures are medians over rounds. The last column is the share of quantizing in the time of ``fp8_attention``.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from timing import milliseconds

import flashgen as fg

CALLS, ROUNDS = 20, 7


@dataclass(frozen=True)
class Problem:
    """One line of the table."""

    batch: int
    length: int
    heads: int
    heads_kv: int
    head_dim: int
    block: int
    rotate: bool = True
    dtype: str = "bf16"

    @property
    def elements(self) -> int:
        """Of Q, K and V."""
        return self.batch * self.length * (self.heads + 2 * self.heads_kv) * self.head_dim


ROWS = (
    Problem(2, 8192, 32, 32, 64, 128),
    Problem(2, 8192, 16, 16, 128, 128),
    Problem(2, 8192, 16, 16, 128, 128, rotate=False),
    Problem(2, 8192, 16, 16, 128, 128, dtype="fp16"),
    Problem(2, 8192, 16, 16, 128, 64),
    Problem(2, 8192, 8, 8, 256, 64),
    Problem(2, 8192, 8, 8, 256, 128),
    Problem(1, 131072, 32, 8, 128, 128),
    Problem(1, 4096, 16, 16, 128, 128),
    Problem(2, 8192, 24, 24, 80, 128),
)


def measured(problem: Problem) -> dict[str, Any]:
    """GB/s of quantizing and of copying, and milliseconds."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[problem.dtype]
    shape = problem.batch, problem.length, problem.heads, problem.head_dim
    q = torch.randn(shape, device="cuda", dtype=dtype)
    k, v = (torch.randn_like(q[:, :, : problem.heads_kv]) for _ in "kv")
    spec = fg.AttentionSpec(
        problem.head_dim, dtype="e4m3", out_dtype=problem.dtype, scale_block=problem.block, direction="forward"
    )
    kernel, moved = fg.build(spec), 3 * problem.elements
    source = torch.empty(moved // 2, device="cuda", dtype=torch.uint8)
    target = torch.empty_like(source)
    calls = {
        "quantize": lambda: kernel.quantize(q, k, v, rotate=problem.rotate),
        "copy": lambda: target.copy_(source),
        "attention": lambda: fg.fp8_attention(q, k, v, rotate=problem.rotate, block=problem.block),
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        milliseconds(call, 3)
    for _ in range(ROUNDS):
        for name, call in calls.items():
            times[name].append(milliseconds(call, CALLS))
    medians = {name: statistics.median(values) for name, values in times.items()}
    rates = {name: moved / medians[name] / 1e6 for name in ("quantize", "copy")}
    return {"ms": medians, "GB/s": rates}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write all figures here")
    given, found = parser.parse_args(), []
    print(torch.cuda.get_device_name())
    print("| B, S, H/Hk, D, block | dtype | rotated | us | GB/s | copy GB/s | of copy | of fp8_attention |")
    print("| --- | --- | --- | ---: | ---: | ---: | ---: | ---: |")
    for row in ROWS:
        result = measured(row)
        ms, rates = result["ms"], result["GB/s"]
        print(
            f"| {row.batch}, {row.length}, {row.heads}/{row.heads_kv}, {row.head_dim}, {row.block} | {row.dtype} "
            f"| {'yes' if row.rotate else 'no'} | {1e3 * ms['quantize']:.1f} | {rates['quantize']:.0f} "
            f"| {rates['copy']:.0f} | {rates['quantize'] / rates['copy']:.0%} "
            f"| {ms['quantize'] / ms['attention']:.1%} |",
            flush=True,
        )
        found.append(asdict(row) | result)
    if given.json:
        given.json.write_text(json.dumps({"gpu": torch.cuda.get_device_name(), "rows": found}, indent=1))


if __name__ == "__main__":
    main()
