"""The tiles of the latent kernel, what no kernel takes, and the teams of its blocks."""

from __future__ import annotations

from typing import Any

import pytest

from flashgen.arch import ARCHS, get_arch
from flashgen.errors import PlanError
from flashgen.plan import plan
from flashgen.plan.decode.latent import latent_tiles
from flashgen.plan.decode.parts import partial_count, team_size
from flashgen.plan.model.plans import KernelPlan, Problem
from flashgen.spec import AttentionSpec, Schedule, causal

DIMS = ((64, 512), (64, 448), (16, 64), (32, 192), (48, 256))


def spec(dim: int = 64, dim_v: int = 512, **fields: Any) -> AttentionSpec:
    given: dict[str, Any] = {"mask": causal(), "direction": "forward", "cache": "paged", "qv": True, **fields}
    return AttentionSpec(dim, head_dim_v=dim_v, **given)


def latent(arch: str = "sm_90a", **fields: Any) -> KernelPlan:
    return plan(spec(**fields), None, arch).kernel("decode")


@pytest.mark.parametrize("arch", [name for name in ARCHS if name != "sm_75"])
@pytest.mark.parametrize(("dim", "dim_v"), DIMS)
def test_every_gpu_has_tiles_that_fit_with_copies_under_way(dim: int, dim_v: int, arch: str) -> None:
    made, row = plan(spec(dim, dim_v), None, arch).kernel("decode"), get_arch(arch)
    tiles = latent_tiles(made.spec, row)
    assert made.smem.bytes <= row.max_smem_per_block
    assert tiles.stages >= 2
    # O takes half of a thread's registers at most, and each warp has whole pairs of blocks of its columns.
    assert tiles.rows * dim_v // (32 * tiles.warps) <= 128
    assert dim_v % (16 * tiles.warps) == 0
    # Scores of 16 rows and of at least eight keys for each warp.
    assert tiles.keys // tiles.key_warps % 8 == 0


@pytest.mark.parametrize(("arch", "rows", "keys"), [("sm_80", 64, 32), ("sm_90a", 64, 64), ("sm_120", 32, 16)])
def test_a_key_is_read_once_for_64_heads_where_shared_memory_is_large(arch: str, rows: int, keys: int) -> None:
    tiles = latent_tiles(spec(), get_arch(arch))
    assert (tiles.rows, tiles.keys) == (rows, keys)


@pytest.mark.parametrize(("dim", "dim_v"), [(64, 512), (32, 128), (16, 256), (48, 384)])
def test_hoppers_kernel_holds_two_tiles_beside_the_queries(dim: int, dim_v: int) -> None:
    made = plan(spec(dim, dim_v), None, "sm_90a").kernel("decode")
    assert made.template == "hopper/latent.cu.j2"
    assert made.smem.bytes <= made.arch.max_smem_per_block
    # Each warpgroup has half of O, beside which scores need registers.
    assert int(made.constant("tile_q")) * dim_v // 256 <= 128
    assert [box.rows for box in made.boxes] == [made.constant("tile_kv")] * 2


@pytest.mark.parametrize(
    ("fields", "access", "words"),
    [
        ({"dim_v": 448}, 16, "head_dim_v must be a multiple of 128, and it is 448"),
        ({}, 8, "TMA needs tensors aligned to 16 bytes"),
    ],
)
def test_the_portable_kernel_says_why_hoppers_does_not_run(fields: Any, access: int, words: str) -> None:
    made = plan(spec(**fields), None, "sm_90a", access_bytes=access).kernel("decode")
    assert made.template == "decode/latent.cu.j2"
    assert any(reason.startswith("not by wgmma and TMA: ") and words in reason for reason in made.reasons)
    assert not any("wgmma" in reason for reason in plan(spec(), None, "sm_80").kernel("decode").reasons)


def test_kernels_that_only_move_rows_use_no_tma() -> None:
    kernels = plan(spec(), None, "sm_90a").kernels
    assert [bool(kernel.boxes) for kernel in kernels] == [True, False, False]
    assert [kernel.overlaps_predecessor for kernel in kernels] == [True, False, False]


def test_one_kernel_takes_all_calls() -> None:
    made = plan(spec(), None, "sm_90a")
    assert [kernel.role for kernel in made.kernels] == ["decode", "append", "clear_gaps"]
    assert made.forward is made.kernel("decode")


@pytest.mark.parametrize(
    ("fields", "arguments", "words"),
    [
        (
            {"dtype": "fp16"},
            {"arch": "sm_75"},
            "needs asynchronous copies of sm_80 or later, and arch='sm_75' has none",
        ),
        ({}, {"schedule": Schedule(tile_kv=32)}, "qv=True has one schedule; leave the schedule out"),
        ({}, {"access_bytes": 2}, "needs rows aligned to 4 bytes, and access_bytes=2; pass contiguous arrays"),
    ],
)
def test_what_no_kernel_takes_is_refused(fields: Any, arguments: Any, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        plan(spec(**fields), **{"arch": "sm_80", **arguments})


#: By the number of tiles of rows of a sequence, on 132 multiprocessors.
TEAMS = {1: 1, 2: 2, 3: 3, 4: 4, 5: 3, 6: 3, 7: 4, 8: 4, 9: 3, 40: 4}


@pytest.mark.parametrize("tiles", TEAMS)
def test_blocks_with_the_same_keys_form_a_team_that_has_rows_for_most_of_them(tiles: int) -> None:
    assert team_size(latent(), Problem(4, 64, 1, tiles, 8192), 132) == TEAMS[tiles]


def test_a_team_has_no_more_blocks_than_the_grid() -> None:
    kernel, problem = latent(), Problem(1, 64, 1, 8, 100)
    assert [team_size(kernel, problem, blocks) for blocks in (1, 2, 132)] == [1, 2, 4]


def test_kernels_whose_tiles_hold_all_heads_of_a_group_have_no_teams() -> None:
    made = plan(AttentionSpec(128, cache="paged", direction="forward"), None, "sm_90a").kernel("decode")
    assert team_size(made, Problem(4, 64, 1, 8, 8192), 132) == 1


def test_each_part_of_each_member_has_a_slot() -> None:
    # Five tiles of rows are two rounds of a team of three: six members, for each of four sequences and four parts.
    assert partial_count(latent(), Problem(4, 64, 1, 5, 64 * 16), 4, blocks=132) == 4 * 6 * 4
    assert partial_count(latent(), Problem(4, 64, 1, 5, 64 * 16), 0, blocks=132) == 264
