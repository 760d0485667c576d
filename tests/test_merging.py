"""Results for several sets of keys as one."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

import flashgen as fg
from flashgen import oracle

SPEC = fg.AttentionSpec(16, dtype="fp16", direction="forward")
#: Where the keys are cut; one set is empty.
CUTS = (0, 9, 9, 40, 70)


def results(scale: float, *, dtype: Any = np.float32) -> tuple[list[Any], list[Any], Any, Any]:
    """The results of each set of keys, and those of all keys."""
    random = np.random.default_rng(0)
    q, k, v = (random.standard_normal((2, length, 4, 16)).astype(np.float16) for length in (5, 70, 70))
    made = [oracle.forward(SPEC, q, k[:, begin:end], v[:, begin:end], scale=scale) for begin, end in pairwise(CUTS)]
    whole, lse = oracle.forward(SPEC, q, k, v, scale=scale)
    return [o.astype(dtype) for o, _ in made], [x.astype(np.float32) for _, x in made], whole, lse


@pytest.mark.parametrize("scale", [0.25, 100.0])
def test_the_parts_of_all_keys_give_the_whole(scale: float) -> None:
    outputs, lses, whole, lse = results(scale)
    merged, merged_lse = fg.merge(outputs, lses)
    assert (merged.dtype, merged_lse.dtype) == (np.float32, np.float32)
    np.testing.assert_allclose(merged, whole, atol=1e-4)
    np.testing.assert_allclose(merged_lse, lse, rtol=1e-6)


def test_the_result_has_the_dtype_of_the_outputs() -> None:
    outputs, lses, whole, _ = results(0.25, dtype=np.float16)
    merged, _ = fg.merge(outputs, lses)
    assert merged.dtype == np.float16
    np.testing.assert_allclose(merged.astype(np.float32), whole, atol=2e-3)


def test_rows_without_any_key_give_zeros() -> None:
    outputs, lses = np.zeros((2, 1, 3, 2, 8), np.float32), np.full((2, 1, 2, 3), -np.inf, np.float32)
    with np.errstate(all="raise"):
        merged, lse = fg.merge(list(outputs), list(lses))
    assert not merged.any()
    assert (lse == -np.inf).all()


def test_packed_results_merge_too() -> None:
    outputs, lses, whole, lse = results(0.25)
    merged, merged_lse = fg.merge([o[0] for o in outputs], [x[0] for x in lses])
    np.testing.assert_allclose(merged, whole[0], atol=1e-5)
    np.testing.assert_allclose(merged_lse, lse[0], rtol=1e-6)


def test_tensors_merge_as_arrays_do() -> None:
    torch = pytest.importorskip("torch")
    outputs, lses, whole, lse = results(0.25)
    merged, merged_lse = fg.merge(*([torch.from_numpy(x).clone() for x in xs] for xs in (outputs, lses)))
    assert merged.dtype == torch.float32
    np.testing.assert_allclose(merged.numpy(), whole, atol=1e-5)
    np.testing.assert_allclose(merged_lse.numpy(), lse, rtol=1e-6)


def test_a_shared_prefix_and_own_keys_give_what_all_keys_give() -> None:
    spec = fg.AttentionSpec(32, dtype="fp16", direction="forward", cache="contiguous")
    kernel, random = fg.build(spec, arch="sm_80", target="emulator"), np.random.default_rng(1)
    k, v = (random.standard_normal((1, 100, 1, 32)).astype(np.float16) for _ in range(2))
    q = random.standard_normal((1, 2, 4, 32)).astype(np.float16)
    parts = [kernel(q, k[:, own], v[:, own], cache=fg.KVCache()) for own in (slice(0, 64), slice(64, 100))]
    merged, lse = fg.merge(*zip(*parts, strict=True))
    whole, whole_lse = kernel(q, k, v, cache=fg.KVCache())
    np.testing.assert_allclose(merged.astype(np.float32), whole.astype(np.float32), atol=1e-3)
    np.testing.assert_allclose(lse, whole_lse, atol=1e-5)


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        ((), "it was given 0 and 0"),
        ((((3, 2, 8), (2, 3)), ((3, 2, 8), (3, 2))), r"lses\[1\] \(3, 2\)"),
        ((((3, 2, 8), (2, 3)), ((3, 2, 4), (2, 3))), r"outputs\[1\] has shape \(3, 2, 4\)"),
        ((((3, 8), (3,)),), r"outputs\[0\] has shape \(3, 8\)"),
    ],
)
def test_results_that_do_not_fit_are_refused_in_a_sentence(shapes: Any, words: str) -> None:
    outputs, lses = ([np.zeros(shape[i], np.float32) for shape in shapes] for i in (0, 1))
    with pytest.raises(fg.ArgumentError, match=words):
        fg.merge(outputs, lses)
