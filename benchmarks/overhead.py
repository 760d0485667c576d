"""What flashgen costs besides the kernels: importing, building from a warm cache, launching, installing.

    python benchmarks/overhead.py [--repeat 10] [--markdown]

Each figure is the best of N, since everything that disturbs a measurement makes it longer. Launching needs
a GPU and torch (for the tensors); without them that row says so.
"""

from __future__ import annotations

import argparse
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

IMPORT = """
import sys, time
start = time.perf_counter()
import flashgen
print(time.perf_counter() - start)
assert "torch" not in sys.modules and "numpy" not in sys.modules
"""

WARM_BUILD = """
import sys, time
import flashgen as fg
start = time.perf_counter()
kernel = fg.build(fg.AttentionSpec(128, mask=fg.causal()), arch="sm_80")
print(time.perf_counter() - start)
assert "torch" not in sys.modules
"""

LAUNCH = """
import time, torch
import flashgen as fg
kernel = fg.build(fg.AttentionSpec(64, mask=fg.causal()))
q, k, v = torch.randn(3, 1, 64, 1, 64, device="cuda", dtype=torch.bfloat16)
for _ in range(100):
    kernel(q, k, v)
calls, best = 200, float("inf")
for _ in range(50):
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        kernel(q, k, v)
    best = min(best, (time.perf_counter() - start) / calls)
print(best)
"""


@dataclass(frozen=True)
class Figure:
    """One row: what was measured, how much it may be, how much it is."""

    name: str
    limit: str
    value: str
    ok: bool | None

    @property
    def verdict(self) -> str:
        """In a word or two."""
        return {True: "ok", False: "TOO MUCH", None: "not measured"}[self.ok]


def seconds(code: str) -> float:
    """What a fresh Python process prints for ``code``."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    return float(done.stdout.split()[-1])


def best_of(repeat: int, code: str) -> float:
    """The least that ``code`` prints, each time in a fresh process."""
    return min(seconds(code) for _ in range(repeat))


def process_start(repeat: int) -> float:
    """How much longer ``python -c 'import flashgen'`` takes than ``python -c pass``."""

    def wall(code: str) -> float:
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
        return time.perf_counter() - start

    return min(wall("import flashgen") for _ in range(repeat)) - min(wall("pass") for _ in range(repeat))


def wheel_bytes() -> int:
    """Size of the wheel that pip builds from this checkout."""
    with tempfile.TemporaryDirectory() as directory:
        command = [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "--quiet",
            "--no-deps",
            "--wheel-dir",
            directory,
            str(ROOT),
        ]
        subprocess.run(command, check=True)
        (wheel,) = Path(directory).glob("*.whl")
        return wheel.stat().st_size


def timed(name: str, limit_ms: float, measure: Callable[[], float], unit: str = "ms") -> Figure:
    """A row for a time in seconds; one that could not be measured says why."""
    scale = {"ms": 1e3, "us": 1e6}[unit]
    limit = f"{limit_ms:g} {unit}"
    try:
        value = measure() * scale
    except subprocess.CalledProcessError as error:
        reason = (error.stderr or "").strip().splitlines()
        return Figure(name, limit, reason[-1][:80] if reason else str(error), None)
    return Figure(name, limit, f"{value:.1f} {unit}", value < limit_ms)


def measure(repeat: int) -> list[Figure]:
    """All rows."""
    try:
        seconds(WARM_BUILD)  # fills the cache
    except subprocess.CalledProcessError as error:
        sys.exit(f"the first build failed:\n{error.stderr}")
    size = wheel_bytes()
    return [
        timed("import flashgen", 200, lambda: best_of(repeat, IMPORT)),
        timed("import flashgen, whole process", 200, lambda: process_start(repeat)),
        timed("fg.build, kernels cached, fresh process", 50, lambda: best_of(repeat, WARM_BUILD)),
        timed("one call, Python side", 20, lambda: best_of(1, LAUNCH), "us"),
        Figure("wheel", "1 MB", f"{size / 1e6:.3f} MB", size < 1e6),
    ]


def main() -> int:
    """Print the table; 1 when a figure is over its limit."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeat", type=int, default=10, help="fresh processes per figure")
    parser.add_argument("--markdown", action="store_true", help="print a Markdown table")
    options = parser.parse_args()
    figures = measure(options.repeat)
    rows = [("figure", "limit", "measured", ""), *((f.name, f.limit, f.value, f.verdict) for f in figures)]
    if options.markdown:
        rows.insert(1, ("---",) * 4)
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    edge = "| " if options.markdown else ""
    for row in rows:
        line = (" | " if options.markdown else "  ").join(c.ljust(w) for c, w in zip(row, widths, strict=True))
        print(f"{edge}{line}{edge[::-1]}".rstrip())
    print(f"\nPython {platform.python_version()}, {platform.machine()}, best of {options.repeat}")
    return 1 if any(figure.ok is False for figure in figures) else 0


if __name__ == "__main__":
    sys.exit(main())
