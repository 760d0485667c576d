"""Masks and scores: flashgen beside compiled FlexAttention, on one GPU, in one interleaved run.

    python benchmarks/masks.py --results masks.json                      # the whole table, or what it still lacks
    python benchmarks/masks.py --lengths 65536 --masks causal,window     # a part of it
    python benchmarks/masks.py --show masks.json other.json              # one table of several runs; no GPU needed

Both get the same tensors and are checked against each other. Up to 16 processes trace and compile beforehand, and then
time what they have compiled, one at a time. FlexAttention's block mask is made beforehand too and is not counted;
flashgen has none. Figures are milliseconds, medians over rounds. The bias is (length, length), for all heads and
sequences: 8.6 GB at 65,536 tokens, where FlexAttention fails; flashgen then stands alone. Every row is printed, and
written to the results, as soon as it is measured; after a little more than --seconds all that there is is printed.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from functools import partial
from pathlib import Path

from mask_rows import NAMES, Cell, Results, Row, line, load, merged, table

#: Of the time that a run may take, what it may prepare for.
PREPARING = 0.7


def cells(options: argparse.Namespace) -> list[Cell]:
    """The table's lines, those of the shortest sequences first."""
    wanted = [part for part in options.masks.split(",") if part]
    return [
        Cell(name, head_dim, length, max(1, options.tokens // length), options.hidden // head_dim)
        for length in map(int, options.lengths.split(","))
        for head_dim in map(int, options.head_dims.split(","))
        for name in NAMES
        if not wanted or any(part in name for part in wanted)
    ]


def run(options: argparse.Namespace) -> Results:
    """Measures the cells that the results lack."""
    # What follows needs torch and a GPU, which showing results does not.
    import torch
    from mask_pool import Pool
    from mask_timing import Contest

    start = time.perf_counter()
    machine = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    earlier = [load(options.results)] if options.results and options.results.exists() else []
    results = merged([Results(machine), *earlier])
    known = {row.cell for row in results.rows}
    todo = [cell for cell in cells(options) if cell not in known]
    print(f"{machine}: {len(todo)} cells to measure, {len(known)} known", flush=True)
    make = partial(Contest, rounds=options.rounds, at_least=options.milliseconds)
    pool = Pool(make, min(options.workers, len(todo)))
    try:
        for remark in pool.prepare(todo, start + PREPARING * options.seconds):
            print(remark, flush=True)
        print(f"{time.perf_counter() - start:.0f} s: compiled", flush=True)
        for row in pool.rows(todo, start + options.seconds):
            results.put(row)
            if options.results:
                results.save(options.results)
            print(f"{line(row)} {time.perf_counter() - start:.0f} s{remarks(row)}", flush=True)
    finally:
        pool.close()
    return results


def remarks(row: Row) -> str:
    """What is odd about a row: graphs that were compiled after all, passes without figures."""
    missed = [f"{row.missed} of {row.missed + row.found} graphs compiled late"] if row.missed else []
    return "".join(f"; {remark}" for remark in (*missed, *row.notes.values()))


def first_results(options: argparse.Namespace, results: Results) -> None:
    """Adds the times to first results of some masks."""
    from mask_first import first_result

    for name in NAMES:
        if any(part in name for part in options.first.split(",")):
            first = first_result(name, int(options.head_dims.split(",")[-1]))
            print(f"first result of {name}: {first.seconds}", flush=True)
            results.put_first(first)
            if options.results:
                results.save(options.results)


def main() -> int:
    """The command line; 1 where the two disagree or flashgen lacks figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head-dims", default="64,128")
    parser.add_argument("--lengths", default="4096,16384,65536")
    parser.add_argument("--masks", default="", help=f"parts of names: {', '.join(NAMES)}; default: all")
    parser.add_argument("--tokens", type=int, default=16384, help="batch * length, as far as one sequence allows")
    parser.add_argument("--hidden", type=int, default=2048, help="heads * head_dim")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--milliseconds", type=float, default=25.0, help="per library and round, or one call")
    workers = min(16, len(os.sched_getaffinity(0)))
    parser.add_argument("--workers", type=int, default=workers, help="processes that compile")
    parser.add_argument("--seconds", type=float, default=195.0, help="begin to time no cell after so many")
    parser.add_argument("--first", default="window", help="parts of names: also time their first results")
    parser.add_argument("--results", type=Path, help="JSON with the rows so far, added to while it runs")
    parser.add_argument("--show", type=Path, nargs="+", help="measure nothing; show the table of these results")
    parser.add_argument("--markdown", type=Path, help="also write the table here")
    options = parser.parse_args()
    if options.show:
        results = merged(map(load, options.show))
    else:
        results = run(options)
        if options.first:
            first_results(options, results)
    text = table(results)
    print(text)
    if options.markdown:
        options.markdown.write_text(text + "\n")
    return 0 if all(row.is_sound() for row in results.rows) else 1


if __name__ == "__main__":
    sys.exit(main())
