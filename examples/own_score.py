"""A score as a Python function: ALiBi and a soft cap, with the gradient of the tensor that the score captures.

The slopes of ALiBi are a learned tensor here, one number for each head. The kernel reads them, and the backward pass
gives their gradient. The float64 oracle differentiates the same formula.

python examples/own_score.py                 # on the CPU, by the emulator; needs a C++ compiler
python examples/own_score.py --target gpu    # on an NVIDIA GPU; needs torch
"""

from __future__ import annotations

import argparse

import numpy as np

import flashgen as fg

LENGTH, HEADS, DIM = 48, 2, 16
CAP = 8.0
slopes = np.array([0.5, 0.125], np.float32)


def score(s, b, h, q, k):
    """What the softmax takes in place of the scaled logit s; called once, with symbols for its arguments."""
    return CAP * fg.tanh(s / CAP) - slopes[h] * (q - k)


def main() -> None:
    """Run both passes, compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", choices=("emulator", "gpu"), default="emulator")
    target = parser.parse_args().target

    spec = fg.AttentionSpec(head_dim=DIM, dtype="fp16", mask=fg.causal(), score=score)
    kernel = fg.build(spec, target=target)
    print(kernel.spec.describe())

    random = np.random.default_rng(0)
    q, k, v, do = random.standard_normal((4, 1, LENGTH, HEADS, DIM)).astype("float16")
    # Numbers such as CAP are part of the spec. Tensors belong to a call: each may bring others.
    captured = {"slopes": slopes}
    arrays = [do, q, k, v]
    if target == "gpu":
        import torch

        captured = {name: torch.from_numpy(x).cuda() for name, x in captured.items()}
        arrays = [torch.from_numpy(x).cuda() for x in arrays]

    out, lse = kernel(*arrays[1:], captured=captured)
    *gradients, of_captured = kernel.backward(*arrays, out, lse, captured=captured, captured_gradients=True)
    results = [out, *gradients, of_captured["slopes"]]
    if target == "gpu":
        results = [x.cpu().numpy() for x in results]

    exact = [fg.oracle.forward(spec, q, k, v)[0], *fg.oracle.backward(spec, q, k, v, do)]
    exact.append(fg.oracle.captured_gradients(spec, q, k, v, do)["slopes"])
    bounds = fg.oracle.bounds(spec, q, k, v, do)
    limits = [bounds.o, bounds.dq, bounds.dk, bounds.dv, fg.oracle.captured_bounds(spec, q, k, v, do)["slopes"]]
    for name, result, expected, bound in zip(("o", "dq", "dk", "dv", "dslopes"), results, exact, limits, strict=True):
        check = fg.oracle.check(result, expected, bound)
        verdict = "ok" if check.ok else "WRONG"
        print(f"{name:8} largest error {check.max_error:.1e}, bound {check.bound:.1e}: {verdict}")
        if not check.ok:
            raise SystemExit(1)
    print("gradient of the slopes:", results[-1])


if __name__ == "__main__":
    main()
