"""How long the first result of a mask or a score takes, from the Python function to the launch, with empty caches.

    python benchmarks/mask_first.py flashgen "window 1024" 128

Importing torch and flashgen, starting CUDA and making tensors come before the clock starts.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from mask_rows import LIBRARIES, Cell, First

LENGTH = 4096
HEADS = 16


def first_result(name: str, head_dim: int) -> First:
    """Both libraries' seconds, each in a process of its own."""
    first = First(name, head_dim)
    for library in LIBRARIES:
        with tempfile.TemporaryDirectory() as folder:
            caches = {"FLASHGEN_CACHE_DIR": folder, "TORCHINDUCTOR_CACHE_DIR": folder, "TRITON_CACHE_DIR": folder}
            done = subprocess.run(
                [sys.executable, str(Path(__file__)), library, name, str(head_dim)],
                env={**os.environ, **caches},
                capture_output=True,
                text=True,
            )
        if done.returncode == 0:
            first.seconds[library] = float(done.stdout.split()[-1])
        else:
            print(f"no first result of {name} by {library}: {done.stderr.strip()[-200:]}", flush=True)
    return first


def measure(library: str, name: str, head_dim: int) -> float:
    """The seconds of one library, in this process."""
    import mask_cases
    import torch

    cell = Cell(name, head_dim, LENGTH, 1, HEADS)
    q, k, v, _ = mask_cases.tensors(cell)
    torch.cuda.synchronize()
    start = time.perf_counter()
    variant = mask_cases.VARIANTS[name](cell)
    if library == "flashgen":
        mask_cases.kernel(cell, variant, direction="forward")(q, k, v)
    else:
        mask_cases.flex(cell, variant)(*map(mask_cases.heads_first, (q, k, v)))
    torch.cuda.synchronize()
    return time.perf_counter() - start


if __name__ == "__main__":
    print(measure(sys.argv[1], sys.argv[2], int(sys.argv[3])))
