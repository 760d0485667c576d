"""The papers' algorithms as printed, with their constants, and the orders of growth that the papers state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flashgen.lab.io.names import DQ_SUM
from flashgen.lab.io.sizes import FLOAT_BYTES, Sizes
from flashgen.lab.io.traffic import AlgorithmIO, KernelIO


@dataclass(frozen=True, slots=True)
class Formula:
    """An order of growth with the constant 1, for all heads of a call."""

    algorithm: str
    text: str
    elements: float

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as for JSON."""
        return {"algorithm": self.algorithm, "formula": self.text, "elements": self.elements}


def formulas(sizes: Sizes) -> tuple[Formula, ...]:
    """The elements that standard attention and FlashAttention move, both up to a constant."""
    dim = sizes.spec.head_dim
    return (
        Formula("standard", "Nd + N^2", float(sizes.rows * dim + sizes.pairs)),
        Formula("FlashAttention", "N^2 d^2 / M", sizes.pairs * dim**2 / sizes.sram_elements),
    )


def paper_standard(sizes: Sizes) -> AlgorithmIO:
    """Algorithm 0 of FlashAttention's paper, and algorithm 3 for the backward pass: steps move each array once."""
    s = sizes.pairs * sizes.item
    if sizes.pass_ == "forward":
        kernels = _standard_forward(sizes, s)
        stored = {"S": s, "P": s}
    else:
        kernels = _standard_backward(sizes, s)
        stored = {"P": s, "dP": s, "dS": s}
    note = "each step reads and writes each of its arrays once, in the dtype; no pair is skipped"
    return AlgorithmIO("paper_standard", kernels, stored, note, basis="paper")


def _standard_forward(sizes: Sizes, s: int) -> tuple[KernelIO, ...]:
    return (
        KernelIO("scores", {"Q": sizes.q, "K": sizes.k}, {"S": s}),
        KernelIO("softmax", {"S": s}, {"P": s}),
        KernelIO("output", {"P": s, "V": sizes.v}, {"O": sizes.o}),
    )


def _standard_backward(sizes: Sizes, s: int) -> tuple[KernelIO, ...]:
    return (
        KernelIO("dv", {"P": s, "dO": sizes.o}, {"dV": sizes.v}),
        KernelIO("dp", {"dO": sizes.o, "V": sizes.v}, {"dP": s}),
        KernelIO("ds", {"P": s, "dP": s}, {"dS": s}),
        KernelIO("dq", {"dS": s, "K": sizes.k}, {"dQ": sizes.q}),
        KernelIO("dk", {"dS": s, "Q": sizes.q}, {"dK": sizes.k}),
    )


def fa1_tile(sizes: Sizes) -> tuple[int, int]:
    """``B_r = min(B_c, d)`` and ``B_c = ceil(M / 4d)``, with M in elements."""
    columns = -(-sizes.sram_elements // (4 * sizes.spec.head_dim))
    return min(columns, sizes.spec.head_dim), columns


def paper_fa1(sizes: Sizes) -> AlgorithmIO:
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
            else {DQ_SUM: wide * sizes.spec.head_dim}
        )
    return AlgorithmIO(
        "paper_fa1",
        kernels,
        stored,
        "B_c = ceil(M / 4d), B_r = min(B_c, d); O, l and m move in float32 with each block of keys; no tile is skipped",
        (rows, columns),
        basis="paper",
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
