"""Speed of flashgen beside PyTorch's attention backends and FlashAttention, on one GPU, in one interleaved run.

    python benchmarks/attention.py                      # the default grid against FlashAttention-2
    python benchmarks/attention.py --peers fa2,cudnn,fa4 --head-dims 64,128,256 --lengths 512,2048 --markdown table.md
    python benchmarks/attention.py --others --head-dims 128 --peers cudnn,fa3,fa4
    python benchmarks/attention.py --product            # beside what the GPU gives a plain product of large matrices

Every implementation gets the same tensors, is checked against attention in float64, for one head, and against the
first that is right, for all, and is timed in turn with CUDA events, in an order drawn anew for each round; figures are
medians over rounds, in TFLOP/s by the FlashAttention papers' convention: 4 * S^2 * D * H * B for the forward pass,
halved under a causal mask, and 2.5 times that for the backward pass.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from attention_judge import expected, last_group
from attention_peers import IMPLEMENTATIONS, PEERS, Attention, CannotError
from attention_rows import OURS, PRODUCT, PRODUCT_SIZE, Problem, Row, grid, others, save, table
from timing import milliseconds

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
#: Relative error (Frobenius norm) above which an implementation is wrong rather than rounded.
TOLERANCE = 2e-2
Call = Callable[[], tuple[torch.Tensor, ...]]


def tensors(problem: Problem) -> list[torch.Tensor]:
    """Queries, keys, values and the gradient of the output."""
    torch.manual_seed(0)
    rows = {"queries": (problem.queries, problem.heads), "keys": (problem.keys, problem.kv_heads)}
    return [
        torch.randn(problem.batch, *rows[of], problem.head_dim, device="cuda", dtype=DTYPES[problem.dtype])
        for of in ("queries", "keys", "keys", "queries")
    ]


def prepared(problem: Problem, attention: Attention, made: list[torch.Tensor]) -> Call:
    """What to time of one implementation."""
    *inputs, do = made
    if problem.direction == "forward":
        return lambda: (attention(problem, *inputs),)
    inputs = [x.detach().requires_grad_() for x in inputs]
    out = attention(problem, *inputs)
    return lambda: torch.autograd.grad(out, inputs, do, retain_graph=True)


def distance(got: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> float:
    """The largest relative error of a tensor."""
    return max(((x.to(w.dtype) - w).norm() / w.norm()).item() for x, w in zip(got, wanted, strict=True))


def calls(row: Row, names: list[str]) -> dict[str, Call]:
    """What to time, each checked before."""
    made = tensors(row.problem)
    exact = expected(row.problem, made)
    timed: dict[str, Call] = {}
    first: tuple[torch.Tensor, ...] | None = None
    for name in names:
        try:
            run = prepared(row.problem, IMPLEMENTATIONS[name], made)
            got = run()
            error = distance(last_group(row.problem, got), exact)
        except CannotError as why:
            row.notes[name] = str(why)
            continue
        except Exception as fault:
            # A peer that fails is left out of a cell, and the table says why. We may not.
            if name == OURS:
                raise
            row.notes[name] = f"{type(fault).__name__}: {' '.join(str(fault).split())[:160]}"
            continue
        # Of other heads, which the judge has not seen, nobody is right whom those before contradict.
        error = max(error, distance(got, first)) if first and error < TOLERANCE else error
        if error < TOLERANCE:
            first = first or tuple(x.float() for x in got)
            timed[name] = run
        elif name == OURS:
            raise SystemExit(f"{name} is wrong at {row.problem}: relative error {error:.3g}")
        else:
            row.notes[name] = f"it is wrong: relative error {error:.3g}"
    return timed


def product(dtype: str) -> Call:
    """A plain product of large matrices."""
    a, b = torch.randn(2, PRODUCT_SIZE, PRODUCT_SIZE, device="cuda", dtype=DTYPES[dtype])
    return lambda: (a @ b,)


def measure(problem: Problem, names: list[str], options: argparse.Namespace) -> Row:
    """Times every implementation in turn, round after round."""
    row = Row(problem)
    timed = calls(row, names)
    if options.product:
        timed[PRODUCT] = product(problem.dtype)
    repeats = {n: max(1, int(options.milliseconds / max(1e-3, milliseconds(run, 3)))) for n, run in timed.items()}
    rounds: dict[str, list[float]] = {name: [] for name in timed}
    for number in range(options.rounds):
        order = list(timed)
        # Whoever comes after a peer that lets the GPU cool down gains by it.
        random.Random(number).shuffle(order)
        for name in order:
            rounds[name].append(milliseconds(timed[name], repeats[name]))
    flops = dict.fromkeys(timed, problem.flops) | {PRODUCT: 2.0 * PRODUCT_SIZE**3}
    row.tflops = {n: flops[n] / statistics.median(ms) / 1e9 for n, ms in rounds.items()}
    return row


def problems(options: argparse.Namespace) -> list[Problem]:
    """As the command line asks for them."""
    directions = options.directions.split(",")
    head_dims = [int(x) for x in options.head_dims.split(",")]
    lengths = [int(x) for x in options.lengths.split(",")]
    if options.others:
        return list(others(directions, head_dims, options.tokens, options.hidden, options.dtype))
    return list(grid(directions, head_dims, lengths, options.tokens, options.hidden, options.dtype))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", default="fa2", help=f"comma-separated: {', '.join(PEERS)}")
    parser.add_argument("--head-dims", default="64,128")
    parser.add_argument("--lengths", default="1024,4096,16384")
    parser.add_argument("--directions", default="forward,backward")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--others", action="store_true", help="shared heads, few queries, odd lengths, window, softcap")
    parser.add_argument("--product", action="store_true", help="beside a plain product of large matrices")
    parser.add_argument("--tokens", type=int, default=16384, help="batch * length")
    parser.add_argument("--hidden", type=int, default=2048, help="heads * head_dim")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--milliseconds", type=float, default=25.0, help="per implementation and round")
    parser.add_argument("--markdown", type=Path, help="also write the table here")
    parser.add_argument("--json", type=Path, help="also write every figure here")
    options = parser.parse_args()
    peers = options.peers.split(",")
    unknown = set(peers) - set(PEERS)
    if unknown:
        parser.error(f"--peers knows no {', '.join(sorted(unknown))}; it knows {', '.join(PEERS)}")
    machine = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    print(machine, flush=True)
    rows: list[Row] = []
    for problem in problems(options):
        rows.append(measure(problem, [*peers, OURS], options))
        print(problem, {n: round(x) for n, x in rows[-1].tflops.items()}, flush=True)
        if options.json:
            save(machine, rows, options.json)
    text = table(rows, peers)
    print(text)
    if options.markdown:
        options.markdown.write_text(text + "\n")


if __name__ == "__main__":
    main()
