"""The machine code of the quantize kernel: as many blocks share a multiprocessor as fit, and little spills."""

from __future__ import annotations

import pytest

import flashgen as fg
from flashgen.cache import default_cache
from flashgen.compile import blocks_per_multiprocessor, compile_source
from flashgen.plan import plan
from flashgen.render import render
from tests.drawn import some

pytestmark = pytest.mark.in_turns(12)

FORMS = ((16, 16, 64), (64, 64, 128), (80, 48, 64), (128, 128, 128), (192, 128, 64), (256, 256, 64), (256, 256, 128))
#: Bytes. A thread holds 64 elements in 80 registers, so that enough rows are under way.
MOST_SPILLS = 64
CASES = [(arch, *form, packed) for arch in ("sm_89", "sm_90a", "sm_120") for form in FORMS for packed in (False, True)]


@pytest.mark.parametrize(("arch", "dim", "dim_v", "block", "packed"), some(CASES, *CASES[::11]))
def test_little_spills_and_blocks_share_a_multiprocessor(
    arch: str, dim: int, dim_v: int, block: int, packed: bool
) -> None:
    spec = fg.AttentionSpec(dim, head_dim_v=dim_v, dtype="e4m3", scale_block=block, varlen=packed, direction="forward")
    kernel = plan(spec, None, arch).kernel("quantize")
    found = default_cache().get_or_compile(render(kernel), compile_source)[0].resources
    assert found.spill_bytes <= MOST_SPILLS
    assert blocks_per_multiprocessor(kernel, found) >= min(kernel.min_blocks, 2)
