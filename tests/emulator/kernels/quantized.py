"""``check_quantized``: 16-bit tensors to e4m3 and scales, by the quantize kernel with or without bugs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from flashgen import oracle
from flashgen.launch.quantizer import Quantized
from flashgen.plan.model.plans import Role
from flashgen.spec import Sequences
from tests.emulator.kernels.cached import edited

Edits = Mapping[Role, Callable[[str], str]]
#: The first sequence does not begin with the first row, and one has no queries.
STARTS_Q, STARTS_K = (5, 90, 90, 190), (0, 10, 60, 140)
ROWS_Q, ROWS_K = 200, 150


def check_quantized(case: Any, edits: Edits, *, data_seed: int = 0, at: str = "end", **options: Any) -> list[str]:
    """Runs a case's quantize kernel with edits in its source. Returns the names of wrong results."""
    kernel = edited(case, edits)
    kernel.target.options = {**options, "guard": at}  # type: ignore[attr-defined]
    spec, random = case.spec, np.random.default_rng(data_seed)
    block, dims = spec.scale_block, (spec.head_dim, spec.head_dim, spec.head_dim_v)
    rows = (ROWS_Q, ROWS_K, ROWS_K) if spec.varlen else (case.len_q, case.len_kv, case.len_kv)
    heads, lead = (case.heads, case.heads_kv, case.heads_kv), () if spec.varlen else (case.batch,)
    given = []
    for count, number, dim in zip(rows, heads, dims, strict=True):
        x = random.standard_normal((*lead, count, number, dim))
        # Finite elements after the first bound was infinite have a bound of their own.
        x[..., 1, 0, 3] = np.inf
        given.append(x.astype(spec.out_element.numpy()))
    if spec.varlen:
        starts = [np.array(x, np.int32) for x in (STARTS_Q, STARTS_K)]
        longest = [int(np.diff(x).max()) for x in starts]
        found = kernel.quantize(*given, sequences=Sequences(*starts, *longest))
        each = zip(given, (starts[0], starts[1], starts[1]), (True, True, False), strict=True)
        exact = [oracle.quantized_packed_rows(x, of_x, block, rotate=turns) for x, of_x, turns in each]
    else:
        found = kernel.quantize(*given)
        turns = zip(given, (True, True, False), strict=True)
        exact = [oracle.quantized_rows(x, block, rotate=turned) for x, turned in turns]
    wanted = Quantized(*(codes for codes, _ in exact), *(scales for _, scales in exact))
    return [name for name in Quantized._fields if not _same(getattr(found, name), getattr(wanted, name))]


def _same(found: Any, wanted: Any) -> bool:
    found = np.asarray(found)
    return np.array_equal(found.view(np.uint8) if wanted.dtype == np.uint8 else found, wanted, equal_nan=True)
