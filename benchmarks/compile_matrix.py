"""Compile every kernel that flashgen promises, and hold registers, spills and stack against the promise.

    python benchmarks/compile_matrix.py [--write] [--jobs 2] [--arch sm_80 ...] [--dtype fp16 ...] ...

The promise: head_dim 16 to 256, every dtype, full and causal, forward and backward (with and without
``deterministic``), for each architecture; with the schedules that flashgen chooses, no spills and no stack
at head_dim <= 128. What the promise leaves out stands in ``EXCEPTIONS``, with its reason. Ends with 1 when a
kernel breaks it, or when an exception no longer is one.

Kernels are kept in the kernel cache, so a second run compiles only what changed since. Processes compile
side by side, because NVRTC compiles one kernel at a time in each.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "reference" / "compile-matrix.md"
ARCHS = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_90a", "sm_120")
DTYPES = ("fp16", "bf16", "fp32")
HEAD_DIMS = (16, 40, 64, 80, 96, 128, 160, 192, 256)
MASKS = ("full", "causal")
ROLES = ("forward", "prepare", "main", "query", "finish")
#: Up to here nothing may spill.
NO_SPILLS_UP_TO = 128


@dataclass(frozen=True)
class Point:
    """One spec on one architecture."""

    arch: str
    dtype: str
    head_dim: int
    mask: str
    deterministic: bool

    def __str__(self) -> str:
        extra = ", deterministic" if self.deterministic else ""
        return f"{self.arch} {self.dtype} head_dim {self.head_dim}, {self.mask}{extra}"


@dataclass(frozen=True)
class Exempt:
    """Kernels that the promise leaves out: they cannot be planned, or may spill."""

    archs: Sequence[str]
    dtypes: Sequence[str]
    head_dims: Sequence[int]
    roles: Sequence[str]
    reason: str
    masks: Sequence[str] = MASKS

    def covers(self, point: Point, role: str) -> bool:
        """Whether this row is about that kernel of that point."""
        return (
            point.arch in self.archs
            and point.dtype in self.dtypes
            and point.head_dim in self.head_dims
            and point.mask in self.masks
            and role in self.roles
        )

    def describe(self) -> str:
        """Which kernels, in words."""
        masks = "" if tuple(self.masks) == MASKS else ", " + " ".join(self.masks)
        dims = ", ".join(map(str, self.head_dims))
        return f"{' '.join(self.archs)}, {' '.join(self.dtypes)}, head_dim {dims}{masks}: {', '.join(self.roles)}"


BACKWARD = ("prepare", "main", "query", "finish")
#: Nothing of these is promised to exist.
CANNOT_BE_PLANNED: tuple[Exempt, ...] = (
    Exempt(
        ("sm_75",),
        ("fp32",),
        (256,),
        BACKWARD,
        "K, V, Q and dO of the smallest tiles take all 64 KiB of a block's shared memory, and P and dS need more",
    ),
)
#: These may spill although head_dim <= 128.
MAY_SPILL: tuple[Exempt, ...] = (
    Exempt(
        ("sm_75",),
        ("fp32",),
        (128,),
        ("forward", "query"),
        "without asynchronous copies the next tiles wait in registers, beside fragments of float",
    ),
)


@dataclass(frozen=True)
class Compiled:
    """What the assembler says of one kernel."""

    point: Point
    role: str
    registers: int
    spill_bytes: int
    stack_bytes: int
    seconds: float

    def __str__(self) -> str:
        return f"{self.point}: {self.role}"


@dataclass
class Outcome:
    """What became of one point: its kernels, and what went wrong with it."""

    point: Point
    kernels: list[Compiled] = field(default_factory=list)
    #: (passes that do not exist, the planner's sentence)
    refused: tuple[tuple[str, ...], str] | None = None
    failures: list[str] = field(default_factory=list)


def points(options: argparse.Namespace) -> Iterator[Point]:
    """The points that were asked for; sm_75 has no bf16."""
    combined = product(options.arch, options.dtype, options.head_dim, options.mask, (False, True))
    for point in (Point(*values) for values in combined):
        if (point.arch, point.dtype) != ("sm_75", "bf16"):
            yield point


def compile_point(point: Point) -> Outcome:
    """Plans and compiles all kernels of a point; runs in a process of its own."""
    import flashgen as fg
    from flashgen.cache import default_cache
    from flashgen.compile import compile_source
    from flashgen.plan import plan
    from flashgen.render import render

    outcome = Outcome(point)
    mask = fg.causal() if point.mask == "causal" else fg.full()

    def spec(direction: str) -> fg.AttentionSpec:
        return fg.AttentionSpec(
            point.head_dim,
            dtype=point.dtype,
            mask=mask,
            direction="both" if direction == "both" else "forward",
            deterministic=point.deterministic,
        )

    try:
        kernels = plan(spec("both"), None, point.arch).kernels
    except fg.PlanError as error:
        outcome.refused = BACKWARD, str(error)
        try:
            kernels = plan(spec("forward"), None, point.arch).kernels
        except fg.PlanError as worse:
            outcome.refused = ROLES, str(worse)
            return outcome
    for kernel in kernels:
        if kernel.role == "forward" and point.deterministic:
            continue  # the same code as without
        try:
            binary, _ = default_cache().get_or_compile(render(kernel), compile_source)
        except fg.FlashgenError as error:
            outcome.failures.append(f"{point}: {kernel.role} does not compile: {error}")
            continue
        found = binary.resources
        outcome.kernels.append(
            Compiled(
                point,
                kernel.role,
                found.registers,
                found.spill_bytes,
                found.stack_bytes,
                binary.compile_seconds,
            )
        )
    return outcome


def run(wanted: Sequence[Point], jobs: int) -> list[Outcome]:
    """All outcomes, in the order of the points."""
    started, outcomes, shown = time.monotonic(), {}, 0.0
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        futures = [pool.submit(compile_point, point) for point in wanted]
        for future in as_completed(futures):
            outcome = future.result()
            outcomes[outcome.point] = outcome
            for line in broken([outcome]):
                print(line, file=sys.stderr, flush=True)
            if time.monotonic() - shown > 20 or len(outcomes) == len(wanted):
                shown = time.monotonic()
                print(
                    f"{len(outcomes)} of {len(wanted)} specs, {shown - started:.0f} s",
                    file=sys.stderr,
                    flush=True,
                )
    return [outcomes[point] for point in wanted]


def broken(outcomes: Iterable[Outcome]) -> Iterator[str]:
    """Every breach of the promise, one line each."""
    for outcome in outcomes:
        yield from outcome.failures
        if outcome.refused:
            roles, sentence = outcome.refused
            if not all(any(e.covers(outcome.point, r) for e in CANNOT_BE_PLANNED) for r in roles):
                yield f"{outcome.point} cannot be planned: {sentence}"
        for kernel in outcome.kernels:
            small = kernel.point.head_dim <= NO_SPILLS_UP_TO
            spills = kernel.spill_bytes or kernel.stack_bytes
            if small and spills and not any(e.covers(kernel.point, kernel.role) for e in MAY_SPILL):
                yield f"{kernel}: {kernel.spill_bytes} bytes of spills, {kernel.stack_bytes} of stack"


def needless(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Exceptions that nothing needs, among the points that were asked for."""
    kernels = [kernel for outcome in outcomes for kernel in outcome.kernels]
    for row in CANNOT_BE_PLANNED:
        if any(row.covers(k.point, k.role) for k in kernels):
            yield f"can be planned, so strike it from the exceptions: {row.describe()}"
    for row in MAY_SPILL:
        covered = [k for k in kernels if row.covers(k.point, k.role)]
        if covered and not any(k.spill_bytes or k.stack_bytes for k in covered):
            yield f"does not spill, so strike it from the exceptions: {row.describe()}"


def table(kernels: Sequence[Compiled]) -> Iterator[str]:
    """Markdown rows: the worst of each architecture, dtype and range of head dims."""
    yield "| arch | dtype | head_dim | kernels | " + " | ".join(ROLES) + " | spill bytes | stack bytes |"
    yield "| --- | --- | --- | ---: | " + " | ".join(["---:"] * (len(ROLES) + 2)) + " |"
    for arch, dtype, small in product(ARCHS, DTYPES, (True, False)):
        group = [
            k
            for k in kernels
            if (k.point.arch, k.point.dtype, k.point.head_dim <= NO_SPILLS_UP_TO) == (arch, dtype, small)
        ]
        if group:
            worst = [max((k.registers for k in group if k.role == role), default=0) for role in ROLES]
            cells = [arch, dtype, f"{'<=' if small else '>'} {NO_SPILLS_UP_TO}", len(group), *worst]
            cells += [max(k.spill_bytes for k in group), max(k.stack_bytes for k in group)]
            yield f"| {' | '.join(map(str, cells))} |"


def spilling(kernels: Sequence[Compiled]) -> Iterator[str]:
    """Markdown rows: the kernels that spill or keep arrays on the stack, masks side by side."""
    rows: dict[tuple[str, ...], dict[str, list[str]]] = {}
    for k in kernels:
        if k.spill_bytes or k.stack_bytes:
            extra = ", deterministic" if k.point.deterministic and k.role == "main" else ""
            cells = rows.setdefault((k.role + extra, k.point.dtype, str(k.point.head_dim)), {})
            cells.setdefault(k.point.arch, []).append(f"{k.point.mask} {k.spill_bytes}/{k.stack_bytes}")
    for key, by_arch in rows.items():
        found = "; ".join(f"{arch}: {', '.join(cells)}" for arch, cells in by_arch.items())
        yield f"| {' | '.join(key)} | {found} |"


def document(outcomes: Sequence[Outcome]) -> str:
    """The Markdown page."""
    from flashgen.compile import compiler_build_id

    kernels = [kernel for outcome in outcomes for kernel in outcome.kernels]
    minutes = sum(k.seconds for k in kernels) / 60
    bad = list(spilling(kernels))
    heading = ["Spill bytes / stack bytes:", "", "| kernel | dtype | head_dim | where |", "| --- | --- | ---: | --- |"]
    lines = [
        "# What the compiler makes of every kernel",
        "",
        "<!-- not run: takes an hour -->",
        "```console",
        "$ python benchmarks/compile_matrix.py --write",
        "```",
        "",
        "This command compiles every combination and writes this page:",
        "",
        f"- head_dim {', '.join(map(str, HEAD_DIMS))};",
        f"- {', '.join(DTYPES)}, with the masks {' and '.join(MASKS)};",
        "- forward and backward, with and without `deterministic`;",
        "- with the schedules that the plan chooses.",
        "",
        f"There are {len(kernels)} kernels, which take {minutes:.0f} minutes to compile in one process. The compiler",
        f"is NVRTC {compiler_build_id()}.",
        f"The command fails if a kernel at head_dim <= {NO_SPILLS_UP_TO} spills or has a stack frame, or if one",
        "cannot be planned or compiled. The exceptions are listed below.",
        "",
        "Each row has the worst of its kernels: registers per thread for each kernel, bytes of spills (stores",
        "and loads in the code, per thread), and bytes of stack.",
        "",
        *table(kernels),
        "",
        "## Exceptions",
        "",
        *[f"- {row.describe()}: {row.reason}." for row in (*CANNOT_BE_PLANNED, *MAY_SPILL)],
        "- sm_75, bf16: its tensor cores have no bf16.",
        "",
        f"## Spills above head_dim {NO_SPILLS_UP_TO}",
        "",
        *([*heading, *bad] if bad else ["None."]),
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Compile, judge, and print or write the page."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--jobs", type=int, default=multiprocessing.cpu_count(), help="processes")
    parser.add_argument("--write", action="store_true", help=f"write {DOCUMENT.relative_to(ROOT)}")
    parser.add_argument("--arch", nargs="+", choices=ARCHS, default=ARCHS)
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=DTYPES)
    parser.add_argument("--head-dim", nargs="+", type=int, default=HEAD_DIMS)
    parser.add_argument("--mask", nargs="+", choices=MASKS, default=MASKS)
    options = parser.parse_args()
    outcomes = run(list(points(options)), options.jobs)
    page = document(outcomes)
    problems = [*broken(outcomes), *needless(outcomes)]
    if options.write and not problems:
        DOCUMENT.write_text(page)
    else:
        print(page)
    for line in problems:
        print(f"FAILED {line}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
