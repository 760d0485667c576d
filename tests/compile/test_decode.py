"""The registers of the decode kernel: two blocks share a multiprocessor, and nothing spills. And its loads."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import flashgen as fg
from flashgen.cache import default_cache
from flashgen.compile import compile_source
from flashgen.plan import plan
from flashgen.render import render
from tests.compile.machine_code import disassembled, machine_code
from tests.drawn import some

pytestmark = pytest.mark.in_turns(16)

DIMS = ((64, 64), (80, 80), (128, 128), (192, 128), (256, 256))
ARCHS = ("sm_80", "sm_90a", "sm_120")
SLOPES = np.linspace(0.01, 0.5, 16).astype(np.float32)
FEATURES: dict[str, dict[str, Any]] = {
    "causal pages": {"mask": fg.causal(), "cache": "paged"},
    "all keys": {"cache": "contiguous"},
    "window, softcap and sink": {
        "mask": fg.window(1000, 0),
        "score": fg.softcap(30.0) >> fg.sink(SLOPES),
        "cache": "paged",
    },
    "chunks and ALiBi": {"mask": fg.causal() & fg.chunked(512), "score": fg.alibi(SLOPES), "cache": "contiguous"},
    "e4m3": {"mask": fg.causal(), "cache": "paged", "cache_dtype": "e4m3"},
    "e4m3, scales of pages": {
        "mask": fg.causal(),
        "score": fg.softcap(30.0) >> fg.sink(SLOPES),
        "cache": "paged",
        "cache_dtype": "e4m3",
        "page_scales": True,
    },
    "e5m2": {"mask": fg.window(1000, 0), "cache": "contiguous", "cache_dtype": "e5m2"},
    "e4m3, also of queries": {"mask": fg.causal(), "score": fg.softcap(30.0), "cache": "paged", "dtype": "e4m3"},
}
CASES = [(arch, *dims, name) for arch in ARCHS for dims in DIMS for name in FEATURES]


@pytest.mark.parametrize(("arch", "dim", "dim_v", "name"), some(CASES, *CASES[::9]))
def test_nothing_spills(arch: str, dim: int, dim_v: int, name: str) -> None:
    spec = fg.AttentionSpec(dim, head_dim_v=dim_v, direction="forward", **FEATURES[name])
    kernel = plan(spec, None, arch).kernel("decode")
    found = default_cache().get_or_compile(render(kernel), compile_source)[0].resources
    assert found.spill_bytes == 0
    # O is copied to local memory where a forbidden value is not finite.
    assert found.stack_bytes <= 4 * dim_v
    assert found.registers * kernel.threads * kernel.min_blocks <= kernel.arch.registers_per_multiprocessor


@pytest.mark.parametrize("name", ["e4m3", "e4m3, scales of pages"])
def test_the_loop_over_keys_waits_for_no_load(name: str) -> None:
    spec = fg.AttentionSpec(80, head_dim_v=128, direction="forward", **FEATURES[name])
    lines = machine_code(plan(spec, None, "sm_90a").kernel("decode"))
    first, last = (i for i, line in enumerate(lines) if line.startswith("DEPBAR.LE"))
    assert any(line.startswith("HMMA") for line in lines[first:last])
    assert not any(line.startswith("LDG.") for line in lines[first:last])


@pytest.mark.parametrize(("arch", "instructions"), [("sm_80", 0), ("sm_90a", 2)])
def test_words_of_an_8_bit_cache_become_16_bits_by_instructions_where_there_are_any(
    arch: str, instructions: int
) -> None:
    spec = fg.AttentionSpec(128, direction="forward", cache="paged", cache_dtype="e4m3")
    kernel = plan(spec, None, arch).kernel("decode")
    text = disassembled(default_cache().get_or_compile(render(kernel), compile_source)[0].image)
    keys = int(kernel.constant("tile_kv")) // int(kernel.constant("warps"))
    # A lane holds two words of each key and its value. Without masks no careful product has conversions, too.
    assert text.count("F2FP.F16.E4M3.UNPACK_B") == instructions * 2 * keys


@pytest.mark.parametrize(
    ("arch", "dim", "fields"),
    [("sm_80", 128, {}), ("sm_90a", 64, {}), ("sm_90a", 256, {}), ("sm_90a", 64, {"head_dim_v": 512, "qv": True})],
)
def test_a_merge_loads_many_parts_before_it_waits(arch: str, dim: int, fields: dict[str, Any]) -> None:
    spec = fg.AttentionSpec(dim, direction="forward", cache="paged", **fields)
    image = default_cache().get_or_compile(render(plan(spec, None, arch).kernel("decode")), compile_source)[0].image
    # Two columns of O each, and of each part a row's total.
    assert max(run.count("LDG.E.64") for run in re.split(r"BRA|BAR", disassembled(image))) > 32
