from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from flashgen.arch import ARCHS, get_arch
from flashgen.compile import Resources, blocks_per_multiprocessor, compile_source, occupancy
from flashgen.compile.resources import parse_resources, serialisation_warnings
from flashgen.plan.model.plans import KernelPlan, SmemMap, SmemRegion
from flashgen.render import KernelSource

Source = Callable[..., KernelSource]
TOP = """\
{% import "kernels/common.j2" as common %}
#include "flashgen/primitives.cuh"
using namespace flashgen;
"""
LOG = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'other' for 'sm_80'
ptxas info    : Function properties for other
ptxas         .     0 bytes stack frame, 8 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 8 registers, used 0 barriers, 360 bytes cmem[0]
ptxas info    : Compiling entry function 'kernel' for 'sm_80'
ptxas info    : Function properties for called
ptxas         .     16 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads
ptxas info    : Function properties for kernel
ptxas         .     400 bytes stack frame, 40 bytes spill stores, 44 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 416 bytes cumulative stack size, 132 bytes smem
ptxas info    : Compile time = 30.858 ms
"""


def test_the_report_of_the_named_kernel_is_read() -> None:
    assert parse_resources(LOG, "kernel") == Resources(255, 4 + 12 + 40 + 44, 416, 132)
    assert parse_resources(LOG, "other") == Resources(8, 16, 0, 0)
    assert parse_resources(LOG, "missing") is None
    assert parse_resources("", "kernel") is None


def test_a_kernel_that_declares_shared_memory_and_spills_is_seen_to(source: Source) -> None:
    # 32 registers a thread are what 64 warps leave, and 64 live values do not fit them.
    text = TOP + (
        'extern "C" __global__ void __launch_bounds__(1024, 2) tiny(float* p) {\n'
        "  __shared__ float s[33];\n"
        "  float v[64];\n"
        "#pragma unroll\n"
        "  for (i32 i = 0; i < 64; ++i) v[i] = p[i * 1024 + thread_idx()];\n"
        "  s[thread_idx() % 33] = v[0];\n"
        "  block_sync();\n"
        "#pragma unroll\n"
        "  for (i32 i = 0; i < 64; ++i) p[i * 1024 + thread_idx()] = v[i] * v[63 - i] + s[i % 33];\n"
        "}\n"
    )
    resources = compile_source(source(text)).resources
    assert resources.registers == 32
    assert resources.spill_bytes > 0
    assert resources.stack_bytes > 0
    assert resources.static_smem_bytes == 33 * 4
    assert "spill" in str(resources)


def test_only_the_harmless_wgmma_message_is_let_through() -> None:
    for code in (7499, *range(7500, 7530), 7600):
        line = f"ptxas info    : (C{code}) something about wgmma in function 'k'"
        assert bool(serialisation_warnings(line)) == (7500 <= code < 7600 and code != 7517)


def taking(plan: KernelPlan, arch: str, threads: int, smem: int) -> KernelPlan:
    return replace(plan, arch=get_arch(arch), threads=threads, smem=SmemMap((SmemRegion("all", 0, smem),)))


@pytest.mark.parametrize(
    ("arch", "threads", "smem", "registers", "blocks", "limited_by"),
    [
        # A100: 65536 registers, 164 KiB, 2048 threads, 32 blocks.
        ("sm_80", 128, 0, 128, 4, "registers"),
        ("sm_80", 128, 0, 129, 3, "registers"),  # 136 after rounding: 15 warps, in fours 12
        ("sm_80", 128, 0, 255, 2, "registers"),
        ("sm_80", 256, 0, 255, 1, "registers"),
        ("sm_80", 32, 0, 16, 32, "blocks"),
        ("sm_80", 1024, 0, 32, 2, "registers"),
        ("sm_80", 1024, 0, 16, 2, "threads"),
        ("sm_80", 128, 81 * 1024, 64, 2, "shared memory"),
        ("sm_80", 128, 81 * 1024 + 1, 64, 1, "shared memory"),
        ("sm_80", 128, 163 * 1024, 64, 1, "shared memory"),
        # RTX 30: 100 KiB, 1536 threads, 16 blocks.
        ("sm_86", 128, 49 * 1024, 64, 2, "shared memory"),
        ("sm_86", 512, 0, 32, 3, "threads"),
        # T4 keeps nothing of its 64 KiB for the driver.
        ("sm_75", 128, 64 * 1024, 64, 1, "shared memory"),
        ("sm_75", 128, 32 * 1024, 64, 2, "shared memory"),
        # H100: 228 KiB.
        ("sm_90", 128, 113 * 1024, 64, 2, "shared memory"),
        ("sm_90", 128, 227 * 1024, 64, 1, "shared memory"),
    ],
)
def test_occupancy_is_nvidias_arithmetic(
    tiny: KernelPlan, arch: str, threads: int, smem: int, registers: int, blocks: int, limited_by: str
) -> None:
    found = occupancy(taking(tiny, arch, threads, smem), Resources(registers, 0, 0, 0))
    assert (found.blocks, found.limited_by) == (blocks, limited_by)
    assert found.fraction == blocks * threads / get_arch(arch).max_threads_per_multiprocessor


@pytest.mark.parametrize("arch", ARCHS)
def test_the_most_shared_memory_a_block_may_ask_for_fits_one_block(tiny: KernelPlan, arch: str) -> None:
    row = get_arch(arch)
    for smem, blocks in ((row.max_smem_per_block, 1), (row.max_smem_per_block + 1, 0)):
        assert blocks_per_multiprocessor(taking(tiny, arch, 128, smem), Resources(64, 0, 0, 0)) == blocks


def test_memory_the_kernel_declares_itself_counts(tiny: KernelPlan) -> None:
    plan = taking(tiny, "sm_80", 128, 81 * 1024)
    assert blocks_per_multiprocessor(plan, Resources(64, 0, 0, 1024)) == 1
