"""Machine code of the forward kernel for e4m3: no spills up to D=128, and products are of 8 bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import flashgen as fg
from flashgen.cache import default_cache
from flashgen.compile import Binary, compile_source
from flashgen.compile.disassembler import disassemble
from flashgen.plan import plan
from flashgen.render import render
from tests.drawn import some

pytestmark = pytest.mark.in_turns(12)

DIMS = ((16, 16), (64, 64), (80, 80), (128, 128), (192, 128), (256, 256))
ARCHS = ("sm_89", "sm_90a", "sm_100", "sm_120")
SLOPES = np.linspace(0.01, 0.5, 16).astype(np.float32)
FEATURES: dict[str, dict[str, Any]] = {
    "all keys": {},
    "causal, blocks": {"mask": fg.causal(), "scale_block": 64},
    "packed, blocks": {"mask": fg.causal(), "scale_block": 128, "varlen": True},
    "documents, softcap and sink": {
        "mask": fg.causal() & fg.document(np.zeros((1, 1), np.int32)),
        "score": fg.softcap(30.0) >> fg.sink(SLOPES),
        "out_dtype": "fp16",
    },
}
#: Bytes. O of such heads leaves too few registers for all addresses; a few are read again beside each tile of keys.
SPILLS_OF_WIDE_HEADS = 96
CASES = [(arch, *dims, name) for arch in ARCHS for dims in DIMS for name in FEATURES]


def compiled(arch: str, dim: int, dim_v: int, **fields: Any) -> Binary:
    spec = fg.AttentionSpec(dim, head_dim_v=dim_v, dtype="e4m3", direction="forward", **fields)
    return default_cache().get_or_compile(render(plan(spec, None, arch).kernel("forward")), compile_source)[0]


@pytest.mark.parametrize(("arch", "dim", "dim_v", "name"), some(CASES, *CASES[::13]))
def test_next_to_nothing_spills(arch: str, dim: int, dim_v: int, name: str) -> None:
    found = compiled(arch, dim, dim_v, **FEATURES[name]).resources.spill_bytes
    assert found <= (SPILLS_OF_WIDE_HEADS if dim_v > 128 else 0)


@pytest.mark.parametrize("arch", ["sm_89", "sm_120"])
def test_products_are_of_8_bits(arch: str) -> None:
    text = disassemble(compiled(arch, 64, 64).image)
    assert "QMMA.16832.F32.E4M3.E4M3" in text
    assert "HMMA" not in text
