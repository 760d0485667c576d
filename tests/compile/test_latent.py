"""The registers and the instructions of the latent kernel."""

from __future__ import annotations

from typing import Any

import pytest

import flashgen as fg
from flashgen.cache import default_cache
from flashgen.compile import compile_source
from flashgen.plan import plan
from flashgen.render import render
from tests.compile.machine_code import disassembled
from tests.compile.test_decode import SLOPES
from tests.drawn import some

pytestmark = pytest.mark.in_turns(16)

DIMS = ((64, 512), (64, 448), (16, 64), (32, 256))
ARCHS = ("sm_80", "sm_90a", "sm_120")
FEATURES: dict[str, dict[str, Any]] = {
    "causal pages": {"mask": fg.causal(), "cache": "paged"},
    "all keys, fp16": {"cache": "contiguous", "dtype": "fp16"},
    "window, softcap and sink": {
        "mask": fg.window(1000, 0),
        "score": fg.softcap(30.0) >> fg.sink(SLOPES),
        "cache": "paged",
    },
    "chunks and ALiBi": {"mask": fg.causal() & fg.chunked(512), "score": fg.alibi(SLOPES), "cache": "contiguous"},
}
CASES = [(arch, *dims, name) for arch in ARCHS for dims in DIMS for name in FEATURES]


def compiled(arch: str, dim: int, dim_v: int, access: int = 16, **fields: Any) -> Any:
    spec = fg.AttentionSpec(dim, head_dim_v=dim_v, qv=True, direction="forward", **fields)
    kernel = plan(spec, None, arch, access_bytes=access)
    return default_cache().get_or_compile(render(kernel.kernel("decode")), compile_source)[0]


@pytest.mark.parametrize(
    ("arch", "dim", "dim_v", "name"), some(CASES, *[case for case in CASES if case[1:] == (64, 512, "causal pages")])
)
def test_nothing_spills(arch: str, dim: int, dim_v: int, name: str) -> None:
    found = compiled(arch, dim, dim_v, **FEATURES[name]).resources
    assert found.spill_bytes == 0
    # O is copied to local memory where a forbidden value is not finite, on Hopper with P.
    assert found.stack_bytes <= 4 * (128 + 16)


def test_each_product_of_the_portable_kernel_is_in_the_loop_once() -> None:
    text = disassembled(compiled("sm_90a", 64, 512, 8, mask=fg.causal(), cache="paged").image)
    # S: 16 rows and 32 keys of 576 columns. O: 64 rows and 64 columns of 64 keys. The careful product has a loop.
    assert text.count("HMMA.16816") == 4 * 36 + 4 * 8 * 4 + 4


def test_hoppers_products_are_under_way_together() -> None:
    made = compiled("sm_90a", 64, 512, mask=fg.causal(), cache="paged")
    assert "(C75" not in made.log
    # With and without the other warpgroup's product beside S: 576 columns of S, and O from 64 keys of the own tile.
    # The other warpgroup's tile: beside S, before S, and after the last S.
    assert disassembled(made.image).count("HGMMA.64x") == 2 * (36 + 4) + 3 * 4
