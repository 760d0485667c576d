"""Which launches share a counter, and which must not."""

from __future__ import annotations

import threading
from itertools import pairwise
from typing import Any

import pytest

from flashgen.errors import LaunchError
from flashgen.launch.arrays.frameworks import framework_of
from flashgen.launch.call.preparer import Request
from flashgen.launch.driver import counters
from flashgen.launch.driver.counters import Counters, counters_of


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(counters, "_FIRST", 8)
    return 8


def in_a_thread(work: Any) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    return found[0]


def test_launches_on_one_stream_share_a_counter_whatever_the_kernel_and_the_thread(bench: Any, array: Any) -> None:
    x = array(1, 8, 2, 64)
    benches = [bench(64, arch="sm_90a"), bench(64, arch="sm_90a", head_dim_v=64)]
    for b in benches:
        for stream in (0x10, 0x20, 0x10):
            in_a_thread(lambda b=b, stream=stream: b.executor.forward(x, x, x, None, stream))
    driver = benches[0].driver
    seen = [(launch.stream, launch.values["counter"]) for launch in driver.launches]
    assert len(seen) == 6
    assert len(set(seen)) == 2
    assert len({counter for _, counter in seen}) == 2
    assert len(driver.zeroed) == 1


def test_devices_have_counters_of_their_own(bench: Any, array: Any) -> None:
    b = bench(64, arch="sm_90a")
    for device in (0, 1):
        x = array(1, 8, 2, 64, device=device)
        b.executor.forward(x, x, x)
    assert [launch.values["counter"] >> 40 for launch in b.driver.launches] == [0, 1]
    assert [device for device, _ in b.driver.zeroed] == [0, 1]


def test_kernels_without_tiles_to_give_out_need_no_counters(bench: Any, array: Any) -> None:
    b = bench(64)
    x = array(1, 8, 2, 64)
    b.executor.forward(x, x, x)
    assert b.driver.zeroed == []


def test_counters_neither_touch_nor_lie_in_one_sector(driver: Any, few: int) -> None:
    made = sorted(counters_of(driver, 0).address(stream) for stream in range(16, 16 + few))
    assert {b - a for a, b in pairwise(made)} == {32}
    assert driver.zeroed[0] == (0, 32 * few)


def test_the_per_thread_stream_is_another_one_in_each_thread(driver: Any) -> None:
    c = Counters(driver, 0)
    ours, theirs = c.address(2), in_a_thread(lambda: c.address(2))
    assert ours != theirs
    assert c.address(2) == ours
    assert c.address(0) == in_a_thread(lambda: c.address(0)) not in (ours, theirs)


def test_so_is_the_default_stream_where_the_bindings_make_it_that(driver: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("CUDA_PYTHON_CUDA_PER_THREAD_DEFAULT_STREAM", "1")
    c = Counters(driver, 0)
    assert c.address(0) != in_a_thread(lambda: c.address(0))
    assert c.address(1) == in_a_thread(lambda: c.address(1))


def test_the_legacy_stream_which_nothing_captures_is_not_asked_about(driver: Any, monkeypatch: Any) -> None:
    asked: list[int] = []
    monkeypatch.setattr(driver, "is_capturing", lambda stream: asked.append(stream) or False)
    made = Counters(driver, 0)
    for stream in (0, 2, 0x10):
        made.address(stream)
    assert asked == [2, 0x10]


def test_each_captured_launch_has_a_counter_for_good(driver: Any, few: int) -> None:
    c = Counters(driver, 0)
    before = c.address(0x10)
    driver.capturing = True
    captured = [c.address(0x10) for _ in range(5)]
    driver.capturing = False
    after = [c.address(stream) for stream in (0x10, 0x20, 0x30, 2)]
    assert after[0] == before
    assert len({before, *captured, *after}) == 1 + 5 + 3


def test_captured_calls_take_counters_of_their_own(bench: Any, array: Any) -> None:
    b = bench(64, arch="sm_90a")
    x = array(1, 8, 2, 64)
    b.executor.forward(x, x, x, None, 0x10)
    b.driver.capturing = True
    framework = framework_of(x)
    signature, _ = framework.signature((x, x, x), 0x10)
    call = b.executor._preparer.call(Request("forward", framework, (x, x, x), signature, None, 0x10))
    # Outputs of such arrays cannot be allocated during capture.
    for _ in range(2):
        b.executor.target.launch(call.steps, 0, 0x10, (16, 32, 48, 64, 80), ())
    assert len({launch.values["counter"] for launch in b.driver.launches}) == 3


def test_launches_outside_of_captures_see_to_it_that_these_find_enough(driver: Any, few: int) -> None:
    c = Counters(driver, 0)
    taken = {c.address(0x10)}
    for _ in range(20):
        driver.capturing = True
        taken |= {c.address(0x10) for _ in range(3)}
        driver.capturing = False
        assert c.address(0x10) in taken
    assert len(taken) == 61
    assert [size // 32 for _, size in driver.zeroed] == [8, 8, 16, 32, 64]


def test_a_capture_that_uses_them_up_gets_a_remedy_that_helps(driver: Any, few: int) -> None:
    c = Counters(driver, 0)
    c.address(0x10)
    driver.capturing = True
    with pytest.raises(LaunchError, match=r"all 8 counters on cuda:0.*call the kernel once outside of the capture"):
        [c.address(0x20) for _ in range(few)]
    driver.capturing = False
    c.address(0x10)
    driver.capturing = True
    assert len({c.address(0x20) for _ in range(few)}) == few


def test_ever_longer_captures_come_to_an_end(driver: Any, few: int) -> None:
    c = Counters(driver, 0)
    for _ in range(10):
        driver.capturing = False
        c.address(0x10)
        driver.capturing = True
        try:
            taken = {c.address(0x20) for _ in range(100)}
            break
        except LaunchError:
            continue
    assert len(taken) == 100


def test_without_memory_for_more_launches_that_need_none_go_on(driver: Any, few: int) -> None:
    c = Counters(driver, 0)
    known = c.address(0x10)
    driver.capturing = True
    for _ in range(few - 1):
        c.address(0x20)
    driver.capturing = False
    driver.is_full = True
    assert c.address(0x10) == known
    with pytest.raises(LaunchError, match="out of memory"):
        c.address(0x30)
    driver.is_full = False
    assert c.address(0x30) != known


def test_threads_that_come_at_once_never_get_the_same_counter(driver: Any, few: int) -> None:
    c = Counters(driver, 0)
    found: list[int] = []
    barrier = threading.Barrier(16)

    def work(i: int) -> None:
        barrier.wait()
        found.extend(c.address(0x100 + 50 * i + j) for j in range(50))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 16 * 50


def test_kernels_with_wider_counters_have_counters_of_their_own(driver: Any) -> None:
    narrow, wide = counters_of(driver, 0), counters_of(driver, 0, 1024)
    assert counters_of(driver, 0, 1024) is wide is not narrow
    first, second = (wide.address(stream) for stream in (16, 17))
    assert second - first == 4096
    # A launch on another stream uses other words, all of which are zero at first.
    assert [count for _, count in driver.zeroed] == [16384 * 32, 2048 * 4096]
