"""NumPy's masked arrays: nothing here reads their masks, so none is taken for a plain array."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import flashgen as fg

SPEC = fg.AttentionSpec(8, dtype="fp32")
X = np.ones((1, 4, 1, 8), np.float32)
MASKED = np.ma.masked_less(X, 0)
IDS = np.ma.masked_equal(np.zeros((1, 4), np.int32), 1)
SLOPES = np.ma.ones(4)
WITH_IDS = fg.AttentionSpec(8, dtype="fp32", mask=fg.document(IDS.filled(0)))


@pytest.mark.parametrize("name", ["q", "k", "v", "do", "dlse"])
def test_the_oracle_refuses_them(name: str) -> None:
    arguments: dict[str, Any] = dict.fromkeys(("q", "k", "v", "do"), X)
    fg.oracle.backward(SPEC, **arguments)
    arguments[name] = MASKED if name != "dlse" else np.ma.zeros((1, 1, 4))
    with pytest.raises(fg.ArgumentError, match=rf"^{name} is a masked array, whose mask .* pass {name}\.filled\(0\)"):
        fg.oracle.backward(SPEC, **arguments)


def test_the_oracle_refuses_them_among_captured_tensors_and_caches() -> None:
    (name,) = WITH_IDS.tensors
    with pytest.raises(fg.ArgumentError, match=rf"captured\['{name}'\] is a masked array"):
        fg.oracle.forward(WITH_IDS, X, X, X, captured={name: IDS})
    with pytest.raises(fg.ArgumentError, match=rf"captured\['{name}'\] is a masked array"):
        fg.explain(WITH_IDS, 4, captured={name: IDS})
    cached = fg.AttentionSpec(8, dtype="fp32", cache="contiguous", direction="forward")
    with pytest.raises(fg.ArgumentError, match="the cache is a masked array"):
        fg.oracle.forward_cached(cached, X, MASKED, X, fg.KVCache(seqlens=np.array([4], np.int32)))


@pytest.mark.parametrize(
    "make",
    [
        lambda: fg.document(IDS),
        lambda: fg.bias(np.ma.zeros((1, 4, 4))),
        lambda: fg.AttentionSpec(8, mask=lambda b, h, q, k: IDS[b, q] == IDS[b, k]),
        lambda: fg.AttentionSpec(8, score=lambda s, b, h, q, k, slopes=SLOPES: s * slopes[h]),
    ],
    ids=["document", "bias", "mask", "score"],
)
def test_specs_capture_none(make: Any) -> None:
    with pytest.raises(fg.SpecError, match=r"is a masked array, whose mask kernels do not see; \w+ \w+\.filled\(0\)"):
        make()
