"""Launches of kernels that may start before the grid before them ends: what the driver gets, and from whom."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from flashgen.errors import LaunchError
from flashgen.launch.driver import launch_attributes as extended

ROOT = Path(__file__).parents[2]


@pytest.fixture
def hopper(bench: Any) -> Any:
    return bench(64, arch="sm_90a")


def summary(launch: Any) -> tuple[Any, ...]:
    return launch.name, launch.grid, launch.threads, launch.smem_bytes, launch.stream


def in_threads(*works: Any) -> None:
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_a_plan_that_says_so_is_launched_to_overlap_and_others_are_not(hopper: Any, array: Any) -> None:
    x = array(1, 300, 2, 64)
    o, lse = hopper.executor.forward(x, x, x, None, 0x66)
    hopper.executor.backward(x, x, x, x, o, lse, None, 0x77)
    plans = hopper.driver.plans
    found = {launch.name: launch.overlaps for launch in hopper.driver.launches}
    assert found == {name: plans[name].overlaps_predecessor for name in found}
    assert len(found) > 2
    # forward and main; prepare runs after whatever came before.
    assert list(found.values()).count(True) == 2


def test_it_gets_what_a_plain_launch_would(hopper: Any, array: Any) -> None:
    x = array(2, 300, 2, 64)
    for overlaps in (True, False):
        # The driver of before knows of no such grids in a CUDA graph.
        hopper.driver.overlaps_grids = overlaps
        hopper.executor.forward(x, x, x, None, 0x66)
    early, plain = hopper.driver.launches
    assert (early.overlaps, plain.overlaps) == (True, False)
    assert summary(early) == summary(plain)
    kernel = hopper.driver.plans[early.name]
    assert summary(early)[2:] == (kernel.threads, kernel.smem.bytes, 0x66)
    outputs = {"o", "o_map", "lse"}
    for name in kernel.params.names:
        assert name in outputs or early.values[name] == plain.values[name], name


def test_each_launch_goes_to_the_stream_and_the_grid_of_its_call(hopper: Any, array: Any) -> None:
    lengths, streams = (100, 900), (0x10, 0x20, 2, 0x10)
    for stream in streams:
        for length in lengths:
            x = array(1, length, 2, 64)
            hopper.executor.forward(x, x, x, None, stream)
    tile = hopper.driver.plans[hopper.driver.launches[0].name].grid_tile
    expected = [((2 * -(-length // tile), 1, 1), stream) for stream in streams for length in lengths]
    assert [(launch.grid, launch.stream) for launch in hopper.driver.launches] == expected


def test_a_failed_launch_is_reported_as_others_are_and_the_next_one_goes_on(hopper: Any, array: Any) -> None:
    x = array(1, 8, 2, 64, device=1)
    hopper.driver.refuses = True
    with pytest.raises(LaunchError, match=r"launching forward.* failed: error 719"):
        hopper.executor.forward(x, x, x)
    assert hopper.driver.current == [hopper.driver.primary_context(0)]
    hopper.driver.refuses = False
    hopper.executor.forward(x, x, x)
    assert [launch.overlaps for launch in hopper.driver.launches] == [True]


def test_threads_that_launch_at_once_tell_the_driver_apart(hopper: Any, array: Any, monkeypatch: Any) -> None:
    x = array(1, 8, 2, 64)
    hopper.executor.forward(x, x, x)
    inside = threading.Barrier(2)
    seen: list[tuple[int, int]] = []

    def launch(config: Any, function: str, params: int, extra: int) -> tuple[int]:
        # Here the driver reads the config, and other threads run.
        inside.wait(10)
        seen.append((id(config), int(config.hStream)))
        inside.wait(10)
        return (0,)

    monkeypatch.setattr(hopper.driver, "launch_kernel_ex", launch)
    in_threads(*(lambda stream=stream: hopper.executor.forward(x, x, x, None, stream) for stream in (0x10, 0x20)))
    assert len({config for config, _ in seen}) == 2
    assert {stream for _, stream in seen} == {0x10, 0x20}


def test_launch_descriptions_are_made_once_for_a_shape_and_thread(hopper: Any, array: Any, monkeypatch: Any) -> None:
    made: list[Any] = []
    make = extended._config
    monkeypatch.setattr(extended, "_config", lambda api, shape: (made.append(shape), make(api, shape))[1])

    def work() -> None:
        for length in (100, 900):
            x = array(1, length, 2, 64)
            for stream in (0x10, 0x20):
                hopper.executor.forward(x, x, x, None, stream)

    work()
    work()
    assert len(made) == len(set(made)) == 2
    in_threads(work)
    assert len(made) == 4


def test_no_more_is_kept_than_so_many_shapes(hopper: Any, array: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(extended, "_CONFIGS_KEPT", 4)
    configs = hopper.executor.target._configs
    for length in range(100, 2100, 200):
        x = array(1, length, 2, 64)
        hopper.executor.forward(x, x, x)
        assert 1 <= len(configs._made) <= 4


LAUNCH = """
from types import SimpleNamespace
from flashgen.launch.executor import Executor
from flashgen.launch.gpu import GpuTarget
from flashgen.launch.variant import Loadable, Variant
from flashgen.plan import plan, workspaces
from flashgen.spec import AttentionSpec

attention = plan(AttentionSpec(64, dtype="fp16", direction="forward"), None, "sm_90a")
binary = SimpleNamespace(image=b"cubin\\0")
variant = Variant(attention, {k.role: Loadable(k, None, binary) for k in attention.kernels})
executor = Executor(variant, None, GpuTarget(), workspaces)
interface = dict(shape=(1, 300, 2, 64), typestr="<f2", data=(4096, False), version=3)
x = SimpleNamespace(__cuda_array_interface__=interface)
executor.forward(x, x, x, None, 0x99)
"""


@pytest.mark.parametrize("version", [11080, 12020, 12030, 13000])
def test_drivers_that_cannot_capture_such_launches_get_plain_ones(libcuda: Path, version: int) -> None:
    environment = {"LD_LIBRARY_PATH": str(libcuda), "PYTHONPATH": str(ROOT), "DRIVER_VERSION": str(version)}
    command = [sys.executable, "-c", LAUNCH]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("launch")]
    assert " stream 0x99 " in line
    # The attribute for programmatic stream serialization.
    assert line.endswith(" attribute 6 is 1 0 0") == (version >= 12030)
