"""The schedule tables of the backward kernels: rows in order of preference, each with its reason."""

from __future__ import annotations

from collections.abc import Iterator

from flashgen.arch import Arch
from flashgen.plan.model.limits import Tiling
from flashgen.plan.portable.forward import padded
from flashgen.spec import AttentionSpec


def main_rows(spec: AttentionSpec, arch: Arch) -> Iterator[Tiling]:
    """The schedule table of the main kernel: rows in order of preference, each with its reason."""
    dim = max(padded(spec.head_dim), padded(spec.head_dim_v))
    fits = "the largest tile that shared memory and registers hold"
    if not spec.element.is_half:
        if arch.has_cp_async or dim <= 80:
            yield Tiling(32, 32, 4, 1, "float tiles are twice as large")
        yield Tiling(16, 32, 4, 1, fits)
        yield Tiling(16, 16, 2, 1, fits)
        return
    if arch.has_cp_async:
        if spec.dropout and dim <= 64:
            yield Tiling(64, 64, 4, 1, "32 x 32 scores per warp leave registers for the dropout mask", blocks=2)
        elif spec.dropout and dim <= 128:
            yield Tiling(64, 64, 8, 2, "32 x 16 scores per warp leave registers for the dropout mask")
        elif dim <= 64:
            yield Tiling(128, 64, 4, 1, "64 x 32 scores per warp; two blocks share a multiprocessor", blocks=2)
            yield Tiling(64, 64, 4, 1, "32 x 32 scores per warp; two blocks share a multiprocessor", blocks=2)
        elif dim <= 128:
            if spec.deterministic:
                if not spec.mask.is_full and arch.has_vector_reduction:
                    yield Tiling(128, 64, 8, 1, "32 x 32 scores per warp; with four warps the assembler spills")
                # With a second stage, and no dQ at the end of the iteration, the assembler spills.
                yield Tiling(64, 64, 4, 1, "32 x 32 scores per warp; two blocks share a multiprocessor", blocks=2)
            if spec.varlen and spec.mask.is_full:
                yield Tiling(64, 64, 4, 1, "32 x 32 scores per warp; two blocks share a multiprocessor", blocks=2)
            yield Tiling(64, 64, 4, 2, "32 x 32 scores per warp; two blocks share a multiprocessor", blocks=2)
            yield Tiling(64, 128, 8, 2, "32 x 32 scores per warp, and Q prefetched one step ahead")
        yield Tiling(64, 64, 8, 1, fits)
        yield Tiling(32, 64, 8, 1, fits)
        yield Tiling(32, 32, 4, 1, fits)
    else:
        yield Tiling(64, 64, 8, 1, "eight warps share the tiles that are prefetched into registers")
        yield Tiling(32, 64, 8, 1, "eight warps share the tiles that are prefetched into registers")
    yield Tiling(64, 64, 4, 1, fits)
    yield Tiling(32, 64, 4, 1, fits)
    yield Tiling(32, 32, 4, 1, fits)
    yield Tiling(16, 32, 4, 1, fits)
    yield Tiling(16, 16, 2, 1, fits)


def query_rows(spec: AttentionSpec, arch: Arch) -> Iterator[Tiling]:
    """The schedule table of the dQ kernel."""
    dim = max(padded(spec.head_dim), padded(spec.head_dim_v))
    fits = "the largest tile that shared memory holds"
    if spec.element.is_half:
        if dim <= 128 and arch.has_cp_async:
            yield Tiling(64, 64, 4, 1, "16 query rows per warp, no exchange between warps")
        yield Tiling(64, 32, 4, 1, fits)
        yield Tiling(32, 32, 2, 1, fits)
        yield Tiling(32, 16, 2, 1, fits)
    else:
        if dim <= 128 and arch.has_cp_async:
            yield Tiling(64, 32, 4, 1, fits)
        yield Tiling(64, 16, 4, 1, fits)
        yield Tiling(32, 16, 2, 1, fits)
    yield Tiling(16, 16, 1, 1, fits)
