"""Prefill and decode with keys and values in pages: each sequence of a batch owns pages anywhere in one pool.

Two prompts of different lengths are put into the cache one by one. Then both sequences decode together, one token a
step. All outputs together must be those of causal attention over each whole sequence, which the oracle computes.

python examples/kv_cache.py                 # on the CPU, by the emulator; needs a C++ compiler
python examples/kv_cache.py --target gpu    # on an NVIDIA GPU; needs torch
"""

from __future__ import annotations

import argparse

import numpy as np

import flashgen as fg

HEADS, HEADS_KV, DIM = 4, 2, 16
PAGES, PAGE_SIZE = 10, 16
PROMPTS, STEPS = (20, 33), 4


def main() -> None:
    """Prefill, decode, compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", choices=("emulator", "gpu"), default="emulator")
    target = parser.parse_args().target

    def put(array):
        """The array where the kernel runs; int32 arrays describe the cache, and lie there too."""
        if target == "emulator":
            return np.ascontiguousarray(array)
        import torch

        return torch.from_numpy(np.ascontiguousarray(array)).cuda()

    spec = fg.AttentionSpec(DIM, dtype="fp16", mask=fg.causal(), direction="forward", cache="paged")
    kernel = fg.build(spec, target=target)

    # Each sequence in full; a model would make the rows step by step.
    random = np.random.default_rng(0)
    lengths = [prompt + STEPS for prompt in PROMPTS]
    q = [random.standard_normal((n, HEADS, DIM)).astype("float16") for n in lengths]
    k, v = ([random.standard_normal((n, HEADS_KV, DIM)).astype("float16") for n in lengths] for _ in range(2))

    # One pool of pages for all. Row i of the table names the pages of sequence i, in order; 0 is a filler here.
    k_pages, v_pages = (put(np.zeros((PAGES, PAGE_SIZE, HEADS_KV, DIM), np.float16)) for _ in range(2))
    table = np.array([[7, 2, 0], [1, 4, 9]], np.int32)
    outputs = [np.empty_like(x) for x in q]

    def step(sequences, present, new):
        """Append ``new`` rows to each of these sequences, which hold ``present`` keys, and attend from the rows."""
        rows = [slice(n, n + new) for n in present]
        q_new, k_new, v_new = (
            put(np.stack([x[i][row] for i, row in zip(sequences, rows, strict=True)])) for x in (q, k, v)
        )
        where = {"seqlens": put(np.array(present, np.int32)), "block_table": put(table[sequences])}
        kernel.append(k_pages, v_pages, k_new, v_new, cache=fg.KVCache(**where))
        out, _ = kernel(q_new, k_pages, v_pages, cache=fg.KVCache(**where, appended=new))
        for i, row, result in zip(sequences, rows, out if target == "emulator" else out.cpu().numpy(), strict=True):
            outputs[i][row] = result

    for i, prompt in enumerate(PROMPTS):
        step([i], [0], prompt)  # prefill
        print(f"sequence {i}: prefilled {prompt} tokens into pages {table[i][: -(-lengths[i] // PAGE_SIZE)]}")
    for t in range(STEPS):
        step([0, 1], [prompt + t for prompt in PROMPTS], 1)  # decode

    dense = fg.AttentionSpec(DIM, dtype="fp16", mask=fg.causal(), direction="forward")
    for i, output in enumerate(outputs):
        whole = q[i][None], k[i][None], v[i][None]
        exact = fg.oracle.forward(dense, *whole)
        check = fg.oracle.check(output[None], exact[0], fg.oracle.bounds(dense, *whole, exact=exact).o)
        verdict = "ok" if check.ok else "WRONG"
        print(f"sequence {i}: largest error {check.max_error:.1e}, bound {check.bound:.1e}: {verdict}")
        if not check.ok:
            raise SystemExit(1)


if __name__ == "__main__":
    main()
