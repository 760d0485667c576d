"""All cases, by family; a family is a module here and a file of the record."""

from __future__ import annotations

import functools

from conformance.case import Case
from conformance.cases import barrier, bits, cluster, copy, eight_bits, math, matrix, tma, warp, wgmma

FAMILIES: dict[str, tuple[Case, ...]] = {
    "warp": warp.CASES,
    "math": math.CASES,
    "copy": copy.CASES,
    "matrix": matrix.CASES,
    "bits": bits.CASES,
    "eight_bits": eight_bits.CASES,
    "wgmma": wgmma.CASES,
    "barrier": barrier.CASES,
    "tma": tma.CASES,
    "cluster": cluster.CASES,
}

CASES: dict[str, Case] = {case.name: case for cases in FAMILIES.values() for case in cases}


@functools.cache
def variants_of(kernel: str) -> tuple[str, ...]:
    """The variants that cases use of a kernel, in order."""
    return tuple(dict.fromkeys(case.variant for case in CASES.values() if case.kernel == kernel))
