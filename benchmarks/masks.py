"""Masks and scores: flashgen beside compiled FlexAttention, on one GPU, in one interleaved run.

    python benchmarks/masks.py                                       # every mask at 4k and 16k
    python benchmarks/masks.py --lengths 65536 --masks causal,window --markdown table.md

Both get the same tensors and are checked against each other. FlexAttention's block mask is made beforehand and is
not counted; flashgen has none. Figures are milliseconds, medians over rounds. With --first, also the time from a
Python function to its first result, compilation included, each in a fresh process with empty caches.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from timing import milliseconds
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import flashgen as fg

#: Relative error (Frobenius norm) above which two implementations disagree.
TOLERANCE = 2e-2


@dataclass(frozen=True)
class Variant:
    """One mask or score as both libraries write it."""

    spec: dict[str, Any]
    mask_mod: Callable[..., torch.Tensor] | None = None
    score_mod: Callable[..., torch.Tensor] | None = None


def causal_mod(b: Any, h: Any, q: Any, k: Any) -> Any:
    """FlexAttention's causal mask."""
    return q >= k


def variants(batch: int, heads: int, length: int) -> Iterator[tuple[str, Callable[[], Variant]]]:
    """Every named case for these sizes; tensors are made when a case is asked for."""

    def document() -> Variant:
        ids = (torch.arange(length, device="cuda") // max(1, length // 16)).to(torch.int32).repeat(batch, 1)
        return Variant({"mask": fg.causal() & fg.document(ids)}, lambda b, h, q, k: (q >= k) & (ids[b, q] == ids[b, k]))

    def alibi() -> Variant:
        slopes = torch.exp2(-8.0 * torch.arange(1, heads + 1, device="cuda") / heads)
        return Variant(
            {"mask": fg.causal(), "score": lambda s, b, h, q, k: s + slopes[h] * (k - q)},
            causal_mod,
            lambda s, b, h, q, k: s + slopes[h] * (k - q),
        )

    def bias() -> Variant:
        table = torch.randn(length, length, device="cuda", dtype=torch.bfloat16)
        return Variant({"score": fg.bias(table)}, None, lambda s, b, h, q, k: s + table[q, k])

    prefix = length // 4
    yield "causal", lambda: Variant({"mask": fg.causal()}, causal_mod)
    yield (
        "window 1024",
        lambda: Variant({"mask": fg.causal() & fg.sliding_window(1023)}, lambda b, h, q, k: (q >= k) & (q - k < 1024)),
    )
    yield "16 documents", document
    yield "prefix-LM", lambda: Variant({"mask": fg.prefix_lm(prefix)}, lambda b, h, q, k: (q >= k) | (k < prefix))
    yield "ALiBi", alibi
    yield (
        "softcap",
        lambda: Variant(
            {"mask": fg.causal(), "score": fg.softcap(30.0)},
            causal_mod,
            lambda s, b, h, q, k: torch.tanh(s / 30.0) * 30.0,
        ),
    )
    if length <= 16384:
        yield "bias", bias


@dataclass(frozen=True)
class Cell:
    """One line of the table."""

    name: str
    head_dim: int
    length: int
    batch: int
    heads: int


@dataclass
class Row:
    """A cell's milliseconds, by pass and library."""

    cell: Cell
    times: dict[str, dict[str, float]] = field(default_factory=dict)

    def ratio(self, direction: str) -> float:
        """How many times as fast as FlexAttention."""
        return self.times[direction]["flex"] / self.times[direction]["flashgen"]


Calls = dict[str, tuple[Callable[[], Any], Callable[[], Any]]]


def calls(cell: Cell, variant: Variant) -> Calls:
    """Forward and backward of both libraries, checked against each other."""
    torch.manual_seed(0)
    shape = (cell.batch, cell.length, cell.heads, cell.head_dim)
    q, k, v, do = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    kernel = fg.build(fg.AttentionSpec(cell.head_dim, **variant.spec))
    out, lse = kernel(q, k, v)
    grads = kernel.backward(do, q, k, v, out, lse)

    inputs = [x.transpose(1, 2).detach().requires_grad_() for x in (q, k, v)]
    block_mask = None
    if variant.mask_mod is not None:
        block_mask = create_block_mask(variant.mask_mod, cell.batch, None, cell.length, cell.length, _compile=True)
    flex = torch.compile(flex_attention, dynamic=False)
    plain = [x.detach() for x in inputs]

    def flex_forward() -> Any:
        return flex(*plain, score_mod=variant.score_mod, block_mask=block_mask)

    flex_out = flex(*inputs, score_mod=variant.score_mod, block_mask=block_mask)

    def flex_backward() -> Any:
        return torch.autograd.grad(flex_out, inputs, do.transpose(1, 2), retain_graph=True)

    for mine, other in zip((out, *grads), (flex_out, *flex_backward()), strict=True):
        theirs = other.detach().transpose(1, 2).float()
        error = ((mine.float() - theirs).norm() / theirs.norm()).item()
        if not error < TOLERANCE:
            raise SystemExit(f"flashgen and FlexAttention disagree at {cell}: relative error {error:.3g}")
    return {
        "flashgen": (lambda: kernel(q, k, v), lambda: kernel.backward(do, q, k, v, out, lse)),
        "flex": (flex_forward, flex_backward),
    }


def measure(cell: Cell, variant: Variant, options: argparse.Namespace) -> Row:
    """Times both libraries in turn, round after round."""
    row = Row(cell)
    made = calls(cell, variant)
    for which, direction in enumerate(("forward", "backward")):
        timed = {name: both[which] for name, both in made.items()}
        repeats = {n: max(1, int(options.milliseconds / max(1e-3, milliseconds(run, 2)))) for n, run in timed.items()}
        rounds: dict[str, list[float]] = {name: [] for name in timed}
        for _ in range(options.rounds):
            for name, run in timed.items():
                rounds[name].append(milliseconds(run, repeats[name]))
        row.times[direction] = {name: statistics.median(ms) for name, ms in rounds.items()}
    return row


def table(rows: list[Row]) -> str:
    """The figures as Markdown, with the geometric means below."""
    lines = [
        "| mask or score | D | S | flex fwd | flashgen fwd | ratio | flex bwd | flashgen bwd | ratio |",
        "|" + " --- |" * 9,
    ]
    for row in rows:
        figures = []
        for direction, times in row.times.items():
            figures += [f"{times['flex']:.3f}", f"{times['flashgen']:.3f}", f"{row.ratio(direction):.2f}"]
        lines.append(f"| {row.cell.name} | {row.cell.head_dim} | {row.cell.length} | {' | '.join(figures)} |")
    for direction in ("forward", "backward"):
        logs = [math.log(row.ratio(direction)) for row in rows]
        if logs:
            lines.append(f"\nGeometric mean, {direction}: {math.exp(sum(logs) / len(logs)):.3f}")
    return "\n".join(lines)


FIRST = {
    "flashgen": """
import flashgen as fg
window = 1024
spec = fg.AttentionSpec(128, mask=lambda b, h, q, k: (q >= k) & (q - k < window), direction="forward")
fg.build(spec)(q, k, v)
""",
    "flex": """
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
mask = create_block_mask(lambda b, h, q, k: (q >= k) & (q - k < 1024), None, None, 4096, 4096)
torch.compile(flex_attention)(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), block_mask=mask)
""",
}


def first_results() -> dict[str, float]:
    """Seconds from a Python function to its first result, in a fresh process with empty caches."""
    shape = "1, 4096, 16, 128, device='cuda', dtype=torch.bfloat16"
    prelude = f"import torch, time\nq, k, v = (torch.randn({shape}) for _ in 'qkv')\n"
    prelude += "torch.cuda.synchronize(); start = time.perf_counter()\n"
    end = "torch.cuda.synchronize(); print(time.perf_counter() - start)\n"
    seconds = {}
    for name, body in FIRST.items():
        with tempfile.TemporaryDirectory() as folder:
            caches = {"FLASHGEN_CACHE_DIR": folder, "TORCHINDUCTOR_CACHE_DIR": folder, "TRITON_CACHE_DIR": folder}
            done = subprocess.run(
                [sys.executable, "-c", prelude + body + end],
                env={**os.environ, **caches},
                capture_output=True,
                text=True,
                check=True,
            )
            seconds[name] = float(done.stdout.split()[-1])
    return seconds


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head-dims", default="64,128")
    parser.add_argument("--lengths", default="4096,16384")
    parser.add_argument("--masks", default="", help="comma-separated names, or parts of them; default: all")
    parser.add_argument("--tokens", type=int, default=16384, help="batch * length, as far as one sequence allows")
    parser.add_argument("--hidden", type=int, default=2048, help="heads * head_dim")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--milliseconds", type=float, default=25.0, help="per library and round")
    parser.add_argument("--first", action="store_true", help="also time the first result")
    parser.add_argument("--markdown", type=Path, help="also write the table here")
    options = parser.parse_args()
    wanted = [part for part in options.masks.split(",") if part]
    print(torch.cuda.get_device_name(), "torch", torch.__version__, flush=True)
    rows = []
    for head_dim in map(int, options.head_dims.split(",")):
        for length in map(int, options.lengths.split(",")):
            batch, heads = max(1, options.tokens // length), options.hidden // head_dim
            for name, make in variants(batch, heads, length):
                if wanted and not any(part in name for part in wanted):
                    continue
                torch._dynamo.reset()
                start = time.perf_counter()
                rows.append(measure(Cell(name, head_dim, length, batch, heads), make(), options))
                print(rows[-1], f"{time.perf_counter() - start:.0f} s", flush=True)
    text = table(rows)
    if options.first:
        text += "".join(f"\nFirst result, {name}: {s:.2f} s" for name, s in first_results().items())
    print(text)
    if options.markdown:
        options.markdown.write_text(text + "\n")


if __name__ == "__main__":
    main()
