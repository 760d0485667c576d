"""What flashgen costs besides the kernels: importing, building with and without a cache, launching, installing.

    python benchmarks/overhead.py [--repeat 20] [--rows launch] [--markdown]

Imports and builds are timed inside fresh processes, with bytecode caches. The best of N is what counts, since
everything that disturbs a measurement makes it longer; the median beside it says how disturbed they were.
Launching needs a GPU and torch (for the tensors); without them those rows say so. Calls are timed in a seventh as many
processes, 20 at once, over and over; a figure is the best of a process.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

IMPORT = """
import sys, time
start = time.perf_counter()
import flashgen
print(time.perf_counter() - start)
assert "torch" not in sys.modules and "numpy" not in sys.modules
"""

# All that follows `import flashgen`, whatever the build has yet to import. Its last line is what warm means:
# nothing was rendered and nothing compiled.
WARM_BUILD = """
import sys, time
import flashgen as fg
start = time.perf_counter()
kernel = fg.build(fg.AttentionSpec(128, mask=fg.causal()), arch="sm_80")
print(time.perf_counter() - start)
assert not {"torch", "numpy", "jinja2", "cuda"} & set(sys.modules)
"""

# Everything between an empty cache and a cubin: planning, rendering, compiling, and the imports that these need.
COLD_BUILD = """
import os, tempfile, time
with tempfile.TemporaryDirectory() as folder:
    os.environ["FLASHGEN_CACHE_DIR"] = folder
    import flashgen as fg
    start = time.perf_counter()
    fg.build(fg.AttentionSpec(128, mask=fg.causal(), direction="DIRECTION"), arch="sm_90a")
    print(time.perf_counter() - start)
"""

# What naming no arch adds: the GPU has to be asked, and the driver to be loaded, as for the first launch.
DRIVER_IMPORT = """
import time
import flashgen.api
start = time.perf_counter()
from cuda.bindings import driver
print(time.perf_counter() - start)
"""
CURRENT_GPU = """
import time
import flashgen.api
from cuda.bindings import driver
from flashgen.launch.driver.cuda import current_device, get_driver
start = time.perf_counter()
get_driver().capability(current_device())
print(time.perf_counter() - start)
"""

# Calls of a kernel, and by torch's side; with gradients it is the forward call, which records them. Windows are short:
# longer ones than the slice of time that a processor gives to one process are hardly ever left alone on a busy machine.
LAUNCH = """
import json, time, torch
import flashgen as fg
kernel = fg.build(fg.AttentionSpec(64, mask=fg.causal()))
mask, capped = fg.causal(), fg.softcap(20.0)
q, k, v = (torch.randn(1, 64, 1, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
rows = [x[0] for x in (q, k, v)]
recorded, recorded_rows = ([x.detach().clone().requires_grad_() for x in some] for some in ((q, k, v), rows))
starts = torch.tensor([0, 30, 64], device="cuda", dtype=torch.int32)
token, new_k, new_v = torch.randn(3, 2, 1, 1, 64, device="cuda", dtype=torch.bfloat16)
caches = [torch.zeros(2, 4096, 1, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
lengths = torch.tensor([20, 4000], device="cuda", dtype=torch.int32)
pages, table = [x.view(512, 16, 1, 64) for x in caches], torch.arange(8, device="cuda", dtype=torch.int32).view(2, 4)
calls = [CALLS]
for call in calls:
    for _ in range(100):
        call()
best, count = [float("inf")] * len(calls), 20
for turn in range(10):
    for i, call in enumerate(calls):
        torch.cuda.synchronize()
        call()
        for window in range(40):
            start = time.perf_counter()
            for _ in range(count):
                call()
            best[i] = min(best[i], (time.perf_counter() - start) / count)
print(json.dumps(best))
"""
#: What is called, and how many microseconds it may take, if that is demanded.
LAUNCHES = {
    "one call of a kernel": ("kernel(q, k, v)", 15),
    "fg.attention": ("fg.attention(q, k, v, mask=mask)", 25),
    "fg.attention, softcap": ("fg.attention(q, k, v, mask=mask, score=capped)", 25),
    "fg.flash_attn_func": ("fg.flash_attn_func(q, k, v, causal=True)", 25),
    "fg.flash_attn_with_kvcache": (
        "fg.flash_attn_with_kvcache(token, *caches, cache_seqlens=lengths, causal=True)",
        25,
    ),
    # Two calls of kernels: one puts the token into the cache.
    "fg.flash_attn_with_kvcache, a new token": (
        "fg.flash_attn_with_kvcache(token, *caches, new_k, new_v, cache_seqlens=lengths, causal=True)",
        None,
    ),
    "fg.flash_attn_varlen_func": ("fg.flash_attn_varlen_func(*rows, starts, starts, 34, 34, causal=True)", 25),
    "fg.flash_attn_varlen_func, keys in pages": (
        "fg.flash_attn_varlen_func(rows[0], *pages, starts, starts, 34, 34, causal=True, block_table=table)",
        25,
    ),
    "fg.attention, recording gradients": ("fg.attention(*recorded, mask=mask)", 50),
    "fg.flash_attn_func, recording gradients": ("fg.flash_attn_func(*recorded, causal=True)", 50),
    "fg.flash_attn_varlen_func, recording gradients": (
        "fg.flash_attn_varlen_func(*recorded_rows, starts, starts, 34, 34, causal=True)",
        50,
    ),
}


@dataclass(frozen=True)
class Figure:
    """One row: what was measured, how much it may be, how much it is."""

    name: str
    limit: str
    best: str
    median: str = ""
    #: None where nothing was measured, or nothing is demanded.
    ok: bool | None = None

    @property
    def verdict(self) -> str:
        """In a word or two."""
        return {True: "ok", False: "TOO MUCH", None: ""}[self.ok]


def environment() -> dict[str, str]:
    """Ours, with bytecode caches: without them every process would compile all it imports."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def python(code: str) -> str:
    """What a fresh Python process prints for ``code``."""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, env=environment())
    return done.stdout


def seconds(code: str) -> float:
    """The time that a fresh Python process prints for ``code``."""
    return float(python(code).split()[-1])


def whole_process(code: str) -> float:
    """How long a Python process takes for ``code``, from start to end."""
    start = time.perf_counter()
    python(code)
    return time.perf_counter() - start


def wheel() -> Figure:
    """Size of the wheel that pip builds from this checkout, where it can: it may have to download what builds it."""
    with tempfile.TemporaryDirectory() as directory:
        options = ["--quiet", "--no-deps", "--wheel-dir", directory]
        command = [sys.executable, "-m", "pip", "wheel", *options, str(ROOT)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            return Figure("wheel", "1.2 MB", f"not measured: {_reason(done.stderr)}")
        (built,) = Path(directory).glob("*.whl")
        size = built.stat().st_size
        return Figure("wheel", "1.2 MB", f"{size / 1e6:.3f} MB", ok=size < 1.2e6)


def _reason(errors: str) -> str:
    """What a failed process complained of: its first line about an error, or its last line."""
    lines = errors.strip().splitlines() or ["it said nothing"]
    return next((line for line in lines if "error:" in line.lower()), lines[-1]).strip()[:60]


def timed(name: str, limit: float | None, repeat: int, measure: Callable[[], float], unit: str = "ms") -> Figure:
    """A row for a time in seconds; one that could not be measured says why."""
    scale = {"ms": 1e3, "us": 1e6}[unit]
    try:
        values = [measure() * scale for _ in range(repeat)]
    except subprocess.CalledProcessError as error:
        return _not_measured(name, limit, error, unit)
    best, median = min(values), statistics.median(values)
    shown = _shown(limit, unit)
    return Figure(name, shown, f"{best:.1f} {unit}", f"{median:.1f} {unit}", best < limit if limit else None)


def _not_measured(name: str, limit: float | None, error: subprocess.CalledProcessError, unit: str) -> Figure:
    return Figure(name, _shown(limit, unit), f"not measured: {_reason(error.stderr)}")


def _shown(limit: float | None, unit: str) -> str:
    return f"{limit:g} {unit}" if limit else ""


def imports(repeat: int) -> Iterator[Figure]:
    """What it costs to import flashgen."""
    seconds(IMPORT)
    bare = min(whole_process("pass") for _ in range(repeat))
    yield timed("import flashgen", 50, repeat, lambda: seconds(IMPORT))
    yield timed("import flashgen, whole process", 200, repeat, lambda: whole_process("import flashgen") - bare)


def warm_builds(repeat: int) -> Iterator[Figure]:
    """What it costs to find built kernels."""
    try:
        # Fills the bytecode caches and the kernel cache; the second run must find everything there.
        seconds(WARM_BUILD.replace("assert", "#"))
        seconds(WARM_BUILD)
    except subprocess.CalledProcessError as error:
        sys.exit(f"the first builds failed:\n{error.stderr}")
    yield timed("fg.build, kernels cached, fresh process", 50, repeat, lambda: seconds(WARM_BUILD))
    yield timed("without arch=: import cuda.bindings.driver", None, repeat, lambda: seconds(DRIVER_IMPORT))
    yield timed("without arch=: start CUDA, ask the GPU", None, repeat, lambda: seconds(CURRENT_GPU))


def cold_builds(repeat: int) -> Iterator[Figure]:
    """What it costs to build Hopper's kernels, head_dim 128 and causal, for the first time."""
    for direction, limit in (("forward", 2000), ("both", None)):
        code = COLD_BUILD.replace("DIRECTION", direction)
        name = f"fg.build, nothing cached, Hopper, direction={direction!r}"
        yield timed(name, limit, -(-repeat // 4), partial(seconds, code))


def launches(repeat: int) -> Iterator[Figure]:
    """What a call costs; all take turns in each process, so that a busy second is none of one row's alone."""
    code = LAUNCH.replace("CALLS", ", ".join(f"lambda: {call}" for call, _ in LAUNCHES.values()))
    count = -(-repeat // 7)
    try:
        best = [json.loads(python(code).splitlines()[-1]) for _ in range(count)]
    except subprocess.CalledProcessError as error:
        yield from (_not_measured(name, limit, error, "us") for name, (_, limit) in LAUNCHES.items())
        return
    for (name, (_, limit)), values in zip(LAUNCHES.items(), zip(*best, strict=True), strict=True):
        yield timed(name, limit, count, iter(values).__next__, "us")


#: The table's parts by what ``--rows`` calls them.
PARTS: dict[str, Callable[[int], Iterable[Figure]]] = {
    "import": imports,
    "warm": warm_builds,
    "cold": cold_builds,
    "launch": launches,
    "wheel": lambda repeat: [wheel()],
}


def main() -> int:
    """Print the table; 1 when a figure is over its limit."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeat", type=int, default=20, help="fresh processes per figure")
    parser.add_argument("--markdown", action="store_true", help="print a Markdown table")
    parser.add_argument("--rows", default=",".join(PARTS), help="which parts of the table; default: %(default)s")
    options = parser.parse_args()
    unknown = set(options.rows.split(",")) - set(PARTS)
    if unknown:
        parser.error(f"--rows knows no {', '.join(sorted(unknown))}; it knows {', '.join(PARTS)}")
    figures = [figure for part in options.rows.split(",") for figure in PARTS[part](options.repeat)]
    rows = [("figure", "limit", "best", "median", "")]
    rows += [(f.name, f.limit, f.best, f.median, f.verdict) for f in figures]
    if options.markdown:
        rows.insert(1, ("---",) * 5)
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    edge = "| " if options.markdown else ""
    for row in rows:
        line = (" | " if options.markdown else "  ").join(c.ljust(w) for c, w in zip(row, widths, strict=True))
        print(f"{edge}{line}{edge[::-1]}".rstrip())
    print(f"\nPython {platform.python_version()}, {platform.machine()}, {options.repeat} times")
    return 1 if any(figure.ok is False for figure in figures) else 0


if __name__ == "__main__":
    sys.exit(main())
