"""FlashAttention-3's calls of caches in 16 bits: ``tests/gpu/test_kvcache_interface.py``, small and emulated."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch
interface = pytest.importorskip("flashgen.compat.flash_attn_interface")

from tests.drawn import some  # noqa: E402
from tests.gpu.kvcache_matrix import DIMS, MASKS, CacheProblem  # noqa: E402

LENGTHS = ((1, 30), (3, 90), (20, 20), (40, 70), (9, 300))
KINDS = [(dim, mask, dtype) for dim in DIMS for mask in MASKS for dtype in ("bfloat16", "float16")]


@pytest.mark.parametrize(("dim", "mask", "dtype"), some(KINDS, *KINDS[::9]), ids=str)
def test_caches(emulated: Any, dim: int, mask: tuple[bool, bool], dtype: str) -> None:
    torch.manual_seed(0)
    random = Random(f"{dim} {mask} {dtype}")
    for lengths in LENGTHS:
        CacheProblem(random, dim, lengths, mask, "cpu", dtype).check(interface)
