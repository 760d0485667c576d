"""FlashAttention-3's calls in float8: what ``tests/gpu/test_flash_attn_float8.py`` checks, small, emulated."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch
interface = pytest.importorskip("flashgen.compat.flash_attn_interface")

from tests.drawn import some  # noqa: E402
from tests.gpu.float8_matrix import HEADS, check_output  # noqa: E402
from tests.gpu.kvcache_matrix import DIMS, MASKS, CacheProblem  # noqa: E402

LENGTHS = ((1, 1), (37, 1), (40, 3), (13, 50), (30, 70))
CACHED_LENGTHS = ((1, 30), (3, 90), (20, 20), (40, 70), (9, 300))
KINDS = [(dim, mask) for dim in DIMS for mask in MASKS]


@pytest.mark.parametrize(("dim", "mask"), some(KINDS, *KINDS[::4]), ids=str)
def test_output(emulated: Any, dim: int, mask: tuple[bool, bool]) -> None:
    torch.manual_seed(0)
    random = Random(f"{dim} {mask}")
    for number, lengths in enumerate(LENGTHS):
        cap = (0.0, 15.0)[(number + DIMS.index(dim)) % 2]
        heads = list(HEADS.values())[number % 3]
        check_output(interface.flash_attn_func, dim, heads, lengths, mask, cap, random, "cpu")


@pytest.mark.parametrize(("dim", "mask"), some(KINDS, *KINDS[::4]), ids=str)
def test_caches(emulated: Any, dim: int, mask: tuple[bool, bool]) -> None:
    torch.manual_seed(0)
    random = Random(f"caches {dim} {mask}")
    for lengths in CACHED_LENGTHS:
        CacheProblem(random, dim, lengths, mask, "cpu").check(interface)
