"""Device, context, stream and process of a launch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from flashgen.errors import LaunchError


def test_arrays_of_another_device_are_served_there(bench: Any, array: Any) -> None:
    b = bench(64)
    x = array(1, 8, 2, 64, device=1)
    b.executor.forward(x, x, x)
    assert b.driver.launches[0].device == 1
    assert b.driver.current_context() == b.driver.primary_context(0)


def test_the_callers_context_is_back_after_a_failed_launch(bench: Any, array: Any) -> None:
    b = bench(64)
    x = array(1, 8, 2, 64, device=1)
    b.driver.refuses = True
    with pytest.raises(LaunchError, match=r"launching forward.* failed: error 719"):
        b.executor.forward(x, x, x)
    assert b.driver.current == [b.driver.primary_context(0)]


def test_a_thread_without_a_context_gets_the_devices_own(bench: Any, array: Any) -> None:
    b = bench(64)
    x = array(1, 8, 2, 64)
    b.driver.current[:] = [0]
    b.executor.forward(x, x, x)
    assert b.driver.launches[0].device == 0
    assert b.driver.current == [0]


@pytest.mark.parametrize(
    ("stream", "handle"),
    [
        (None, 1),
        (0, 1),
        (0x77, 0x77),
        (SimpleNamespace(ptr=0x88), 0x88),
        (SimpleNamespace(cuda_stream=0x99), 0x99),
    ],
)
def test_arrays_without_a_stream_of_their_own_run_where_the_caller_says(
    bench: Any, array: Any, stream: Any, handle: int
) -> None:
    b = bench(64)
    x = array(1, 8, 2, 64)
    b.executor.forward(x, x, x, None, stream)
    assert b.driver.launches[0].stream == handle
    assert b.driver.waits == []


def test_the_launch_waits_for_the_stream_that_an_array_names(bench: Any, array: Any) -> None:
    b = bench(64)
    x, produced = array(1, 8, 2, 64), array(1, 8, 2, 64, stream=0x55)
    b.executor.forward(x, produced, x, None, 0x66)
    assert b.driver.waits == [(0x66, 0x55)]


def test_no_wait_when_the_array_names_the_same_stream(bench: Any, array: Any) -> None:
    b = bench(64)
    x = array(1, 8, 2, 64, stream=0x66)
    b.executor.forward(x, x, x, None, 0x66)
    assert b.driver.waits == []


def test_a_forked_child_gets_the_advice_to_spawn(bench: Any, array: Any) -> None:
    b = bench(64)
    x = array(1, 8, 2, 64)
    b.executor.forward(x, x, x)
    b.driver.process += 1
    with pytest.raises(LaunchError, match="spawn"):
        b.executor.forward(x, x, x)
    assert len(b.driver.launches) == 1


def test_a_device_of_another_generation_is_refused(bench: Any, array: Any, monkeypatch: Any) -> None:
    b = bench(64)
    monkeypatch.setattr(b.driver, "capability", lambda device: 80)
    x = array(1, 8, 2, 64)
    with pytest.raises(LaunchError, match=r"built for sm_90, and cuda:0 has compute capability 8\.0"):
        b.executor.forward(x, x, x)


def test_a_kept_binary_that_the_driver_refuses_is_made_anew(bench: Any, array: Any, monkeypatch: Any) -> None:
    b = bench(64)
    x = array(1, 8, 2, 64)
    renewed: list[str] = []
    load = b.driver.load

    def refuse_what_was_kept(image: bytes) -> bytes:
        if not renewed:
            raise LaunchError("cuLibraryLoadData failed: no such image")
        return bytes(load(image))

    monkeypatch.setattr(b.driver, "load", refuse_what_was_kept)
    (variant,) = b.executor.variants._made.values()
    for role, kernel in variant.kernels.items():

        def renew(role: str = role, kernel: Any = kernel) -> Any:
            renewed.append(role)
            return kernel.binary

        variant.kernels[role] = kernel._replace(renew=renew)
    b.executor.forward(x, x, x)
    assert len(renewed) == 1
    assert b.driver.launches


def test_a_binary_that_nobody_can_make_anew_is_the_drivers_error(bench: Any, array: Any, monkeypatch: Any) -> None:
    b = bench(64)

    def refuse(image: bytes) -> bytes:
        raise LaunchError("cuLibraryLoadData failed: no such image")

    monkeypatch.setattr(b.driver, "load", refuse)
    x = array(1, 8, 2, 64)
    with pytest.raises(LaunchError, match="no such image"):
        b.executor.forward(x, x, x)
