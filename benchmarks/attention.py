"""Speed of flashgen beside PyTorch's attention backends, on one GPU, in one interleaved run.

    python benchmarks/attention.py                      # the default grid against FlashAttention-2
    python benchmarks/attention.py --peers fa2,cudnn --head-dims 64,128,256 --lengths 512,2048 --markdown table.md

Every implementation gets the same tensors, is checked against the first peer, and is timed in turn with CUDA events;
figures are medians over rounds, in TFLOP/s by the FlashAttention papers' convention: 4 * S^2 * D * H * B for the
forward pass, halved under a causal mask, and 2.5 times that for the backward pass.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as functional
from timing import milliseconds
from torch.nn.attention import SDPBackend, sdpa_kernel

import flashgen as fg

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool], torch.Tensor]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
#: Relative error (Frobenius norm) above which an implementation is wrong rather than rounded.
TOLERANCE = 2e-2


def backend(which: SDPBackend) -> Attention:
    """A backend of torch's scaled_dot_product_attention, on (batch, length, heads, head_dim) tensors."""

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
        with sdpa_kernel(which):
            out = functional.scaled_dot_product_attention(
                q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=causal
            )
        return out.transpose(1, 2)

    return run


def fa3(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """FlashAttention-3, where its package is installed."""
    from flash_attn_interface import flash_attn_func

    out = flash_attn_func(q, k, v, causal=causal)
    return out[0] if isinstance(out, tuple) else out


def fa4(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """FlashAttention-4, where its package is installed."""
    from flash_attn.cute.interface import flash_attn_func

    out = flash_attn_func(q, k, v, causal=causal)
    return out[0] if isinstance(out, tuple) else out


def flashgen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """This project's kernels behind flash-attn's name."""
    return fg.flash_attn_func(q, k, v, causal=causal)


PEERS: dict[str, Attention] = {
    "fa2": backend(SDPBackend.FLASH_ATTENTION),
    "cudnn": backend(SDPBackend.CUDNN_ATTENTION),
    "fa3": fa3,
    "fa4": fa4,
}


@dataclass(frozen=True)
class Cell:
    """One row of the table."""

    direction: str
    head_dim: int
    causal: bool
    length: int
    batch: int
    heads: int

    @property
    def flops(self) -> float:
        """Floating-point operations by the papers' convention."""
        forward = 4.0 * self.length**2 * self.head_dim * self.heads * self.batch * (0.5 if self.causal else 1.0)
        return forward * (2.5 if self.direction == "backward" else 1.0)


@dataclass
class Row:
    """A cell's figures, in TFLOP/s by implementation."""

    cell: Cell
    tflops: dict[str, float] = field(default_factory=dict)

    def ratio(self, peer: str) -> float:
        """How many times as fast as the peer."""
        return self.tflops["flashgen"] / self.tflops[peer]


def cells(options: argparse.Namespace) -> Iterator[Cell]:
    """The grid: a fixed number of tokens, a fixed hidden size."""
    for direction in options.directions.split(","):
        for head_dim in map(int, options.head_dims.split(",")):
            for causal in (False, True):
                for length in map(int, options.lengths.split(",")):
                    batch = max(1, options.tokens // length)
                    yield Cell(direction, head_dim, causal, length, batch, options.hidden // head_dim)


def calls(cell: Cell, implementations: dict[str, Attention], dtype: torch.dtype) -> dict[str, Callable[[], object]]:
    """What to time, each checked against the first implementation."""
    torch.manual_seed(0)
    shape = (cell.batch, cell.length, cell.heads, cell.head_dim)
    q, k, v, do = (torch.randn(shape, device="cuda", dtype=dtype) for _ in range(4))
    timed: dict[str, Callable[[], object]] = {}
    expected: tuple[torch.Tensor, ...] | None = None
    for name, attention in implementations.items():
        inputs = tuple(x.detach().requires_grad_(cell.direction == "backward") for x in (q, k, v))

        def forward(
            attention: Attention = attention, inputs: tuple[torch.Tensor, ...] = inputs
        ) -> tuple[torch.Tensor, ...]:
            return (attention(*inputs, cell.causal),)

        run = forward
        if cell.direction == "backward":
            (out,) = forward()

            def run(out: torch.Tensor = out, inputs: tuple[torch.Tensor, ...] = inputs) -> tuple[torch.Tensor, ...]:
                return torch.autograd.grad(out, inputs, do, retain_graph=True)

        got = run()
        expected = expected or tuple(x.float() for x in got)
        for mine, other in zip(got, expected, strict=True):
            error = ((mine.float() - other).norm() / other.norm()).item()
            if not error < TOLERANCE:
                raise SystemExit(f"{name} disagrees at {cell}: relative error {error:.3g}")
        timed[name] = run
    return timed


def measure(cell: Cell, implementations: dict[str, Attention], options: argparse.Namespace) -> Row:
    """Times every implementation in turn, round after round."""
    timed = calls(cell, implementations, DTYPES[options.dtype])
    repeats = {n: max(1, int(options.milliseconds / max(1e-3, milliseconds(run, 3)))) for n, run in timed.items()}
    rounds: dict[str, list[float]] = {name: [] for name in timed}
    for _ in range(options.rounds):
        for name, run in timed.items():
            rounds[name].append(milliseconds(run, repeats[name]))
    return Row(cell, {n: cell.flops / statistics.median(ms) / 1e9 for n, ms in rounds.items()})


def table(rows: list[Row], peers: list[str]) -> str:
    """The figures as Markdown, with the geometric mean of the ratios below."""
    names = [*peers, "flashgen"]
    lines = [
        f"| pass | D | mask | S | {' | '.join(names)} | {' | '.join(f'vs {p}' for p in peers)} |",
        "|" + " --- |" * (4 + len(names) + len(peers)),
    ]
    for row in rows:
        cell = row.cell
        figures = [f"{row.tflops[n]:.0f}" for n in names] + [f"{row.ratio(p):.2f}" for p in peers]
        mask = "causal" if cell.causal else "full"
        lines.append(f"| {cell.direction} | {cell.head_dim} | {mask} | {cell.length} | {' | '.join(figures)} |")
    for peer in peers:
        for label in ("forward", "backward", ""):
            logs = [math.log(r.ratio(peer)) for r in rows if r.cell.direction.startswith(label)]
            if logs:
                mean = math.exp(sum(logs) / len(logs))
                lines.append(f"\nGeometric mean vs {peer}, {label or 'all'}: {mean:.3f}")
    return "\n".join(lines)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", default="fa2", help=f"comma-separated: {', '.join(PEERS)}")
    parser.add_argument("--head-dims", default="64,128")
    parser.add_argument("--lengths", default="1024,4096,16384")
    parser.add_argument("--directions", default="forward,backward")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--tokens", type=int, default=16384, help="batch * length")
    parser.add_argument("--hidden", type=int, default=2048, help="heads * head_dim")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--milliseconds", type=float, default=25.0, help="per implementation and round")
    parser.add_argument("--markdown", type=Path, help="also write the table here")
    options = parser.parse_args()
    peers = options.peers.split(",")
    implementations = {name: PEERS[name] for name in peers} | {"flashgen": flashgen}
    print(torch.cuda.get_device_name(), "torch", torch.__version__, flush=True)
    rows = []
    for cell in cells(options):
        rows.append(measure(cell, implementations, options))
        print(cell, {n: round(x) for n, x in rows[-1].tflops.items()}, flush=True)
    text = table(rows, peers)
    print(text)
    if options.markdown:
        options.markdown.write_text(text + "\n")


if __name__ == "__main__":
    main()
