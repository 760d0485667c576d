"""``CudaDriver`` through the real cuda.bindings, over a libcuda that only records calls."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(name="library")
def library_fixture(libcuda: Path) -> Path:
    return libcuda


def run(library: Path, code: str) -> list[str]:
    environment = os.environ | {"LD_LIBRARY_PATH": str(library), "PYTHONPATH": str(ROOT)}
    prelude = "from flashgen.launch.driver.cuda import CudaDriver, current_device, get_driver\nd = get_driver()\n"
    done = subprocess.run([sys.executable, "-u", "-c", prelude + code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    # The fake writes through C's buffer, so its lines may come after Python's.
    return done.stdout.splitlines()


def test_a_cubin_is_loaded_and_launched_in_the_devices_context(library: Path) -> None:
    code = """
import ctypes
with d.on(1):
    f = d.function(d.load(b"cubin\\0"), "forward", 70000)
    value = ctypes.c_long(0xABC)
    array = (ctypes.c_void_p * 1)(ctypes.addressof(value))
    print(d.launch_kernel(f, 12, 1, 1, 128, 1, 1, 70000, 0x99, ctypes.addressof(array), 0)[0] == d.success)
print(d.current_context())
"""
    lines = run(library, code)
    assert {"True", "0", "retain 1", "kernel forward of 0x11", "attribute 8 of 0xe3 is 70000"} <= set(lines)
    launched = "launch 0xe3 grid 12 1 1 threads 128 shared 70000 stream 0x99 context c1 first abc extra (nil)"
    assert launched in lines


def test_a_cubin_is_loaded_once_however_many_kernels_have_it(library: Path) -> None:
    lines = run(library, "d.load(b'cubin\\0'); d.load(bytes(bytearray(b'cubin\\0'))); d.load(b'cubin\\0 again')")
    assert lines.count("load cubin") == 2


EXTENDED = """
import ctypes
from flashgen.errors import LaunchError
from flashgen.launch.driver.launch_attributes import Configs, LaunchShape
value = ctypes.c_long(0xABC)
array = (ctypes.c_void_p * 1)(ctypes.addressof(value))
def launch(*shape, **attributes):
    config = Configs().of(d, LaunchShape(*shape, **attributes))
    config.hStream = 0x99
    d.call("cuLaunchKernelEx", config, 0xE3, ctypes.addressof(array), 0)
"""
EXTENDED_LINE = "launch 0xe3 grid 12 2 3 block 128 1 1 shared 70000 stream 0x99 first abc extra (nil)"


def test_a_launch_without_attributes_has_none(library: Path) -> None:
    assert EXTENDED_LINE in run(library, EXTENDED + "launch((12, 2, 3), 128, 70000)")


def test_each_property_of_a_launch_is_an_attribute(library: Path) -> None:
    code = "launch((12, 2, 3), 128, 70000, cluster=(4, 1, 1), cooperative=True, overlaps_predecessor=True)"
    expected = f"{EXTENDED_LINE} attribute 4 is 4 1 1 attribute 2 is 1 0 0 attribute 6 is 1 0 0"
    assert expected in run(library, EXTENDED + code)


def test_a_failed_extended_launch_is_reported_in_the_drivers_words(library: Path) -> None:
    code = """
try:
    launch((1, 1, 1), 7)
except LaunchError as error:
    print(error)
"""
    assert "cuLaunchKernelEx failed: LAUNCH_FAILED: in words" in run(library, EXTENDED + code)


def test_contexts_are_retained_once(library: Path) -> None:
    assert run(library, "d.primary_context(0); d.primary_context(0)").count("retain 0") == 1


def test_a_refused_image_is_reported_in_the_drivers_words(library: Path) -> None:
    code = """
from flashgen.errors import LaunchError
try:
    d.load(b"junk\\0")
except LaunchError as error:
    print(error)
"""
    assert "cuLibraryLoadData failed: BAD_IMAGE: in words" in run(library, code)


def test_capture_is_seen_on_the_stream_and_through_the_default_stream(library: Path) -> None:
    lines = run(library, "print(d.is_capturing(0x33), d.is_capturing(0x34), d.is_capturing(1))")
    assert lines == ["True False True"]


def test_devices_and_pointers_are_described(library: Path) -> None:
    code = """
print(d.device_count(), d.capability(1), d.multiprocessors(1))
print(d.device_of(1 << 40), d.current_device(), current_device())
with d.on(1):
    print(current_device())
"""
    assert [x for x in run(library, code) if "retain" not in x] == ["2 90 132", "1 None 0", "1"]


def test_memory_and_events_are_used_in_stream_order(library: Path) -> None:
    lines = run(library, "p = d.allocate(64, 3); d.free(p, 3); d.wait(5, 4)")
    assert lines == [
        "allocate 64 on 0x3",
        "free 5000 on 0x3",
        "event with flags 2",
        "record 0x44 on 0x4",
        "0x5 waits for 0x44",
    ]


def test_zeroed_memory_is_made_out_of_sight_of_captures(library: Path) -> None:
    lines = run(library, "print(hex(d.allocate_zeroed(64)))")
    assert lines == [
        "capture mode 2, not 0",
        "allocate 64",
        "stream with flags 1",
        "64 times 0 to 6000 on 0x55",
        "wait for 0x55",
        "destroy 0x55",
        "capture mode 0, not 2",
        "0x6000",
    ]


def test_the_capture_mode_is_back_when_there_is_no_memory(library: Path) -> None:
    code = """
from flashgen.errors import LaunchError
try:
    d.allocate_zeroed(7)
except LaunchError as error:
    print(error)
"""
    lines = run(library, code)
    assert lines[:2] == ["capture mode 2, not 0", "capture mode 0, not 2"]
    assert lines[2].startswith("cuMemAlloc failed")


def test_a_device_that_does_not_exist_is_named(library: Path) -> None:
    code = """
from flashgen.errors import LaunchError
try:
    d.primary_context(2)
except LaunchError as error:
    print(error)
"""
    assert run(library, code) == ["cuda:2 does not exist; this process sees 2 GPU(s)"]


def test_a_forked_child_gets_the_advice_to_spawn(library: Path) -> None:
    code = """
import os
from flashgen.errors import LaunchError
if (child := os.fork()) == 0:
    try:
        get_driver()
    except LaunchError as error:
        os.write(1, (str(error) + "\\n").encode())
    os._exit(0)
os.waitpid(child, 0)
"""
    assert any("'spawn'" in line for line in run(library, code))
