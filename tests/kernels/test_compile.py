"""Every kernel, for every architecture: it compiles, nothing spills, and as many blocks fit as the plan meant.

A sample that is quick, of which a developer's run takes every fifth build, and DRAWN_CASES=ci all;
``benchmarks/compile_matrix.py`` compiles every combination.
"""

from __future__ import annotations

from itertools import cycle

import pytest

import flashgen as fg
from flashgen.arch import ARCHS
from flashgen.cache import default_cache
from flashgen.compile import Binary, blocks_per_multiprocessor, compile_source
from flashgen.plan import plan
from flashgen.plan.model.plans import KernelPlan
from flashgen.render import render
from tests.drawn import some

pytestmark = pytest.mark.in_turns(12)

#: Each arch gets the next of these: in the end every dtype, mask and kind of head dim has been everywhere.
SPECS = cycle(
    [
        fg.AttentionSpec(64, dtype="fp16", mask=fg.causal()),
        fg.AttentionSpec(128, dtype="fp16"),
        fg.AttentionSpec(40, dtype="fp16", mask=fg.window(100, 0)),
        fg.AttentionSpec(96, dtype="fp16", mask=fg.causal()),
        fg.AttentionSpec(64, dtype="fp32", mask=fg.causal()),
        fg.AttentionSpec(128, dtype="fp16", mask=fg.causal()),
        fg.AttentionSpec(80, head_dim_v=64, dtype="fp16", mask=fg.causal("top-left")),
    ]
)
BF16_SPECS = cycle(
    [
        fg.AttentionSpec(128, mask=fg.causal()),
        fg.AttentionSpec(64),
        fg.AttentionSpec(96, mask=fg.window(64, 64)),
        fg.AttentionSpec(128),
        fg.AttentionSpec(64, mask=fg.causal()),
    ]
)
DETERMINISTIC = cycle(
    [
        fg.AttentionSpec(64, dtype="fp16", mask=fg.causal(), deterministic=True),
        fg.AttentionSpec(128, dtype="fp16", deterministic=True),
        fg.AttentionSpec(32, dtype="fp32", deterministic=True),
        fg.AttentionSpec(128, dtype="fp16", mask=fg.causal(), deterministic=True),
    ]
)


def builds() -> dict[str, tuple[fg.AttentionSpec, fg.Schedule | None, str]]:
    """Per architecture: both passes, a deterministic backward, both passes in bf16, and the other partition."""
    found: dict[str, tuple[fg.AttentionSpec, fg.Schedule | None, str]] = {}
    for name, arch in ARCHS.items():
        dtype = "bf16" if arch.has_bf16 else "fp16"
        split_k = fg.AttentionSpec(64, dtype=dtype, mask=fg.causal(), direction="forward")
        chosen = [(next(SPECS), None), (next(DETERMINISTIC), None)]
        chosen += [(next(BF16_SPECS), None)] if arch.has_bf16 else []
        chosen += [(split_k, fg.Schedule(warps=fg.WarpPartition("split_k", 4)))]
        for spec, schedule in chosen:
            label = "split_k" if schedule else spec.describe()
            found[f"{name} {label}"] = (spec, schedule, name)
    return found


BUILDS = builds()
DONE = some(BUILDS, *list(BUILDS)[::11])


def compiled(kernel: KernelPlan) -> Binary:
    return default_cache().get_or_compile(render(kernel), compile_source)[0]


@pytest.mark.parametrize("name", DONE)
def test_kernels_compile_and_keep_to_their_registers(name: str) -> None:
    spec, schedule, arch = BUILDS[name]
    for kernel in plan(spec, schedule, arch).kernels:
        if kernel.role in ("forward", "prepare") and spec.deterministic:
            continue  # as without
        binary = compiled(kernel)
        found = binary.resources
        assert binary.image.startswith(b"\x7fELF")
        assert (found.spill_bytes, found.stack_bytes) <= (0, careful_stack(kernel)), kernel.name
        assert found.static_smem_bytes == 0, kernel.name
        meant = 2 if any("two blocks" in reason for reason in kernel.reasons) else 1
        assert blocks_per_multiprocessor(kernel, found) >= meant, f"{kernel.name}: {found}"


def careful_stack(kernel: KernelPlan) -> int:
    """Bytes of O and P, which multiply_careful indexes at run time: with a mask V may hold what no row may see."""
    if kernel.template != "hopper/forward.cu.j2" or kernel.spec.mask.is_full:
        return 0
    return 4 * (int(kernel.constant("head_dim_v")) // 2 + int(kernel.constant("tile_kv")) // 4)


def test_the_sample_has_every_kernel_on_every_arch() -> None:
    roles: dict[str, set[str]] = {arch: set() for arch in ARCHS}
    for spec, schedule, arch in BUILDS.values():
        roles[arch] |= {k.role for k in plan(spec, schedule, arch).kernels}
    everywhere = {"forward", "prepare", "main", "query", "finish"}
    assert {arch: found - everywhere for arch, found in roles.items() if found != everywhere} == {"sm_90a": {"repair"}}
    everything = {(spec.dtype, spec.mask.is_full) for spec, _, _ in BUILDS.values()}
    assert everything >= {("fp16", True), ("fp16", False), ("bf16", True), ("bf16", False), ("fp32", False)}


NARROW = [("sm_75", 2), ("sm_80", 4), ("sm_75", 8), ("sm_80", 2), ("sm_75", 4), ("sm_80", 8)]


@pytest.mark.parametrize(("arch", "access"), some(NARROW, *NARROW[:2]))
def test_kernels_for_narrow_accesses_compile(arch: str, access: int) -> None:
    """What unaligned views need; nothing is said of their registers."""
    spec = fg.AttentionSpec(64, dtype="fp16", mask=fg.causal())
    made = plan(spec, None, arch, access_bytes=access)
    for role in ("forward", "main") if access == 4 else ("forward",):
        assert compiled(made.kernel(role)).image.startswith(b"\x7fELF")
