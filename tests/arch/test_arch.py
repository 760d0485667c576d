from __future__ import annotations

import pytest

from flashgen.arch import ARCHS, arch_for_capability, get_arch
from flashgen.errors import PlanError


@pytest.mark.parametrize("name", list(ARCHS))
def test_rows_are_consistent(name):
    row = ARCHS[name]
    assert row.name == name
    assert row.max_smem_per_block <= row.smem_per_multiprocessor
    assert row.max_threads_per_multiprocessor % 32 == 0
    assert row.has_cp_async == row.has_bf16 == (row.capability >= 80)
    assert row.runs_on(row.capability)
    assert row.major == row.capability // 10
    # wgmma is an instruction of one generation, and its name is the only one that the assembler takes it for.
    assert row.has_wgmma == (name == "sm_90a")


@pytest.mark.parametrize("spelling", ["sm_80", "SM_80", " sm80", "80", 80, "8.0", 8.0, ARCHS["sm_80"]])
def test_one_row_has_many_spellings(spelling):
    assert get_arch(spelling) is ARCHS["sm_80"]


@pytest.mark.parametrize("name", ["sm_70", "", "ampere", "compute_80", None, "sm_8.0.0"])
def test_an_unknown_name_lists_the_known_ones(name):
    with pytest.raises(PlanError, match=r"sm_75.*sm_120"):
        get_arch(name)


@pytest.mark.parametrize(
    ("capability", "name"),
    [
        (75, "sm_75"),
        (80, "sm_80"),
        (86, "sm_86"),
        (87, "sm_87"),
        (88, "sm_87"),
        (89, "sm_89"),
        (90, "sm_90a"),
        (100, "sm_100"),
        (101, "sm_100"),
        (103, "sm_103"),
        (120, "sm_120"),
        (121, "sm_120"),
    ],
)
def test_a_device_gets_the_newest_row_that_runs_on_it(capability, name):
    assert arch_for_capability(capability).name == name


def test_a_device_gets_a_row_of_its_own_only_where_kernels_gain_from_it():
    for row in ARCHS.values():
        if row.is_specific:
            assert (arch_for_capability(row.capability) is row) == row.has_wgmma


@pytest.mark.parametrize("capability", [70, 61, 110])
def test_a_device_without_a_row_is_refused_by_its_number(capability):
    with pytest.raises(PlanError, match=rf"{capability // 10}\.{capability % 10} is not supported"):
        arch_for_capability(capability)


def test_cubins_run_within_their_major_capability_only():
    assert get_arch("sm_80").runs_on(86)
    assert not get_arch("sm_86").runs_on(80)
    assert not get_arch("sm_80").runs_on(90)
    assert get_arch("sm_90a").runs_on(90)
    assert not get_arch("sm_100a").runs_on(103)


@pytest.mark.parametrize(
    ("product", "name"),
    [
        ("h100", "sm_90a"),
        ("NVIDIA H100 80GB HBM3", "sm_90a"),
        ("H200", "sm_90a"),
        ("hopper", "sm_90a"),
        ("a100", "sm_80"),
        ("A100-SXM4-80GB", "sm_80"),
        ("a10g", "sm_86"),
        ("NVIDIA GeForce RTX 3060 Ti", "sm_86"),
        ("orin", "sm_87"),
        ("l4", "sm_89"),
        ("l40s", "sm_89"),
        ("4090", "sm_89"),
        ("rtx-4070-ti-super", "sm_89"),
        ("b200", "sm_100"),
        ("gb300", "sm_103"),
        ("rtx5090", "sm_120"),
        ("Tesla T4", "sm_75"),
        ("2080ti", "sm_75"),
    ],
)
def test_the_name_of_a_gpu_suggests_its_architecture(product, name):
    with pytest.raises(PlanError, match=rf"is not known; use arch='{name}' for that GPU, or one of sm_75"):
        get_arch(product)


@pytest.mark.parametrize("product", ["h900", "4091", "a", "", "sm_91", "nvidia", "80gb"])
def test_other_names_suggest_none(product):
    with pytest.raises(PlanError, match="is not known; use one of sm_75"):
        get_arch(product)
