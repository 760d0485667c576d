"""How fast the emulator runs each kernel, and how long the host compiler takes for it.

    python benchmarks/emulator.py [--heads 2] [--length 384] [--head-dim 128] [--race] [--repeat 5]

All figures are processor time of the best of N, so a busy machine does not count. Kernels are compiled into a
cache directory of their own that holds the runtime (and what is compiled once for all kernels) but no kernel.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from flashgen import pipeline
from flashgen.emulator import EmulatedKernel, load
from flashgen.emulator.build import kernel_library
from flashgen.emulator.toolchain import find_toolchain
from flashgen.launch.executor import Executor
from flashgen.launch.host import HostTarget
from flashgen.launch.variant import Variant
from flashgen.plan import plan, workspaces
from flashgen.render import KernelSource
from flashgen.spec import AttentionSpec, causal

#: What the project holds itself to, for one batch entry, two heads, 384 tokens and head_dim 128.
FORWARD_LIMIT_MS = 40.0
BACKWARD_LIMIT_MS = 150.0
COMPILE_LIMIT_MS = 500.0


@dataclass
class Stopwatch:
    """The best time of each kernel's launches."""

    best_ms: dict[str, float] = field(default_factory=dict)

    def load(self, source: KernelSource) -> TimedKernel:
        """What a target loads instead of the kernel itself."""
        return TimedKernel(source.plan.role, load(source), self)

    def note(self, role: str, milliseconds: float) -> None:
        """Takes in a launch."""
        self.best_ms[role] = min(milliseconds, self.best_ms.get(role, milliseconds))


@dataclass(frozen=True)
class TimedKernel:
    """A kernel whose launches are timed."""

    role: str
    kernel: EmulatedKernel
    stopwatch: Stopwatch

    def launch(self, *arguments: Any, **options: Any) -> None:
        """As of the kernel."""
        start = time.process_time()
        self.kernel.launch(*arguments, **options)
        self.stopwatch.note(self.role, (time.process_time() - start) * 1e3)


def run(variant: Variant, options: argparse.Namespace) -> dict[str, float]:
    """Milliseconds of each kernel."""
    spec, random, stopwatch = variant.plan.spec, np.random.default_rng(0), Stopwatch()
    target = HostTarget(stopwatch.load)
    target.options = {"race": options.race, "schedule": options.schedule, "seed": 1}
    executor = Executor(variant, _no_other_variant, target, workspaces)

    def draw(head_dim: int) -> Any:
        shape = (options.batch, options.length, options.heads, head_dim)
        return random.standard_normal(shape).astype(spec.element.numpy())

    q, k = draw(spec.head_dim), draw(spec.head_dim)
    v, do = draw(spec.head_dim_v), draw(spec.head_dim_v)
    for _ in range(options.repeat):
        out, lse = executor.forward(q, k, v)
        executor.backward(do, q, k, v, out, lse)
    return stopwatch.best_ms


def _no_other_variant(access_bytes: int) -> Variant:
    raise AssertionError(f"NumPy's arrays are aligned to more than {access_bytes} bytes")


def compile_times(variant: Variant, repeat: int) -> Iterator[tuple[str, float, float]]:
    """(role, plain, race) of each kernel: milliseconds of the compiler's processor time."""
    with tempfile.TemporaryDirectory() as directory:
        before = os.environ.get("FLASHGEN_CACHE_DIR")
        os.environ["FLASHGEN_CACHE_DIR"] = os.path.join(directory, "cache")
        try:
            for role, kernel in variant.kernels.items():
                yield role, *(best_compile(kernel.source, race, repeat) for race in (False, True))
        finally:
            del os.environ["FLASHGEN_CACHE_DIR"]
            if before is not None:
                os.environ["FLASHGEN_CACHE_DIR"] = before


def best_compile(source: KernelSource, race: bool, repeat: int) -> float:
    """Milliseconds of a build that finds everything but the kernel."""

    def build(number: int) -> None:
        kernel_library(source.name, f"{source.text}// {number}\n", race=race)

    build(0)
    return min(children_ms(lambda number=number: build(number)) for number in range(1, repeat + 1))


def children_ms(action: Callable[[], None]) -> float:
    """Processor time of the processes that ``action`` starts and waits for."""

    def used() -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    start = used()
    action()
    return (used() - start) * 1e3


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--length", type=int, default=384, help="tokens of queries and of keys")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--arch", default="sm_80")
    parser.add_argument("--race", action="store_true", help="watch every load and store")
    parser.add_argument("--schedule", default="sequential", help="or reverse, random, priority")
    parser.add_argument("--repeat", type=int, default=5, help="the best of so many counts")
    parser.add_argument("--no-compile", action="store_true", help="leave out the compile times")
    return parser.parse_args()


def main() -> int:
    """Print both tables."""
    options = parse()
    mask = {"mask": causal()} if options.causal else {}
    spec = AttentionSpec(options.head_dim, dtype=options.dtype, deterministic=options.deterministic, **mask)
    variant = pipeline.variant(plan(spec, None, options.arch), "emulator")
    sizes = f"B={options.batch} H={options.heads} S={options.length}"
    mode = f"{options.schedule} schedule{', race mode' if options.race else ''}"
    print(f"{spec.describe()} {options.arch} {sizes}, {mode}; {find_toolchain().version}")

    times = run(variant, options)
    backward = sum(times.values()) - times["forward"]
    for role, milliseconds in times.items():
        print(f"run {role:<20} {milliseconds:8.1f} ms")
    print(f"run {'backward, in all':<20} {backward:8.1f} ms")
    print(f"limits (bf16 or fp16, plain): forward {FORWARD_LIMIT_MS:g} ms, backward {BACKWARD_LIMIT_MS:g} ms")
    if options.no_compile:
        return 0
    for role, plain, race in compile_times(variant, options.repeat):
        print(f"compile {role:<16} {plain:8.0f} ms   race {race:8.0f} ms")
    print(f"limit: {COMPILE_LIMIT_MS:g} ms")
    return 0


if __name__ == "__main__":
    sys.exit(main())
