"""Compile for a list of GPUs ahead of time, without one, and load the result in another process.

Part 1 fills a cache directory, which Python processes with the same flashgen and NVRTC load without compiling.
Part 2 writes files: CUDA C++, cubins and a manifest that says how to launch them, from any language.

python examples/build_ahead.py                                # sm_80 and sm_89; no GPU is needed
python examples/build_ahead.py --arch sm_90a --target gpu     # the second process also runs the kernel; needs torch
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import flashgen as fg

SPEC = fg.AttentionSpec(head_dim=64, dtype="fp16", mask=fg.causal(), direction="forward")


def load(arch: str, target: str) -> None:
    """What the other process does: the same call of ``build``, and then use the kernel."""
    start = time.perf_counter()
    kernel = fg.build(SPEC, arch=arch)
    seconds = time.perf_counter() - start
    compiled = "cuda.bindings.nvrtc" in sys.modules
    print(f"{arch}: loaded in {1000 * seconds:.0f} ms, {'compiled again' if compiled else 'nothing was compiled'}")
    if compiled:
        raise SystemExit(1)
    if target == "gpu":
        import torch

        q, k, v = torch.randn(3, 2, 128, 4, 64, device="cuda", dtype=torch.float16)
        print(f"{arch}: ran on {torch.cuda.get_device_name()}, output {tuple(kernel(q, k, v)[0].shape)}")


def main() -> None:
    """Build, load elsewhere, write files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", action="append", help="repeatable; default: sm_80 and sm_89")
    parser.add_argument("--target", choices=("none", "gpu"), default="none", help="where the second process runs it")
    parser.add_argument("--load", metavar="ARCH", help=argparse.SUPPRESS)  # how the second process is started
    options = parser.parse_args()
    if options.load:
        load(options.load, options.target)
        return
    archs = options.arch or ["sm_80", "sm_89"]

    with tempfile.TemporaryDirectory() as directory:
        # 1. The cache. In production: a directory of your image, which only its owner can write to.
        os.environ["FLASHGEN_CACHE_DIR"] = str(Path(directory, "cache"))
        for arch in archs:
            kernel = fg.build(SPEC, arch=arch)
            print(f"{arch}: compiled {', '.join(binary.name for binary in kernel.binaries.values())}")
        for arch in archs:
            command = [sys.executable, __file__, "--load", arch, "--target", options.target]
            subprocess.run(command, check=True)

        # 2. Files, by the command line. `fg.build(SPEC, arch=arch).save(folder)` writes the same cubins from Python.
        files = Path(directory, "files")
        words = ["build", "--head-dim", "64", "--dtype", "fp16", "--causal", "--forward-only", "--no-verify", "--json"]
        words += [word for arch in archs for word in ("--arch", arch)]
        command = [sys.executable, "-m", "flashgen", *words, "--out", str(files)]
        manifest = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
        for entry, arch in zip(manifest["kernels"], archs, strict=True):
            saved = fg.build(SPEC, arch=arch).save(Path(directory, arch))
            same = Path(entry["cubin"]).read_bytes() == (saved / f"{entry['name']}.cubin").read_bytes()
            verdict = "the same from Python" if same else "DIFFERS from Python's"
            print(f"{entry['name']}.cubin: {entry['registers']} registers, {verdict}")
            if not same:
                raise SystemExit(1)


if __name__ == "__main__":
    main()
