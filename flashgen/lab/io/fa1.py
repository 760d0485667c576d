"""FlashAttention-1: the outer loop is over keys, so that O, l and m come and go with each inner step."""

from __future__ import annotations

from flashgen.lab.io.sizes import FLOAT_BYTES, Sizes
from flashgen.lab.io.traffic import AlgorithmIO, KernelIO


def fa1_tile(sizes: Sizes) -> tuple[int, int]:
    """``B_r = min(B_c, d)`` and ``B_c = ceil(M / 4d)``, with M in elements."""
    columns = -(-sizes.sram_elements // (4 * sizes.spec.head_dim))
    return min(columns, sizes.spec.head_dim), columns


def fa1(sizes: Sizes) -> AlgorithmIO:
    """Algorithm 1 of the paper, and algorithm 4 for the backward pass. O and dQ are summed in float32."""
    rows, columns = fa1_tile(sizes)
    steps = -(-sizes.len_kv // columns)
    kernels = _forward(sizes, steps) if sizes.pass_ == "forward" else _backward(sizes, steps)
    wide = sizes.rows * FLOAT_BYTES
    stored = {"l": sizes.row_floats, "m": sizes.row_floats}
    if sizes.item != FLOAT_BYTES:
        stored |= (
            {"O in float32": wide * sizes.spec.head_dim_v}
            if sizes.pass_ == "forward"
            else {"dQ in float32": wide * sizes.spec.head_dim}
        )
    return AlgorithmIO(
        "fa1",
        kernels,
        stored,
        "no tile is skipped; O, l and m are initialised in device memory, as line 2 of the algorithm says; each head of"
        " queries reads K and V by itself",
        (rows, columns),
    )


def _forward(sizes: Sizes, steps: int) -> tuple[KernelIO, ...]:
    group, rows = sizes.heads // sizes.heads_kv, sizes.row_floats
    o = rows * sizes.spec.head_dim_v
    state = {"O": o, "l": rows, "m": rows}
    moved = {name: size * steps for name, size in state.items()}
    return (
        KernelIO("initialise", {}, state),
        KernelIO("forward", {"K": sizes.k * group, "V": sizes.v * group, "Q": sizes.q * steps, **moved}, moved),
    )


def _backward(sizes: Sizes, steps: int) -> tuple[KernelIO, ...]:
    group, rows = sizes.heads // sizes.heads_kv, sizes.row_floats
    dq = rows * sizes.spec.head_dim
    per_step = {"Q": sizes.q, "O": sizes.o, "dO": sizes.o, "dQ": dq, "l": rows, "m": rows}
    reads = {name: size * steps for name, size in per_step.items()}
    return (
        KernelIO("initialise", {}, {"dQ": dq}),
        KernelIO(
            "backward",
            {"K": sizes.k * group, "V": sizes.v * group, **reads},
            {"dQ": dq * steps, "dK": sizes.k * group, "dV": sizes.v * group},
        ),
    )
