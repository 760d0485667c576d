"""FlashAttention-3's published matrix of tests of ``flash_attn_with_kvcache`` in 16 bits.

DRAWN_CASES=nightly draws more of it, and takes float16, too, which that matrix leaves out.
"""

from __future__ import annotations

from itertools import product
from random import Random

import pytest

torch = pytest.importorskip("torch")
interface = pytest.importorskip("flashgen.compat.flash_attn_interface")

from tests.gpu.flash_attn_matrix import WHOLE  # noqa: E402
from tests.gpu.kvcache_matrix import CACHED_LENGTHS, DIMS, MASKS, CacheProblem  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.torch]

DTYPES = ("bfloat16", "float16") if WHOLE else ("bfloat16",)
DRAWS = 12 if WHOLE else 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("mask", MASKS, ids=["full", "causal", "local"])
def test_caches(plain_outputs: None, dim: int, mask: tuple[bool, bool], dtype: str) -> None:
    torch.manual_seed(0)
    random = Random(f"{dim} {mask} {dtype}")
    for _, lengths in product(range(DRAWS), CACHED_LENGTHS):
        CacheProblem(random, dim, lengths, mask, "cuda", dtype).check(interface)
