"""Plans for 8-bit queries, keys and values: where they exist, and what the errors say where they do not."""

from __future__ import annotations

from typing import Any

import pytest

import flashgen as fg
from flashgen.arch import ARCHS
from flashgen.plan import plan
from flashgen.plan.model.params import INPUT_SCALES


def spec(dim: int = 64, **fields: Any) -> fg.AttentionSpec:
    return fg.AttentionSpec(dim, **{"dtype": "e4m3", "direction": "forward", **fields})


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_86", "sm_87"])
def test_older_gpus_are_refused_in_a_sentence_that_names_the_remedy(arch: str) -> None:
    with pytest.raises(fg.PlanError) as caught:
        plan(spec(), None, arch)
    assert str(caught.value) == (
        f"dtype='e4m3' needs tensor cores of sm_89 or later, and arch={arch!r} has none for it; "
        "use dtype='bf16' or 'fp16'."
    )


@pytest.mark.parametrize("arch", [name for name, row in ARCHS.items() if row.multiplies_eight_bits])
@pytest.mark.parametrize("block", [None, 64, 128])
def test_every_head_dimension_has_a_plan_from_sm_89_on(arch: str, block: int | None) -> None:
    for dim in range(16, 257, 16):
        made = plan(spec(dim, scale_block=block, mask=fg.causal()), None, arch)
        assert set(INPUT_SCALES) <= set(made.kernel("forward").params.names)


@pytest.mark.parametrize(
    ("schedule", "fields", "words"),
    [
        (fg.Schedule(tile_kv=48), {}, "gives each warp 48 keys, which must be a multiple of 32; use tile_kv=32"),
        (
            fg.Schedule(tile_kv=128),
            {"scale_block": 64},
            "gives each warp 128 keys, which must divide scale_block=64; use smaller tiles",
        ),
        (fg.Schedule(algorithm="naive"), {}, "its queries, keys and values have 16 or 32 bits"),
    ],
)
def test_schedules_that_do_not_fit_are_refused(schedule: fg.Schedule, fields: Any, words: str) -> None:
    with pytest.raises(fg.PlanError, match=words):
        plan(spec(**fields), schedule, "sm_89")


@pytest.mark.parametrize("access", [1, 2, 4, 8])
def test_less_aligned_arrays_have_a_plan(access: int) -> None:
    for dim in (16, 128, 256):
        assert plan(spec(dim), None, "sm_89", access_bytes=access).access_bytes == access


def test_specs_that_differ_have_kernels_of_other_names() -> None:
    specs = [spec(), spec(out_dtype="fp16"), spec(scale_block=64), spec(scale_block=128), spec(varlen=True)]
    names = [plan(each, None, "sm_89").kernel("forward").name for each in specs]
    assert len(set(names)) == len(specs)
    assert names[0] == "forward_d64_e4m3_sm89"
    assert names[2] == "forward_d64_e4m3_scales64_sm89"
