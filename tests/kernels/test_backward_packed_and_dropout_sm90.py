"""Packed sequences and dropout by Hopper's backward kernels on the emulator: gradients as near to the oracle's as
without, in whichever order warps and blocks run.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest

import flashgen as fg
from flashgen import oracle
from flashgen.plan.hopper.backward import HEAD_DIMS
from flashgen.verify import Case, Mode, expect
from tests.drawn import LEVEL, diagonal
from tests.kernels.test_backward_sm90 import NAME, OTHER, SPECS, built, check
from tests.kernels.test_forward_sm90 import drawn_case, drawn_mode, launches

#: Cases of each spec.
CASES = {"sample": 2, "ci": 12, "nightly": 100}[LEVEL]
NAMES = ("full", "causal", "window", "documents", "holes", "softcap", "slopes", "sink")
FEATURES: dict[str, dict[str, Any]] = {
    "dropout": {"dropout": True},
    "dropout, ordered": {"dropout": True, "deterministic": True},
}
EVERY = [
    (dims, name, feature)
    for (dims, name), feature in zip(
        diagonal(HEAD_DIMS, NAMES, step=3), list(FEATURES) * len(HEAD_DIMS) * len(NAMES), strict=False
    )
]
DROPOUT = fg.Dropout(0.3, 2**63 + 11, 2**35 + 4)


@pytest.mark.parametrize(("dims", "name", "feature"), EVERY)
def test_gradients_are_within_their_bounds_and_nothing_is_found(
    dims: tuple[int, int], name: str, feature: str
) -> None:
    """Lengths about tiles, sequences of any length, heads shared or not. Rows that are not used hold NaN."""
    random = Random(f"{dims} {name} {feature}")
    dtype = random.choice(("bf16", "fp16"))
    spec = fg.AttentionSpec(dims[0], head_dim_v=dims[1], dtype=dtype, **SPECS[name], **FEATURES[feature])
    main = built(spec).plan.kernel("main")
    for _ in range(CASES):
        case = drawn_case(random, spec, int(main.constant("tile_q")), int(main.constant("tile_kv")))
        if not case.len_q or not case.len_kv:
            continue  # Other kernels write results of calls without queries or keys.
        check(spec, expect(spec, case, any_values=True), drawn_mode(random))


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_dv_shows_which_pairs_are_dropped(dim: int) -> None:
    """With equal scores and a unit matrix for dO, also in tiles beyond the first ones."""
    queries, keys = dim, 300
    spec = fg.AttentionSpec(dim, dropout=True)
    kernel = built(spec)
    dtype = spec.element.numpy()
    q, k = np.zeros((2, queries, 2, dim), dtype), np.zeros((2, keys, 2, dim), dtype)
    unit = np.ascontiguousarray(np.broadcast_to(np.eye(queries)[None, :, None, :], (2, queries, 2, dim))).astype(dtype)
    o, lse = kernel(q, k, k, dropout=DROPOUT)
    with launches(kernel, Mode(), "main") as done:
        _, _, dv = kernel.backward(unit, q, k, k, o, lse, dropout=DROPOUT)
    assert done == {NAME}
    kept = oracle.dropout_mask(DROPOUT, 2, 2, queries, keys)
    shown = dv.astype(np.float32)
    assert np.array_equal(np.moveaxis(shown != 0, (1, 2, 3), (3, 1, 2)), kept)
    np.testing.assert_allclose(shown[shown != 0], 1 / keys / 0.7, rtol=2.0**-7)


@pytest.mark.parametrize("dims", [(64, 64), (256, 256)])
def test_non_finite_inputs_reach_no_other_gradients_with_dropout(dims: tuple[int, int]) -> None:
    """Tiles that are computed again drop the same pairs."""
    spec = fg.AttentionSpec(dims[0], mask=fg.causal(), dropout=True)
    for seed, fill in enumerate(("keys", "queries")):
        case = Case("repaired", 100, 150, heads=2, heads_kv=1, non_finite=fill, seed=seed)
        check(spec, expect(spec, case, any_values=True))
