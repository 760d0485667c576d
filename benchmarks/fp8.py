"""Speed of attention in e4m3, FlashAttention-3's in e4m3 and flashgen's own in bf16, in one interleaved run.

    python benchmarks/fp8.py                                # against flashgen in bf16
    python benchmarks/fp8.py --peers fa3,bf16 --head-dims 64,128,256 --lengths 4096,16384
    python benchmarks/fp8.py --schedules 128x96,192x96      # and flashgen with other tiles, of queries x keys

Every implementation gets the same numbers, is checked against attention in float64, for one head, and is timed in
turn with CUDA events, in an order drawn anew for each round. Figures are medians over rounds, in TFLOP/s by the
FlashAttention papers' convention: 4 * S^2 * D * H * B, halved under a causal mask. FA3_LIBRARY names vLLM's build of
FlashAttention-3, if its package is not installed.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from attention_judge import expected, last_group
from attention_peers import vllm_fa3
from attention_rows import OURS, Problem, Row, grid, save, table
from timing import milliseconds

import flashgen as fg

#: Relative error (Frobenius norm) above which an implementation is wrong rather than rounded: P has three bits.
TOLERANCE = 6e-2
#: The largest e4m3 number over the largest of many normal ones.
LARGEST, SPREAD = 448.0, 6.0
Call = Callable[[], torch.Tensor]


class Inputs(NamedTuple):
    """Queries, keys and values in e4m3, and what each head's are multiplied by."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    scales: tuple[torch.Tensor, torch.Tensor, torch.Tensor]

    def wide(self, dtype: torch.dtype) -> list[torch.Tensor]:
        """The numbers that they stand for."""
        given = zip((self.q, self.k, self.v), self.scales, strict=True)
        return [(x.float() * scale[:, None, :, None]).to(dtype) for x, scale in given]


def inputs(problem: Problem) -> Inputs:
    """Normal numbers, quantized for each sequence and head."""
    torch.manual_seed(0)
    tensors, scales = [], []
    for rows, heads in ((problem.queries, problem.heads), *((problem.keys, problem.kv_heads),) * 2):
        scale = (torch.rand(problem.batch, heads, device="cuda") + 0.5) * (SPREAD / LARGEST)
        x = torch.randn(problem.batch, rows, heads, problem.head_dim, device="cuda")
        tensors.append((x / scale[:, None, :, None]).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn))
        scales.append(scale)
    q, k, v = tensors
    return Inputs(q, k, v, (scales[0], scales[1], scales[2]))


def flashgen(problem: Problem, given: Inputs) -> Call:
    """This project's kernel."""
    q_scale, k_scale, v_scale = given.scales
    mask = fg.causal() if problem.causal else None
    return lambda: fg.attention(given.q, given.k, given.v, mask=mask, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale)


def flashgen_with(tiles: str) -> Callable[[Problem, Inputs], Call]:
    """The same with tiles of so many queries and keys."""

    def prepare(problem: Problem, given: Inputs) -> Call:
        tile_q, tile_kv = map(int, tiles.split("x"))
        mask = fg.causal() if problem.causal else fg.full()
        spec = fg.AttentionSpec(
            problem.head_dim, head_dim_v=problem.head_dim, dtype="e4m3", mask=mask, direction="forward"
        )
        kernel = fg.build(spec, fg.Schedule(tile_q=tile_q, tile_kv=tile_kv, algorithm="fa3"))
        q_scale, k_scale, v_scale = given.scales
        return lambda: kernel(given.q, given.k, given.v, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale)[0]

    return prepare


def bf16(problem: Problem, given: Inputs) -> Call:
    """This project's kernel for bf16."""
    q, k, v = given.wide(torch.bfloat16)
    return lambda: fg.flash_attn_func(q, k, v, causal=problem.causal)


def fa3(problem: Problem, given: Inputs) -> Call:
    """FlashAttention-3 in e4m3: its package, or vLLM's build."""
    if "FA3_LIBRARY" not in os.environ:
        from flash_attn_interface import flash_attn_func

        q_descale, k_descale, v_descale = given.scales

        def run() -> torch.Tensor:
            out = flash_attn_func(
                *given[:3], causal=problem.causal, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale
            )
            return out[0] if isinstance(out, tuple) else out

        return run
    rows = [x.reshape(-1, *x.shape[2:]) for x in given[:3]]
    starts_q, starts_k = (
        torch.arange(0, (x.shape[0] + 1) * x.shape[1], x.shape[1], device=x.device, dtype=torch.int32)
        for x in (given.q, given.k)
    )
    longest = (problem.queries, problem.keys)
    return lambda: vllm_fa3(
        *rows, starts_q, starts_k, longest=longest, causal=problem.causal, descales=given.scales
    ).view(given.q.shape)


PEERS: dict[str, Callable[[Problem, Inputs], Call]] = {"fa3": fa3, "bf16": bf16}


def measure(problem: Problem, chosen: dict[str, Callable[[Problem, Inputs], Call]], options: argparse.Namespace) -> Row:
    """Times every implementation in turn, round after round."""
    row, given = Row(problem), inputs(problem)
    wide = given.wide(torch.float32)
    (exact,) = expected(problem, [*wide, torch.zeros_like(wide[0])])
    timed: dict[str, Call] = {}
    for name, prepare in chosen.items():
        try:
            run = prepare(problem, given)
            (got,) = last_group(problem, [run()])
        except Exception as fault:
            if name == OURS:
                raise
            row.notes[name] = f"{type(fault).__name__}: {' '.join(str(fault).split())[:160]}"
            continue
        error = ((got - exact).norm() / exact.norm()).item()
        print(f"{problem}, {name}: relative error {error:.2e}", flush=True)
        if error < TOLERANCE:
            timed[name] = run
        elif name == OURS:
            raise SystemExit(f"{name} is wrong at {problem}: relative error {error:.3g}")
        else:
            row.notes[name] = f"it is wrong: relative error {error:.3g}"
    repeats = {n: max(1, int(options.milliseconds / max(1e-3, milliseconds(run, 3)))) for n, run in timed.items()}
    rounds: dict[str, list[float]] = {name: [] for name in timed}
    for number in range(options.rounds):
        order = list(timed)
        random.Random(number).shuffle(order)
        for name in order:
            rounds[name].append(milliseconds(timed[name], repeats[name]))
    row.tflops = {n: problem.flops / statistics.median(ms) / 1e9 for n, ms in rounds.items()}
    return row


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", default="bf16", help=f"comma-separated: {', '.join(PEERS)}")
    parser.add_argument("--schedules", default="", help="comma-separated tiles of queries x keys: 128x96")
    parser.add_argument("--head-dims", default="64,128,256")
    parser.add_argument("--lengths", default="1024,4096,16384")
    parser.add_argument("--tokens", type=int, default=16384, help="batch * length")
    parser.add_argument("--hidden", type=int, default=2048, help="heads * head_dim")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--milliseconds", type=float, default=25.0, help="per implementation and round")
    parser.add_argument("--markdown", type=Path, help="also write the table here")
    parser.add_argument("--json", type=Path, help="also write every figure here")
    options = parser.parse_args()
    peers = options.peers.split(",") if options.peers else []
    if unknown := set(peers) - set(PEERS):
        parser.error(f"--peers knows no {', '.join(sorted(unknown))}; it knows {', '.join(PEERS)}")
    schedules = {tiles: flashgen_with(tiles) for tiles in options.schedules.split(",") if tiles}
    chosen = {name: PEERS[name] for name in peers} | schedules | {OURS: flashgen}
    machine = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    print(machine, flush=True)
    dims, lengths = ([int(x) for x in text.split(",")] for text in (options.head_dims, options.lengths))
    rows: list[Row] = []
    for problem in grid(["forward"], dims, lengths, options.tokens, options.hidden, "e4m3"):
        rows.append(measure(problem, chosen, options))
        print(problem, {n: round(x) for n, x in rows[-1].tflops.items()}, flush=True)
        if options.json:
            save(machine, rows, options.json)
    text = table(rows, [*peers, *schedules])
    print(text)
    if options.markdown:
        options.markdown.write_text(text + "\n")


if __name__ == "__main__":
    main()
