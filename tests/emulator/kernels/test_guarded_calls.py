"""What a person calls on the emulator runs on guarded copies, and never notices, unless a kernel goes astray."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import flashgen as fg
from flashgen.emulator import GuardedCall

SPEC = fg.AttentionSpec(16, dtype="fp32", mask=fg.causal())


@pytest.fixture(params=["end", "begin"])
def kernel(request: pytest.FixtureRequest) -> Iterator[Any]:
    built: Any = fg.build(SPEC, target="emulator")
    built.target.options = {"guard": request.param}
    yield built
    built.target.options = {}


def results(kernel: Any, *arrays: Any) -> list[Any]:
    q, k, v, do = arrays
    o, lse = kernel(q, k, v)
    return [o, lse, *kernel.backward(do, q, k, v, o, lse)]


def test_views_of_one_array_give_what_copies_of_them_give(kernel: Any) -> None:
    """Queries, keys and values packed into one array, as projections leave them, overlap as stretches of memory."""
    random = np.random.default_rng(0)
    packed = random.standard_normal((2, 40, 3, 2, 16)).astype(np.float32)
    views = [packed[:, :, i] for i in range(3)]
    do = random.standard_normal(views[0].shape).astype(np.float32)[:, ::-1]
    kept = packed.copy()
    found = results(kernel, *views, do)
    expected = results(kernel, *(view.copy() for view in views), do.copy())
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(packed, kept)
    assert all(np.isfinite(x).all() for x in found)


def test_a_cache_whose_first_keys_are_used_may_be_longer(kernel: Any) -> None:
    random = np.random.default_rng(0)
    q, cache = (random.standard_normal((1, n, 1, 16)).astype(np.float32) for n in (5, 60))
    cache[:, 33:] = math.nan
    o, _ = kernel(q, cache[:, :33], cache[:, :33])
    expected, _ = fg.oracle.forward(SPEC, q, cache[:, :33], cache[:, :33])
    assert np.abs(o - expected).max() < 1e-5


@pytest.mark.parametrize("sizes", [(0, 7, 2), (5, 0, 2), (5, 7, 0), (0, 0, 1)])
def test_empty_arrays_are_guarded_too(kernel: Any, sizes: tuple[int, int, int]) -> None:
    len_q, len_kv, heads = sizes
    q, k = np.zeros((1, len_q, heads, 16), np.float32), np.zeros((1, len_kv, heads, 16), np.float32)
    o, lse, dq, dk, dv = results(kernel, q, k, k, q)
    assert not o.any()
    assert np.isneginf(lse).all()
    assert not dq.any()
    assert not dk.any()
    assert not dv.any()


def test_every_array_of_a_call_is_guarded(monkeypatch: pytest.MonkeyPatch, kernel: Any) -> None:
    seen: list[dict[str, bool]] = []
    init = GuardedCall.__init__

    def spy(self: GuardedCall, stretches: Any, at: Any = "end") -> None:
        stretches = list(stretches)
        seen.append({name: writable for name, _, _, writable in stretches})
        init(self, stretches, at)

    monkeypatch.setattr(GuardedCall, "__init__", spy)
    x = np.ones((1, 3, 1, 16), np.float32)
    results(kernel, x, x, x, x)
    inputs = {"q": False, "k": False, "v": False}
    assert seen[0] == {**inputs, "o": True, "lse": True}
    # Workspaces of Hopper's kernels are empty here, and not made.
    written = dict.fromkeys(("dq", "dk", "dv", "dsum", "dq_accum"), True)
    assert seen[1] == {**inputs, "do": False, "out": False, "lse": False, **written}
