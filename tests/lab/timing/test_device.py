"""What a GPU device asks of the driver, on a driver that only writes it down."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import MagicMock

import pytest

from flashgen.lab.timing.device import GpuDevice
from flashgen.launch.driver.devices import Gpu


class Driver:
    """Events have numbers, and the time between two is their difference."""

    api = MagicMock()

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.events = 0
        self.destroyed: list[Any] = []

    @contextmanager
    def on(self, device: int) -> Iterator[None]:
        yield

    def allocate(self, nbytes: int, stream: int) -> int:
        self.log.append(("allocate", nbytes))
        return 4096

    def free(self, pointer: int, stream: int) -> None:
        pass

    def call(self, name: str, *arguments: Any) -> Any:
        if name == "cuDeviceGetAttribute":
            return 50 * 2**20
        if name == "cuEventCreate":
            self.events += 1
            return self.events
        if name == "cuEventElapsedTime":
            return arguments[1] - arguments[0]
        if name == "cuEventDestroy":
            self.destroyed.append(arguments[0])
            return None
        self.log.append((name, *arguments))
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setattr("flashgen.launch.driver.cuda.get_driver", lambda: made)
    return made


def test_a_flush_of_twice_the_cache_comes_before_each_call_and_outside_its_events(driver: Driver) -> None:
    device = GpuDevice(Gpu(0, "A GPU", 90, 2**36))
    assert ("allocate", 100 * 2**20) in driver.log
    driver.log.clear()
    assert device.times(lambda: driver.log.append("call"), 2) == [1.0, 1.0]
    flush = ("cuMemsetD8Async", 4096, 0, 100 * 2**20, 0)
    assert driver.log == [
        *[flush] * 4,
        ("cuEventRecord", 1, 0),
        "call",
        ("cuEventRecord", 2, 0),
        *[flush] * 4,
        ("cuEventRecord", 3, 0),
        "call",
        ("cuEventRecord", 4, 0),
        ("cuStreamSynchronize", 0),
    ]
    assert driver.destroyed == [1, 2, 3, 4]


def test_events_are_given_back_when_a_call_fails(driver: Driver) -> None:
    device = GpuDevice(Gpu(0, "A GPU", 90, 2**36))
    with pytest.raises(ZeroDivisionError):
        device.times(lambda: 1 // 0, 3)
    assert driver.destroyed == [1, 2, 3, 4, 5, 6]
