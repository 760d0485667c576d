from __future__ import annotations

import shlex
from typing import Any

import pytest
import typer
from hypothesis import given, settings
from hypothesis import strategies as st

from flashgen.arch import ARCHS, get_arch
from flashgen.cli.options import with_kernel_options
from flashgen.cli.request import Request
from flashgen.spec import AttentionSpec, BackwardSchedule, Schedule, WarpPartition, causal, full, window
from flashgen.spec.text.command import rebuild_command


def parse(command: str) -> Request:
    """The request that the command line's words make, by the very options the CLI declares."""
    words = shlex.split(command)
    assert words[:2] == ["flashgen", "build"]
    seen: list[Request] = []
    app = typer.Typer(add_completion=False)

    @app.command()
    @with_kernel_options
    def build(request: Request) -> None:
        seen.append(request)

    app(words[2:], standalone_mode=False)
    return seen[0]


def band(align: str) -> st.SearchStrategy[Any]:
    side = st.none() | st.integers(0, 10**6)
    return st.builds(lambda left, right: window(left, right, align=align), side, side)  # type: ignore[arg-type]


specs = (
    st.builds(
        AttentionSpec,
        st.integers(1, 256),
        head_dim_v=st.integers(1, 256),
        dtype=st.sampled_from(["fp16", "bf16", "fp32"]),
        mask=st.builds(lambda a, b: a & b, band("bottom-right"), band("top-left")) | st.just(causal()),
        direction=st.sampled_from(["forward", "both"]),
        deterministic=st.booleans(),
        dropout=st.booleans(),
        varlen=st.booleans(),
    )
    | st.builds(
        AttentionSpec,
        st.integers(1, 256),
        direction=st.just("forward"),
        cache=st.sampled_from(["contiguous", "paged"]),
    )
    | st.builds(
        AttentionSpec,
        st.integers(1, 64).map(lambda n: 4 * n),
        direction=st.just("forward"),
        cache=st.just("paged"),
        dtype=st.sampled_from(["bf16", "e4m3"]),
        cache_dtype=st.sampled_from(["e4m3", "e5m2"]),
        page_scales=st.booleans(),
    )
    | st.builds(
        AttentionSpec,
        st.integers(1, 4).map(lambda n: 16 * n),
        head_dim_v=st.integers(1, 8).map(lambda n: 64 * n),
        direction=st.just("forward"),
        cache=st.sampled_from(["contiguous", "paged"]),
        qv=st.just(True),
    )
    | st.builds(
        AttentionSpec,
        st.integers(1, 16).map(lambda n: 16 * n),
        dtype=st.just("e4m3"),
        direction=st.just("forward"),
        out_dtype=st.sampled_from([None, "bf16", "fp16"]),
        scale_block=st.sampled_from([None, 64, 128]),
        varlen=st.booleans(),
    )
)
tiles = st.none() | st.integers(1, 16).map(lambda n: 16 * n)
stages = st.none() | st.integers(1, 4)
counts = st.sampled_from([1, 2, 4, 8, 16])
backward = st.builds(BackwardSchedule, tile_q=tiles, tile_kv=tiles, stages=stages, warps=st.none() | counts)
schedules = st.builds(
    Schedule,
    tile_q=tiles,
    tile_kv=tiles,
    stages=stages,
    warps=st.none() | st.builds(WarpPartition, st.sampled_from(["split_q", "split_k"]), counts),
    backward=backward,
    algorithm=st.none() | st.just("fa2"),
) | st.builds(
    Schedule,
    tile_q=tiles,
    tile_kv=tiles,
    stages=stages,
    warps=st.none() | st.builds(WarpPartition, st.just("specialized"), consumers=st.integers(1, 3)),
    backward=backward,
    algorithm=st.none() | st.just("fa3"),
    softmax=st.sampled_from([None, "reference-max", "running-max"]),
    registers=st.none() | st.tuples(st.integers(3, 30), st.integers(3, 30)).map(lambda n: (8 * n[0], 8 * n[1])),
)


@settings(deadline=None)
@given(specs, schedules, st.sampled_from(sorted(ARCHS)))
def test_the_command_gives_the_same_spec_schedule_and_arch_again(
    spec: AttentionSpec, schedule: Schedule, arch: str
) -> None:
    request = parse(rebuild_command(spec, schedule, arch))
    assert request.spec == spec
    assert (request.schedule or Schedule()) == schedule
    assert request.archs == (get_arch(arch),)


@pytest.mark.parametrize(
    ("spec", "command"),
    [
        (AttentionSpec(128, mask=causal()), "flashgen build --head-dim 128 --dtype bf16 --causal"),
        (
            AttentionSpec(64, head_dim_v=40, dtype="fp16", mask=full(), direction="forward"),
            "flashgen build --head-dim 64 --head-dim-v 40 --dtype fp16 --forward-only",
        ),
        (
            AttentionSpec(64, mask=window(512, 0) & causal(align="top-left"), deterministic=True),
            "flashgen build --head-dim 64 --dtype bf16 --window 512,0 --window -1,0,top-left --deterministic",
        ),
    ],
)
def test_the_command_reads_well(spec: AttentionSpec, command: str) -> None:
    assert rebuild_command(spec) == command
    assert parse(command) == Request(spec)


def test_a_schedule_for_hopper_reads_well() -> None:
    partition = WarpPartition("specialized", consumers=2)
    schedule = Schedule(128, 64, 2, partition, algorithm="fa3", softmax="running-max", registers=(40, 232))
    command = rebuild_command(AttentionSpec(64), schedule, "sm_90a")
    assert command == (
        "flashgen build --head-dim 64 --dtype bf16 --tile-q 128 --tile-kv 64 --stages 2 --consumers 2 "
        "--warp-partition specialized --algorithm fa3 --softmax running-max --registers 40,232 --arch sm_90a"
    )
    assert shlex.join(shlex.split(command)) == command


def test_the_command_is_safe_to_paste_into_a_shell() -> None:
    spec = AttentionSpec(64, mask=window(3, 4) & window(5, None, align="top-left"))
    command = rebuild_command(spec, Schedule(tile_q=64, warps=WarpPartition("split_k", 4)), "sm_90a")
    assert shlex.join(shlex.split(command)) == command
