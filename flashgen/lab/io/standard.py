"""Standard attention: S and P are stored, and one kernel follows another."""

from __future__ import annotations

from flashgen.lab.io.sizes import FLOAT_BYTES, Sizes
from flashgen.lab.io.traffic import AlgorithmIO, KernelIO

#: Rows and columns of the block of a result that a block of threads computes, in each matrix product.
GEMM_TILE = 128


def standard(sizes: Sizes) -> AlgorithmIO:
    """S = QK^T in float32, P = softmax(S) in the dtype, O = PV: three kernels, each over all pairs."""
    kernels = _forward(sizes) if sizes.pass_ == "forward" else _backward(sizes)
    s, p = sizes.pairs * FLOAT_BYTES, sizes.pairs * sizes.item
    stored = {"S": s, "P": p, "LSE": sizes.row_floats}
    if sizes.pass_ == "backward":
        stored = {"P": p, "dP": s, "dS": p, "D": sizes.row_floats}
    return AlgorithmIO(
        "standard",
        kernels,
        stored,
        f"products in blocks of {GEMM_TILE} x {GEMM_TILE}: each block row reads the right operand again, each block"
        " column the left one; a row of S is read once; no tile is skipped",
        (GEMM_TILE, GEMM_TILE),
    )


def _blocks(length: int) -> int:
    return -(-length // GEMM_TILE)


def _forward(sizes: Sizes) -> tuple[KernelIO, ...]:
    s, p = sizes.pairs * FLOAT_BYTES, sizes.pairs * sizes.item
    q_blocks, kv_blocks, dim_blocks = _blocks(sizes.len_q), _blocks(sizes.len_kv), _blocks(sizes.spec.head_dim_v)
    group = sizes.heads // sizes.heads_kv
    return (
        KernelIO("scores", {"Q": sizes.q * kv_blocks, "K": sizes.k * group * q_blocks}, {"S": s}),
        KernelIO("softmax", {"S": s}, {"P": p, "LSE": sizes.row_floats}),
        KernelIO("output", {"P": p * dim_blocks, "V": sizes.v * group * q_blocks}, {"O": sizes.o}),
    )


def _backward(sizes: Sizes) -> tuple[KernelIO, ...]:
    """P was stored by the forward pass, and dP and dS are stored on the way."""
    s, p = sizes.pairs * FLOAT_BYTES, sizes.pairs * sizes.item
    q_blocks, kv_blocks = _blocks(sizes.len_q), _blocks(sizes.len_kv)
    dims, dims_v = _blocks(sizes.spec.head_dim), _blocks(sizes.spec.head_dim_v)
    group = sizes.heads // sizes.heads_kv
    rows = sizes.row_floats
    return (
        KernelIO("row sums", {"O": sizes.o, "dO": sizes.o}, {"D": rows}),
        KernelIO("dv", {"P": p * dims_v, "dO": sizes.o * kv_blocks}, {"dV": sizes.v}),
        KernelIO("dp", {"dO": sizes.o * kv_blocks, "V": sizes.v * group * q_blocks}, {"dP": s}),
        KernelIO("ds", {"P": p, "dP": s, "D": rows}, {"dS": p}),
        KernelIO("dq", {"dS": p * dims, "K": sizes.k * group * q_blocks}, {"dQ": sizes.q}),
        KernelIO("dk", {"dS": p * dims, "Q": sizes.q * kv_blocks}, {"dK": sizes.k}),
    )
