from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flashgen.arch import get_arch
from flashgen.cli.options import kernel_options
from flashgen.cli.request import Request, parse_window
from flashgen.errors import SpecError
from flashgen.spec import AttentionSpec, BackwardSchedule, Schedule, WarpPartition, causal, window
from flashgen.spec.text.files import dump_spec


def violations(**options: Any) -> tuple[str, ...]:
    with pytest.raises(SpecError) as caught:
        kernel_options(**options)
    return caught.value.violations


def test_options_left_out_leave_the_choice_open() -> None:
    assert kernel_options(head_dim=64) == Request(AttentionSpec(64), None, ())


def test_every_violation_is_listed_at_once() -> None:
    found = violations(
        head_dim=300,
        head_dim_v=-1,
        dtype="int8",
        window=["3"],
        tile_q=7,
        stages=9,
        warps=3,
        backward_tile_kv=8,
        arch=["sm_1", "sm_80"],
    )
    for part in (
        "head_dim=300",
        "head_dim_v=-1",
        "dtype='int8'",
        "--window '3'",
        "tile_q=7",
        "stages=9",
        "warp count=3",
        "backward tile_kv=8",
        "arch='sm_1'",
    ):
        assert sum(line.startswith(part) for line in found) == 1, part
    assert len(found) == 9


def test_a_missing_head_dim_names_both_remedies_and_does_not_hide_other_violations() -> None:
    found = violations(dtype="int8")
    assert found[0] == "--head-dim is missing; give --head-dim N (1 to 256) or --spec FILE.toml"
    assert found[1].startswith("dtype='int8'")
    assert len(found) == 2


def test_a_head_dim_v_of_zero_is_not_taken_for_the_default() -> None:
    assert violations(head_dim=64, head_dim_v=0) == ("head_dim_v=0 is out of range; use a whole number from 1 to 256",)


def test_causal_and_windows_intersect() -> None:
    request = kernel_options(head_dim=64, causal=True, window=["512,-1", "100,7,top-left"])
    assert request.spec.mask == causal() & window(512) & window(100, 7, align="top-left")


@pytest.mark.parametrize("text", ["", "1", "a,b", "1,2,3,4", "1.5,2"])
def test_a_window_that_is_not_two_numbers_is_refused(text: str) -> None:
    with pytest.raises(SpecError, match="LEFT,RIGHT"):
        parse_window(text)


@pytest.mark.parametrize(("text", "part"), [("-2,0", "left=-2"), ("1,2,middle", "align='middle'")])
def test_a_window_with_wrong_parts_names_the_part(text: str, part: str) -> None:
    with pytest.raises(SpecError, match=part):
        parse_window(text)


def test_a_count_of_warps_alone_splits_queries() -> None:
    assert kernel_options(head_dim=64, warps=8).schedule == Schedule(warps=WarpPartition("split_q", 8))


def test_a_partition_alone_takes_four_warps() -> None:
    request = kernel_options(head_dim=64, warp_partition="split-k")
    assert request.schedule == Schedule(warps=WarpPartition("split_k", 4))


def test_consumers_alone_are_specialized_warps_and_those_alone_have_two() -> None:
    three = WarpPartition("specialized", consumers=3)
    assert kernel_options(head_dim=64, consumers=3).schedule == Schedule(warps=three)
    alone = kernel_options(head_dim=64, warp_partition="specialized")
    assert alone.schedule == Schedule(warps=WarpPartition("specialized", consumers=2))


def test_options_for_hopper_make_a_schedule() -> None:
    request = kernel_options(head_dim=64, algorithm="fa3", softmax="running-max", registers="40,232")
    assert request.schedule == Schedule(algorithm="fa3", softmax="running-max", registers=(40, 232))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"warp_partition": "specialized", "warps": 8},
            "--warps 8 does not go with specialized warps; give --consumers N",
        ),
        ({"consumers": 0}, "consumers=0 is not supported; use 1, 2 or 3"),
        ({"warp_partition": "split-k", "consumers": 2}, "consumers=2 belongs to kind='specialized'"),
        ({"registers": "40"}, "registers=(40,) cannot be given to warpgroups"),
        ({"registers": "a,b"}, "--registers 'a,b' is not PRODUCERS,CONSUMERS; write two whole numbers such as 24,240"),
        ({"algorithm": "fa4"}, "algorithm='fa4' is unknown"),
        ({"algorithm": "fa2", "consumers": 2}, "warps.kind='specialized' is fa3's partition, and algorithm='fa2'"),
    ],
)
def test_what_is_wrong_with_options_for_hopper_is_said(options: dict[str, Any], message: str) -> None:
    (found,) = violations(head_dim=64, **options)
    assert message in found


def test_a_repeated_arch_counts_once_and_order_is_kept() -> None:
    request = kernel_options(head_dim=64, arch=["sm_90a", "80", "sm_80"])
    assert request.archs == (get_arch("sm_90a"), get_arch("sm_80"))


def test_options_override_the_schedule_of_a_spec_file(tmp_path: Path) -> None:
    spec, path = AttentionSpec(80, dtype="fp16", mask=causal()), tmp_path / "kernel.toml"
    in_file = Schedule(tile_q=64, tile_kv=32, warps=WarpPartition("split_k", 2), backward=BackwardSchedule(tile_q=32))
    dump_spec(spec, in_file, path)
    assert kernel_options(spec=path) == Request(spec, in_file)
    changed = kernel_options(spec=path, tile_kv=64, warps=4, backward_stages=1)
    assert changed.spec == spec
    assert changed.schedule == Schedule(
        tile_q=64,
        tile_kv=64,
        warps=WarpPartition("split_k", 4),
        backward=BackwardSchedule(tile_q=32, stages=1),
    )


def test_options_override_a_partition_of_a_spec_file_as_a_whole(tmp_path: Path) -> None:
    spec, path = AttentionSpec(128), tmp_path / "kernel.toml"
    dump_spec(spec, Schedule(warps=WarpPartition("specialized", consumers=3), registers=(32, 160)), path)
    fewer = kernel_options(spec=path, consumers=2, registers="40,232").schedule
    assert fewer == Schedule(warps=WarpPartition("specialized", consumers=2), registers=(40, 232))
    same = kernel_options(spec=path, warp_partition="specialized", stages=3).schedule
    assert same == Schedule(stages=3, warps=WarpPartition("specialized", consumers=3), registers=(32, 160))
    dump_spec(spec, Schedule(warps=WarpPartition("specialized", consumers=3)), path)
    other = kernel_options(spec=path, warp_partition="split-q").schedule
    assert other == Schedule(warps=WarpPartition("split_q", 4))


def test_spec_options_beside_a_spec_file_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "kernel.toml"
    dump_spec(AttentionSpec(80), None, path)
    (found,) = violations(spec=path, head_dim=64, causal=True)
    assert "--head-dim, --causal cannot go with --spec" in found


def test_what_is_wrong_with_a_spec_file_and_with_options_is_said_together(tmp_path: Path) -> None:
    path = tmp_path / "kernel.toml"
    path.write_text('head_dim = 0\ndtype = "int8"\n')
    found = violations(spec=path, tile_q=7)
    assert len(found) == 3
    assert sum(str(path) in line for line in found) == 2
