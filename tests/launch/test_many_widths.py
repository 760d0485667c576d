"""A program that calls with ever other windows: widths are parameters, so all have one cubin, and not all are kept."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import flashgen as fg

ROOT = Path(__file__).parents[2]
SPEC = fg.AttentionSpec(64, dtype="fp16", direction="forward", mask=fg.window(7, 0))
CALLS = """
import gc, weakref
from types import SimpleNamespace
import flashgen as fg
from flashgen import api
from flashgen.common.recent import Recent

KERNELS_KEPT = 64
api._kernels = Recent(KERNELS_KEPT)

interface = dict(shape=(1, 300, 2, 64), typestr="<f2", data=(4096, False), version=3)
x = SimpleNamespace(__cuda_array_interface__=interface)
kernels = []
for width in range(150):
    kernel = fg.build(fg.AttentionSpec(64, dtype="fp16", direction="forward", mask=fg.window(width, 0)), arch="sm_90a")
    kernel(x, x, x, stream=0x99)
    kernels.append(weakref.ref(kernel))
del kernel
gc.collect()
alive = [kernel() is not None for kernel in kernels]
print("kept", KERNELS_KEPT // 2 <= sum(alive) <= KERNELS_KEPT and alive[-1] and not alive[0])
"""


def test_many_widths_load_one_cubin_and_keep_so_many_kernels(libcuda: Path) -> None:
    # Compiled here, as nothing there could be.
    fg.build(SPEC, arch="sm_90a")
    environment = os.environ | {"LD_LIBRARY_PATH": str(libcuda), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", CALLS], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len([line for line in lines if line.startswith("launch")]) == 150
    assert len([line for line in lines if line.startswith("load")]) == 1
    assert "kept True" in lines
