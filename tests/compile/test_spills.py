"""Spills: the warning that names a remedy, and the kernels under ``generated/``, which must not spill.

CI runs this file with the oldest and the newest NVRTC that ``pyproject.toml`` allows.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

import flashgen as fg
from flashgen.cache import default_cache
from flashgen.compile import Resources, compile_source, compiler_build_id, spill_warning
from flashgen.compile.spills import nvrtc_release
from flashgen.plan import plan
from flashgen.plan.model.plans import KernelPlan
from flashgen.render import render
from flashgen.render.golden import GOLDEN, Golden
from tests.drawn import some

OLD = "CL-36424714; Cuda compilation tools, release 13.0, V13.0.88"
NEW = "CL-39125733; Cuda compilation tools, release 13.5, V13.5.37"
SPILLS = Resources(168, 24, 16, 0)
#: Bytes per thread that releases before 13.5 spill, by kernel. Each lies in a loading warp, outside the mainloop.
KNOWN_SPILLS_BEFORE_13_5 = {"backward_main_d128_causal_sm90a": 24, "backward_query_d256_causal_sm90a": 28}
#: Bytes of stack without spills: an array that the compiler indexes at run time.
KNOWN_STACK_BEFORE_13_5 = {"forward_d64_splitk_sm80": 160}
#: With all releases: O in multiply_careful, which multiplies values that are not finite.
CAREFUL_STACK = {
    "decode_d64_causal_pages_sm80": 128,
    "decode_d128_causal_pages_e4m3_sm90a": 256,
    "decode_d128_causal_pages_sm90a": 320,
    "decode_d64x512_causal_pages_qv_sm90a": 576,
    "forward_d128_causal_sm90a": 384,
    "forward_d128_maskfca5b1_scoree4d1c7_sm90a": 384,
}
LINEAGE_ARCHS = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120")
#: With less aligned arrays, tiles wait in registers.
LINEAGE_DTYPES = (("fp16", 16), ("fp32", 16), ("fp16", 2))
#: A developer's run compiles a few of them.
ROWS = GOLDEN[:: 6 if os.environ.get("DRAWN_CASES", "sample") == "sample" else 1]


def kernel(role: Any = "forward", schedule: fg.Schedule | None = None, arch: str = "sm_80", **spec: Any) -> KernelPlan:
    given: dict[str, Any] = {"head_dim": 128, "mask": fg.causal(), **spec}
    return plan(fg.AttentionSpec(**given), schedule, arch).kernel(role)


def test_a_kernel_without_spills_has_no_warning() -> None:
    assert spill_warning(kernel(), Resources(255, 0, 0, 0), OLD) is None


def test_a_backward_kernel_has_tiles_of_its_own_to_make_smaller() -> None:
    warning = spill_warning(kernel("main", score=fg.softcap(30.0)), SPILLS, NEW)
    assert warning is not None
    assert warning.endswith("try smaller tiles (--backward-tile-q, --backward-tile-kv)")


def test_the_remedy_for_an_older_compiler_is_a_newer_one() -> None:
    warning = spill_warning(kernel("main", arch="sm_90a"), SPILLS, OLD)
    assert warning == (
        "backward_main_d128_causal_sm90a spills 24 bytes per thread with NVRTC 13.0.88; "
        "NVRTC 13.5 compiles it without spills: pip install 'nvidia-cuda-nvrtc>=13.5,<14'"
    )


@pytest.mark.parametrize(
    ("made", "build_id"),
    [
        (kernel(), NEW),
        (kernel(), "a compiler that names no release"),
        (kernel(head_dim=256, dtype="fp32", direction="forward"), OLD),
        (kernel(score=fg.softcap(30.0)), OLD),
        (kernel(schedule=fg.Schedule(tile_kv=32)), OLD),
        (kernel(dtype="fp16", arch="sm_75"), OLD),
    ],
)
def test_where_no_compiler_is_known_to_help_the_remedy_is_smaller_tiles(made: KernelPlan, build_id: str) -> None:
    warning = spill_warning(made, SPILLS, build_id)
    assert warning is not None
    assert f"{made.name} spills 24 bytes" in warning
    assert "try smaller tiles (--tile-q, --tile-kv)" in warning
    assert "pip install" not in warning


@pytest.mark.in_turns(6)
@pytest.mark.parametrize("arch", some(LINEAGE_ARCHS, "sm_90a"))
@pytest.mark.parametrize(("dtype", "access_bytes"), some(LINEAGE_DTYPES, ("fp16", 16)))
def test_kernels_of_standard_attention_do_not_spill(arch: str, dtype: str, access_bytes: int) -> None:
    spec = fg.AttentionSpec(128, dtype=dtype, mask=fg.window(5, 5), dropout=True)
    made = plan(spec, fg.Schedule(algorithm="standard"), arch, access_bytes=access_bytes)
    for kernel_plan in made.kernels:
        found = default_cache().get_or_compile(render(kernel_plan), compile_source)[0].resources
        assert (found.spill_bytes, found.stack_bytes) == (0, 0), kernel_plan.name


@pytest.mark.in_turns(6)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.spec.describe()} {row.arch}")
def test_committed_kernels_do_not_spill(row: Golden) -> None:
    is_old = nvrtc_release(compiler_build_id()) < (13, 5)
    attention = plan(row.spec, row.schedule, row.arch)
    for role in row.roles:
        made = attention.kernel(role)
        found = default_cache().get_or_compile(render(made), compile_source)[0].resources
        spills = KNOWN_SPILLS_BEFORE_13_5.get(made.name, 0) if is_old else 0
        stack = KNOWN_STACK_BEFORE_13_5.get(made.name, 0) if is_old else 0
        assert found.spill_bytes <= spills, made.name
        assert found.stack_bytes <= max(stack, spills, CAREFUL_STACK.get(made.name, 0)), made.name
