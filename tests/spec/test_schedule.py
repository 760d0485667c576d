from __future__ import annotations

import pytest

from flashgen.errors import SpecError
from flashgen.spec import BackwardSchedule, Schedule, WarpPartition


def test_an_empty_schedule_leaves_everything_to_the_plan():
    schedule = Schedule()
    assert (schedule.tile_q, schedule.tile_kv, schedule.stages, schedule.warps) == (None,) * 4
    assert schedule.backward == BackwardSchedule()


def test_a_specialized_partition_counts_its_warps():
    partition = WarpPartition("specialized", producers=1, consumers=2)
    assert (partition.count, partition.warps) == (12, 12)
    same = (WarpPartition("specialized", consumers=2), WarpPartition("specialized", 12, consumers=2))
    assert {*same} == {partition}
    assert WarpPartition("specialized", consumers=3).warps == 16


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


@pytest.mark.parametrize("count", [0, 3, 32, True, 4.0, "4"])
def test_warps_are_a_power_of_two(count):
    with pytest.raises(SpecError, match="warp count="):
        WarpPartition("split_q", count)
    with pytest.raises(SpecError, match="backward warps="):
        BackwardSchedule(warps=count)


def test_a_partition_has_defaults_for_what_is_left_out():
    assert WarpPartition("split_k") == WarpPartition("split_k", 4)
    assert WarpPartition("specialized") == WarpPartition("specialized", consumers=2)


def test_what_is_no_partition_is_refused():
    with pytest.raises(SpecError) as caught:
        WarpPartition("split_d", 5)
    assert len(caught.value.violations) == 2
    with pytest.raises(SpecError, match=r"(?s)WarpPartition.*BackwardSchedule"):
        Schedule(warps=4, backward=None)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"consumers": 4}, r"consumers=4 is not supported; use 1, 2 or 3"),
        ({"consumers": True}, r"consumers=True is not supported; use 1, 2 or 3"),
        ({"consumers": 2, "producers": 2}, r"producers=2 is not supported; use 1"),
        ({"consumers": 2, "producers": True}, r"producers=True is not supported; use 1"),
        ({"consumers": 2, "count": 8}, r"warp count=8 is not that of 1 producer and 2 consumers; leave it out"),
    ],
)
def test_a_specialized_partition_says_what_it_cannot_be(fields, message):
    with pytest.raises(SpecError, match=message):
        WarpPartition("specialized", **fields)


@pytest.mark.parametrize("kind", ["split_q", "split_k"])
def test_other_partitions_have_no_producers_and_consumers(kind):
    with pytest.raises(SpecError) as caught:
        WarpPartition(kind, 4, producers=1, consumers=2)
    assert [v.split(";")[0] for v in caught.value.violations] == [
        f"warp partition {name}={n} belongs to kind='specialized', not to '{kind}'"
        for name, n in (("producers", 1), ("consumers", 2))
    ]


SPECIALIZED = WarpPartition("specialized", consumers=2)
SPLIT_Q = WarpPartition("split_q", 4)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"algorithm": "fa4"}, "algorithm='fa4' is unknown; use one of standard, naive, fa1, grid1d, grid2d, fa2, fa3"),
        ({"algorithm": []}, "algorithm=[] is unknown; use one of standard, naive, fa1, grid1d, grid2d, fa2, fa3"),
        ({"softmax": "running_max"}, "softmax='running_max' is unknown; use 'reference-max' or 'running-max'"),
        ({"registers": 168}, "registers=168 cannot be given to warpgroups; use two multiples of 8"),
        ({"registers": (24, 236)}, "registers=(24, 236) cannot be given to warpgroups"),
        ({"registers": (16, 240)}, "registers=(16, 240) cannot be given to warpgroups"),
        ({"registers": (24, 248)}, "registers=(24, 248) cannot be given to warpgroups"),
        ({"registers": (24.0, 240)}, "registers=(24.0, 240) cannot be given to warpgroups"),
        ({"registers": [24, 240]}, "registers=[24, 240] cannot be given to warpgroups"),
        ({"algorithm": "fa2", "warps": SPECIALIZED}, "warps.kind='specialized' is fa3's partition"),
        ({"algorithm": "fa3", "warps": SPLIT_Q}, "is no partition of algorithm='fa3'; use WarpPartition('specialized'"),
        (
            {"algorithm": "fa2", "softmax": "reference-max"},
            "softmax='reference-max' belongs to algorithm='fa3'; leave it out",
        ),
        ({"warps": SPLIT_Q, "registers": (24, 240)}, "registers=(24, 240) belongs to algorithm='fa3'; leave it out"),
    ],
)
def test_what_does_not_go_together_is_said_with_its_remedy(fields, message):
    with pytest.raises(SpecError) as caught:
        Schedule(**fields)
    (violation,) = caught.value.violations
    assert message in violation


def test_what_belongs_to_hopper_may_be_said_without_its_algorithm():
    Schedule(softmax="running-max", registers=(40, 232))
    Schedule(warps=SPECIALIZED, softmax="reference-max")
    Schedule(algorithm="fa3", warps=SPECIALIZED, registers=(24, 240))
    Schedule(algorithm="fa2", warps=SPLIT_Q)
