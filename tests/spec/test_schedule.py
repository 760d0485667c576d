from __future__ import annotations

import pytest

from flashgen.errors import SpecError
from flashgen.spec import BackwardSchedule, Schedule, WarpPartition


def test_an_empty_schedule_leaves_everything_to_the_plan():
    schedule = Schedule()
    assert (schedule.tile_q, schedule.tile_kv, schedule.stages, schedule.warps) == (None,) * 4
    assert schedule.backward == BackwardSchedule()


def test_schedules_are_equal_by_value_and_hashable():
    assert len({Schedule(64, warps=WarpPartition("split_q", 4)), Schedule(64, warps=WarpPartition("split_q", 4))}) == 1


@pytest.mark.parametrize("value", [0, 8, 17, 272, 64.0, True, "64"])
def test_tiles_are_multiples_of_16(value):
    for kind, prefix in ((Schedule, ""), (BackwardSchedule, "backward ")):
        with pytest.raises(SpecError) as caught:
            kind(tile_q=value, tile_kv=value, stages=9)
        assert [v.split("=")[0] for v in caught.value.violations] == [
            prefix + name for name in ("tile_q", "tile_kv", "stages")
        ]


@pytest.mark.parametrize("count", [0, 3, 32, True, 4.0, "4", None])
def test_warps_are_a_power_of_two(count):
    with pytest.raises(SpecError, match="warp count="):
        WarpPartition("split_q", count)
    if count is not None:
        with pytest.raises(SpecError, match="backward warps="):
            BackwardSchedule(warps=count)


def test_what_is_no_partition_is_refused():
    with pytest.raises(SpecError) as caught:
        WarpPartition("split_d", 5)
    assert len(caught.value.violations) == 2
    with pytest.raises(SpecError, match=r"(?s)WarpPartition.*BackwardSchedule"):
        Schedule(warps=4, backward=None)
