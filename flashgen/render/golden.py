"""The sources under ``generated/``: committed to be read, diffed and reviewed, never read at run time.

``python -m flashgen.render.golden`` writes them; with ``--check`` it only looks, and fails when one is stale.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from flashgen.errors import FlashgenError
from flashgen.plan.model.plans import AttentionPlan, Role
from flashgen.render import render_afresh, templates_dir
from flashgen.spec import AttentionSpec, Schedule, WarpPartition, causal, document, full, softcap, window

Planner = Callable[[AttentionSpec, Schedule | None, str], AttentionPlan]
_DIFF_LINES = 40
#: Which document each token belongs to; a kernel's text knows no more of it than its type.
_IDS = np.zeros((1, 1), np.int32)


@dataclass(frozen=True, slots=True)
class Golden:
    """One spec on one architecture, and which of its kernels are kept."""

    spec: AttentionSpec
    arch: str
    roles: tuple[Role, ...]
    schedule: Schedule | None = None


#: Each row shows something that no other does.
GOLDEN: tuple[Golden, ...] = (
    # Both passes of the case that most models train with.
    Golden(AttentionSpec(128, mask=causal()), "sm_80", ("forward", "prepare", "main", "finish")),
    # Smaller heads, every pair of queries and keys.
    Golden(AttentionSpec(64, dtype="fp16", mask=full(), direction="forward"), "sm_80", ("forward",)),
    # The largest heads, on the least shared memory that bf16 runs on.
    Golden(AttentionSpec(256, mask=causal(), direction="forward"), "sm_86", ("forward",)),
    # No asynchronous copies, and matrix instructions of half the depth.
    Golden(AttentionSpec(64, dtype="fp16", mask=causal(), direction="forward"), "sm_75", ("forward",)),
    # Float32 accuracy.
    Golden(AttentionSpec(64, dtype="fp32", mask=causal(), direction="forward"), "sm_80", ("forward",)),
    # Values narrower than keys, and both padded inside the kernel.
    Golden(AttentionSpec(40, head_dim_v=24, mask=full(), direction="forward"), "sm_80", ("forward",)),
    # A sliding window: tiles are left out on both sides.
    Golden(AttentionSpec(128, mask=window(1024, 0), direction="forward"), "sm_90", ("forward",)),
    # FlashAttention-3 on Hopper: warp specialization, wgmma, TMA and a mask.
    Golden(AttentionSpec(128, mask=causal(), direction="forward"), "sm_90a", ("forward",)),
    # Its backward pass.
    Golden(AttentionSpec(128, mask=causal()), "sm_90a", ("prepare", "main")),
    # That of wide heads: dK and dV by one kernel, dQ by another.
    Golden(AttentionSpec(256, mask=causal()), "sm_90a", ("main", "query")),
    # The forward pass for smaller heads, without a mask.
    Golden(AttentionSpec(64, mask=full(), direction="forward"), "sm_90a", ("forward",)),
    # That of 8-bit inputs: V is transposed, and products are added to O in float32.
    Golden(AttentionSpec(128, dtype="e4m3", direction="forward"), "sm_90a", ("forward",)),
    # 16 bits with a document mask, which is block-sparse, and a score.
    Golden(
        AttentionSpec(128, mask=causal() & document(_IDS), score=softcap(30.0), direction="forward"),
        "sm_90a",
        ("forward",),
    ),
    # FlashAttention-1's partition: each warp owns keys, and results merge through shared memory.
    Golden(
        AttentionSpec(64, mask=full(), direction="forward"),
        "sm_80",
        ("forward",),
        Schedule(warps=WarpPartition("split_k", 4)),
    ),
    # Before FlashAttention: one thread for each element of O.
    Golden(AttentionSpec(64, mask=causal(), direction="forward"), "sm_80", ("forward",), Schedule(algorithm="naive")),
    # FlashAttention-1, in both passes.
    Golden(AttentionSpec(64, mask=causal()), "sm_80", ("forward", "main"), Schedule(algorithm="fa1")),
    # One block for each tile of queries, without tensor cores.
    Golden(AttentionSpec(64, mask=causal(), direction="forward"), "sm_80", ("forward",), Schedule(algorithm="grid1d")),
    # One block for each tile of scores; blocks wait for each other.
    Golden(AttentionSpec(64, mask=causal(), direction="forward"), "sm_80", ("forward",), Schedule(algorithm="grid2d")),
    # Dropout, in both passes.
    Golden(AttentionSpec(64, mask=causal(), dropout=True), "sm_80", ("forward", "main")),
    # Packed sequences.
    Golden(AttentionSpec(64, mask=causal(), varlen=True), "sm_80", ("forward", "main", "clear_gaps")),
    # A paged cache: the kernels for few and for many new queries, and those that append and combine.
    Golden(
        AttentionSpec(64, mask=causal(), direction="forward", cache="paged"),
        "sm_80",
        ("forward", "decode", "append", "combine"),
    ),
    # The same by wgmma and TMA.
    Golden(
        AttentionSpec(128, mask=causal(), direction="forward", cache="paged"),
        "sm_90a",
        ("decode",),
    ),
    # Latent attention: values are part of the keys.
    Golden(
        AttentionSpec(64, head_dim_v=512, mask=causal(), direction="forward", cache="paged", qv=True),
        "sm_90a",
        ("decode",),
    ),
    # A cache of 8-bit keys and values.
    Golden(
        AttentionSpec(128, mask=causal(), direction="forward", cache="paged", cache_dtype="e4m3"),
        "sm_90a",
        ("decode", "append"),
    ),
    # 8-bit queries, keys and values, where each block of rows has a scale, and the kernel that makes them.
    Golden(
        AttentionSpec(128, dtype="e4m3", mask=causal(), direction="forward", scale_block=128),
        "sm_89",
        ("forward", "quantize"),
    ),
    # Standard attention, the baseline: S, its softmax, O = P V, and the gradients from a stored P.
    Golden(
        AttentionSpec(64, mask=causal()),
        "sm_80",
        ("scores", "softmax", "forward", "ds", "dv", "dq", "dk"),
        Schedule(algorithm="standard"),
    ),
    # dQ without atomics.
    Golden(AttentionSpec(64, mask=causal(), deterministic=True), "sm_80", ("main", "query")),
)


def golden_sources(rows: Iterable[Golden], planner: Planner | None = None) -> dict[str, str]:
    """File name -> text of every kept kernel, in the order of the rows."""
    planner = planner or _planner()
    files: dict[str, str] = {}
    for row in rows:
        plan = planner(row.spec, row.schedule, row.arch)
        for role in row.roles:
            source = render_afresh(plan.kernel(role))
            name = f"{source.name}.cu"
            if files.setdefault(name, source.text) != source.text:
                raise FlashgenError(f"two golden kernels are both called {name}; change a row or how plans are named")
    return files


def write(directory: Path, files: dict[str, str]) -> list[str]:
    """Bring ``directory`` up to date; the names that changed, were added or removed."""
    directory.mkdir(parents=True, exist_ok=True)
    changed = [name for name, _ in stale(directory, files)]
    for name in changed:
        path = directory / name
        if name in files:
            path.write_text(files[name], encoding="utf-8", newline="\n")
        else:
            path.unlink()
    return changed


def stale(directory: Path, files: dict[str, str]) -> Iterator[tuple[str, list[str]]]:
    """The names whose file differs from what is generated now, each with a diff."""
    present = {path.name for path in directory.glob("*.cu")}
    for name in sorted(present | set(files)):
        old = (directory / name).read_text(encoding="utf-8") if name in present else None
        new = files.get(name)
        if old != new:
            yield name, list(_diff(name, old, new))


def _diff(name: str, old: str | None, new: str | None) -> Iterator[str]:
    if old is None:
        yield f"{name} is missing"
    elif new is None:
        yield f"{name} is no longer generated"
    else:
        lines = difflib.unified_diff(
            old.splitlines(), new.splitlines(), f"committed/{name}", f"generated/{name}", lineterm="", n=1
        )
        for count, line in enumerate(lines):
            if count == _DIFF_LINES:
                yield "..."
                return
            yield line


def _planner() -> Planner:
    from flashgen.plan import plan

    return plan


def main(arguments: list[str] | None = None) -> int:
    """The command; 0 when all is well, 1 when ``--check`` finds a stale file."""
    parser = argparse.ArgumentParser(prog="python -m flashgen.render.golden", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail when a file is stale")
    parser.add_argument("--directory", type=Path, help="default: generated/ beside templates/")
    options = parser.parse_args(arguments)
    directory = options.directory or templates_dir().parent / "generated"
    files = golden_sources(GOLDEN)
    if not options.check:
        changed = write(directory, files)
        print(f"{len(files)} files in {directory}, {len(changed)} changed")
        return 0
    differing = list(stale(directory, files))
    for _, diff in differing:
        print("\n".join(diff))
    if differing:
        print(f"{len(differing)} stale; run: python -m flashgen.render.golden", file=sys.stderr)
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
