"""FlashAttention-3's published matrix of tests in float8: its dense function, and that for caches.

DRAWN_CASES=nightly takes every combination of the dense one, and draws more of the caches'.
"""

from __future__ import annotations

from itertools import product
from random import Random

import pytest

torch = pytest.importorskip("torch")
interface = pytest.importorskip("flashgen.compat.flash_attn_interface")

from tests.gpu.flash_attn_matrix import WHOLE  # noqa: E402
from tests.gpu.float8_matrix import HEADS, check_output  # noqa: E402
from tests.gpu.kvcache_matrix import CACHED_LENGTHS, DIMS, MASKS, CacheProblem  # noqa: E402
from tests.gpu.test_flash_attn_interface import LENGTHS  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.torch]

DRAWS = 12 if WHOLE else 1


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("mask", MASKS, ids=["full", "causal", "local"])
@pytest.mark.parametrize("cap", [0.0, 15.0])
def test_output(plain_outputs: None, dim: int, mask: tuple[bool, bool], cap: float) -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("e4m3 needs sm_89 or later")
    torch.manual_seed(0)
    random = Random(f"{dim} {mask} {cap}")
    for number, lengths in enumerate(LENGTHS):
        # Scores of all heads in float32 take gigabytes at the longest.
        each = [(2, 2), (2, 1)] if lengths[0] > 4000 else list(HEADS.values())
        for heads in each if WHOLE else each[number % len(each) :][:1]:
            check_output(interface.flash_attn_func, dim, heads, lengths, mask, cap, random, "cuda")


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("mask", MASKS, ids=["full", "causal", "local"])
def test_caches(plain_outputs: None, dim: int, mask: tuple[bool, bool]) -> None:
    """The rows of FlashAttention-3 have heads of 128 alone, and no scales."""
    torch.manual_seed(0)
    random = Random(f"caches {dim} {mask}")
    for _, lengths in product(range(DRAWS), CACHED_LENGTHS):
        CacheProblem(random, dim, lengths, mask, "cuda").check(interface)
