"""Every function of ptx/barrier.cuh and ptx/bulk.cuh assembles on Hopper; older GPUs are none the worse for them."""

from __future__ import annotations

import re

import pytest

from flashgen.compile import nvrtc
from flashgen.compile.options import options_for
from flashgen.plan import plan
from flashgen.render import render
from flashgen.render.amalgamation.amalgamate import amalgamate
from flashgen.render.paths import include_dir
from flashgen.render.source import Origin
from flashgen.spec import AttentionSpec

FUNCTION = re.compile(r"(template <int pending>\n)?FLASHGEN_DEVICE \w+ (\w+)\(([^)]*)\)")
ARGUMENTS = {
    "const TensorMap*": "&p.map",
    "const void*": "p.data",
    "void*": "p.data",
    "float*": "p.data",
    "u32": "p.word",
    "u16": "static_cast<u16>(p.word)",
    "i32": "static_cast<i32>(p.word)",
    "bool": "p.word != 0",
}
#: The barrier's number and its threads should be known to the compiler.
NAMED = {"named_barrier_sync": "3, 64", "named_barrier_arrive": "5, 96", "named_barrier_any": "4, 64, p.word != 0"}
#: A part of the instruction that each function stands for.
INSTRUCTIONS = {
    "named_barrier_sync": "bar.sync",
    "named_barrier_arrive": "bar.arrive",
    "named_barrier_any": "barrier.cta.red.or.pred.aligned",
    "mbarrier_init": "mbarrier.init.",
    "mbarrier_invalidate": "mbarrier.inval.",
    "mbarrier_arrive": "mbarrier.arrive.shared::cta.b64",
    "mbarrier_arrive_cluster": "mbarrier.arrive.release.cluster.shared::cluster.b64",
    "mbarrier_expect_tx": "mbarrier.expect_tx.",
    "mbarrier_arrive_expect_tx": "mbarrier.arrive.expect_tx.",
    "mbarrier_try_wait": "mbarrier.try_wait.parity.shared::cta",
    "mbarrier_test_wait": "mbarrier.test_wait.parity.shared::cta",
    "mbarrier_try_wait_cluster": "mbarrier.try_wait.parity.acquire.cluster",
    "mbarrier_wait": "mbarrier.try_wait.parity.shared::cta",
    "mbarrier_wait_cluster": "mbarrier.try_wait.parity.acquire.cluster",
    "fence_mbarrier_init": "fence.mbarrier_init.release.cluster",
    "fence_proxy_async": "fence.proxy.async;",
    "fence_proxy_async_shared": "fence.proxy.async.shared::cta",
    "fence_proxy_async_global": "fence.proxy.async.global",
    "prefetch_tensormap": "prefetch.tensormap",
    "bulk_load": "cp.async.bulk.shared::cluster.global.mbarrier",
    "bulk_store": "cp.async.bulk.global.shared::cta.bulk_group",
    "bulk_reduce_add": "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32",
    "bulk_commit": "cp.async.bulk.commit_group",
    "bulk_wait": "cp.async.bulk.wait_group 1",
    "bulk_wait_read": "cp.async.bulk.wait_group.read 1",
    **{f"tma_load_{r}d": f"cp.async.bulk.tensor.{r}d.shared::cluster.global.mbarrier" for r in range(2, 6)},
    **{f"tma_load_{r}d_multicast": "complete_tx::bytes.multicast::cluster" for r in range(2, 6)},
    **{f"tma_store_{r}d": f"cp.async.bulk.tensor.{r}d.global.shared::cta.bulk_group" for r in range(2, 6)},
    **{f"tma_reduce_add_{r}d": f"cp.reduce.async.bulk.tensor.{r}d.global.shared::cta.add" for r in range(2, 6)},
}


def functions() -> dict[str, str]:
    """A call of each function."""
    found = {}
    for header in ("barrier.cuh", "bulk.cuh"):
        text = (include_dir() / "flashgen" / "ptx" / header).read_text()
        for template, name, parameters in FUNCTION.findall(text):
            kinds = [re.sub(r"\s*\b\w+$", "", p.strip()) for p in parameters.split(",") if p.strip()]
            arguments = NAMED.get(name) or ", ".join(ARGUMENTS[kind] for kind in kinds)
            found[name] = f"{name}{'<1>' if template else ''}({arguments});"
    return found


def source(body: str) -> str:
    text = f"""#include "flashgen/primitives_sm90.cuh"
using namespace flashgen;
struct Params {{ TensorMap map; float* data; u32 word; }};
FLASHGEN_KERNEL(128, 1) k(FLASHGEN_GRID_CONSTANT Params p) {{
{body}
}}"""
    lines = [(line, Origin("test.cu", number)) for number, line in enumerate(text.splitlines(), 1)]
    return "\n".join(line for line, _ in amalgamate(lines))


@pytest.mark.parametrize("arch", ["sm_90", "sm_90a"])
def test_every_function_becomes_its_instruction(arch: str) -> None:
    calls = functions()
    assert set(calls) == set(INSTRUCTIONS)
    result = nvrtc.run(source("\n".join(calls.values())), "k.cu", options_for(arch))
    assert result.succeeded, result.log
    for name, instruction in INSTRUCTIONS.items():
        assert instruction in result.ptx, name
    assert "used 6 barriers" in result.log, "barriers whose number is known are counted, not all sixteen reserved"
    assert "0 bytes stack frame" in result.log


@pytest.mark.parametrize("name", [n for n in INSTRUCTIONS if n not in NAMED])
def test_a_function_that_an_older_gpu_lacks_breaks_only_kernels_that_call_it(name: str) -> None:
    result = nvrtc.run(source(functions()[name]), "k.cu", options_for("sm_80"))
    # Ampere has mbarriers, but neither their byte counts nor waits that sleep.
    older = name in ("mbarrier_init", "mbarrier_invalidate", "mbarrier_arrive", "mbarrier_test_wait")
    assert result.succeeded == older, result.log


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_120"])
def test_headers_alone_compile_everywhere(arch: str) -> None:
    result = nvrtc.run(source("p.data[0] = 1.0f;"), "k.cu", options_for(arch))
    assert result.succeeded, result.log


def test_kernels_of_older_gpus_do_not_carry_them() -> None:
    spec = AttentionSpec(64, dtype="fp16", direction="forward")
    assert "mbarrier" not in render(plan(spec, None, "sm_80").kernel("forward")).text
