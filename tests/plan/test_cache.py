"""What a plan with a cache has besides the forward kernel."""

from __future__ import annotations

import pytest

from flashgen.plan import plan
from flashgen.plan.model.plans import Problem
from flashgen.spec import AttentionSpec, causal


def spec(cache: str = "paged") -> AttentionSpec:
    return AttentionSpec(128, mask=causal(), direction="forward", cache=cache)  # type: ignore[arg-type]


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_86", "sm_90a", "sm_120"])
@pytest.mark.parametrize("cache", ["contiguous", "paged"])
def test_there_are_kernels_to_append_and_to_combine(arch: str, cache: str) -> None:
    made = plan(AttentionSpec(128, dtype="fp16", direction="forward", cache=cache), None, arch)  # type: ignore[arg-type]
    prefill, decode = ["prefill"] * (arch == "sm_90a"), ["decode"] * (arch != "sm_75")
    roles = ["forward", *prefill, *decode, "append", "combine", "clear_gaps"]
    assert [kernel.role for kernel in made.kernels] == roles
    assert len({kernel.name for kernel in made.kernels}) == len(roles)
    assert ("block_table" in made.kernel("forward").params.names) == (cache == "paged")


def test_each_split_of_the_keys_has_blocks_of_its_own() -> None:
    made, problem = plan(spec(), None, "sm_80"), Problem(3, 8, 2, 100, 4096, splits=5)
    tiles = -(-100 // int(made.kernel("forward").constant("tile_q")))
    assert made.kernel("forward").grid(problem) == (5 * tiles, 8, 3)
    assert made.kernel("combine").grid(problem) == (25, 8, 3)
