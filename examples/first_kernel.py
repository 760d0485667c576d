"""Build causal attention, run it forward and backward, and compare every result with the float64 oracle.

python examples/first_kernel.py                 # on the CPU, by the emulator; needs a C++ compiler
python examples/first_kernel.py --target gpu    # on an NVIDIA GPU; needs torch
"""

from __future__ import annotations

import argparse

import numpy as np

import flashgen as fg


def main() -> None:
    """Build, run, compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", choices=("emulator", "gpu"), default="emulator")
    target = parser.parse_args().target

    # The spec says what to compute. It knows no hardware.
    spec = fg.AttentionSpec(head_dim=32, dtype="fp16", mask=fg.causal())
    kernel = fg.build(spec, target=target)
    print(kernel)
    print(f"{len(kernel.source)} kernels: {', '.join(kernel.source)}")

    # (batch, length, heads, head_dim); four query heads share two key/value heads.
    random = np.random.default_rng(0)
    q, do = random.standard_normal((2, 1, 70, 4, 32)).astype("float16")
    k, v = random.standard_normal((2, 1, 70, 2, 32)).astype("float16")

    if target == "gpu":
        import torch

        on_gpu = [torch.from_numpy(x).cuda() for x in (do, q, k, v)]
        out, lse = kernel(*on_gpu[1:])
        gradients = kernel.backward(*on_gpu, out, lse)
        results = [x.cpu().numpy() for x in (out, lse, *gradients)]
    else:
        out, lse = kernel(q, k, v)
        results = [out, lse, *kernel.backward(do, q, k, v, out, lse)]

    # The oracle defines attention in NumPy float64. The bounds say how far from it a kernel in fp16 may be.
    exact = [*fg.oracle.forward(spec, q, k, v), *fg.oracle.backward(spec, q, k, v, do)]
    bounds = fg.oracle.bounds(spec, q, k, v, do)
    for name, result, expected in zip(("o", "lse", "dq", "dk", "dv"), results, exact, strict=True):
        check = fg.oracle.check(result, expected, getattr(bounds, name))
        verdict = "ok" if check.ok else "WRONG"
        print(f"{name:4} {result.shape!s:16} largest error {check.max_error:.1e}, bound {check.bound:.1e}: {verdict}")
        if not check.ok:
            raise SystemExit(1)


if __name__ == "__main__":
    main()
