"""Hopper's forward kernel gives the same bits in every run, whichever block draws which tiles of queries, and when."""

from __future__ import annotations

import numpy as np
import pytest

import flashgen as fg
from flashgen.verify import Mode
from tests.drawn import diagonal
from tests.kernels.test_forward_sm90 import NAME, forward_spec, launches

#: Orders of threads, in which blocks draw other tiles.
MODES = [Mode(), *(Mode("random", seed=seed) for seed in (1, 2)), Mode("priority", seed=3)]
#: Scores, and how large queries are under them: such that some tiles of queries are repeated and others are not.
SCORES = {
    "large logits": (None, 30.0),
    "rows that outgrow their reference maximum": (fg.Score.of(lambda s, b, h, q, k: s - (h - 2) * k), 1.0),
    "softcap": (fg.softcap(100.0), 7.0),
    "non-finite values": (None, 1.0),
}


@pytest.mark.parametrize(("name", "dim"), diagonal(list(SCORES), [64, 128]))
def test_results_are_the_same_bits_in_any_order_of_tiles(name: str, dim: int) -> None:
    """Blocks have several tiles each, so that what one leaves behind would show in the next one."""
    score, factor = SCORES[name]
    spec = forward_spec(dim, dim, mask=fg.causal(), score=score)
    kernel = fg.build(spec, arch="sm_90a", target="emulator")
    dtype, random = spec.element.numpy(), np.random.default_rng(dim)
    q, k, v = (random.standard_normal((2, 330, heads, dim)) for heads in (4, 2, 2))
    # Some heads are harder than others.
    q *= factor * np.array([0.3, 1.0, 0.8, 1.3])[:, None]
    arrays = [x.astype(dtype) for x in (q, k, v)]
    if name == "non-finite values":
        arrays[2][1, ::100, 1, 7] = np.nan
    found = set()
    for mode in MODES:
        with launches(kernel, mode) as done:
            out, lse = kernel(*arrays)
        assert done == {NAME}
        found.add((out.tobytes(), lse.tobytes()))
    assert len(found) == 1
