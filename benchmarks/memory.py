"""Memory that a backward call takes at its peak, besides the gradients that it returns, on one GPU.

    python benchmarks/memory.py
    python benchmarks/memory.py --peers cudnn --head-dims 128 --lengths 1024,16384 --markdown table.md

In units of a float32 sum of dQ, 4 bytes for each of its elements. What the forward pass left for the backward pass is
not counted, as it was there before.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from attention import prepared, tensors
from attention_peers import IMPLEMENTATIONS, PEERS, Attention
from attention_rows import OURS, Problem, grid

#: What torch's allocator counts in.
GRANULE = 512


def share(problem: Problem, taken: int) -> float:
    """Bytes at the peak, less dq, dk and dv as they are allocated, in sums of dQ."""
    elements = problem.batch * problem.queries * problem.heads * problem.head_dim
    gradient = -(-2 * elements // GRANULE) * GRANULE
    return (taken - 3 * gradient) / (4 * elements)


def peak(problem: Problem, attention: Attention) -> int:
    """Bytes that a call allocates at its peak; of the second one, as a first one may find things out."""
    run = prepared(problem, attention, tensors(problem))
    for _ in range(2):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        gradients = run()
        torch.cuda.synchronize()
        taken = torch.cuda.max_memory_allocated() - before
        del gradients
    return taken


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", default="cudnn,fa2", help=f"comma-separated: {', '.join(PEERS)}")
    parser.add_argument("--head-dims", default="64,128,256")
    parser.add_argument("--lengths", default="512,4096,16384")
    parser.add_argument("--tokens", type=int, default=16384, help="batch * length")
    parser.add_argument("--hidden", type=int, default=2048, help="heads * head_dim")
    parser.add_argument("--markdown", type=Path, help="also write the table here")
    options = parser.parse_args()
    names = [OURS, *options.peers.split(",")]
    head_dims, lengths = ([int(x) for x in text.split(",")] for text in (options.head_dims, options.lengths))
    lines = [f"| D | mask | S | {' | '.join(names)} |", "|" + " --- |" * (3 + len(names))]
    for problem in grid(["backward"], head_dims, lengths, options.tokens, options.hidden, "bf16"):
        shares = [f"{share(problem, peak(problem, IMPLEMENTATIONS[name])):.3f}" for name in names]
        lines.append(f"| {problem.head_dim} | {problem.mask} | {problem.keys} | {' | '.join(shares)} |")
        print(lines[-1], flush=True)
    if options.markdown:
        options.markdown.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
