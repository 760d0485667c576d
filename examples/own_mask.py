"""A sparse mask as a Python function: which tiles the kernel skips, and a check against the float64 oracle.

Each token attends to the tokens right before it and to all earlier landmarks, which a tensor of bools marks. No block
mask is built: which tiles the kernel visits follows from the formula and from the tensor's values.

python examples/own_mask.py                 # on the CPU, by the emulator; needs a C++ compiler
python examples/own_mask.py --target gpu    # on an NVIDIA GPU; needs torch
"""

from __future__ import annotations

import argparse

import numpy as np

import flashgen as fg

LENGTH, NEAR = 512, 64
#: (batch, length)
LANDMARK = np.zeros((1, LENGTH), bool)
LANDMARK[0, [0, 1, 200, 330]] = True


def mask(b, h, q, k):
    """Whether query q may attend to key k in sequence b and head h; called once, with symbols for its arguments."""
    return (q >= k) & ((q - k < NEAR) | LANDMARK[b, k])


def main() -> None:
    """Explain the mask, run it, compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", choices=("emulator", "gpu"), default="emulator")
    target = parser.parse_args().target

    # 1. The map of tiles, from the formula and LANDMARK: no kernel is built for it.
    print(fg.explain(mask, tile=(32, 32), len_q=LENGTH, len_kv=LENGTH))

    # 2. The kernel. Tiles of 32 x 32 make small blocks, so that this small example has tiles to skip.
    spec = fg.AttentionSpec(head_dim=16, dtype="fp16", mask=mask, direction="forward")
    schedule = fg.Schedule(tile_q=32, tile_kv=32, warps=fg.WarpPartition("split_q", 2))
    kernel = fg.build(spec, schedule, target=target)

    random = np.random.default_rng(0)
    q, k, v = random.standard_normal((3, 1, LENGTH, 1, 16)).astype("float16")
    if target == "gpu":
        import torch

        on_gpu = [torch.from_numpy(x).cuda() for x in (q, k, v)]
        out = kernel(*on_gpu, captured={"LANDMARK": torch.from_numpy(LANDMARK).cuda()})[0].cpu().numpy()
    else:
        out = kernel(q, k, v)[0]

    # 3. The oracle evaluates the same formula for every pair of a query and a key.
    exact = fg.oracle.forward(spec, q, k, v)
    check = fg.oracle.check(out, exact[0], fg.oracle.bounds(spec, q, k, v, exact=exact).o)
    verdict = "ok" if check.ok else "WRONG"
    print(f"\nlargest error {check.max_error:.1e}, bound {check.bound:.1e}: {verdict}")
    raise SystemExit(not check.ok)


if __name__ == "__main__":
    main()
