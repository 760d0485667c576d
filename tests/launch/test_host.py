"""Persistent kernels on the emulator's target: tensor maps, blocks, and a counter that must be put back."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from flashgen.emulator import GuardedCall, guarded_copy
from flashgen.errors import EmulationError
from flashgen.launch.executor import Executor
from flashgen.launch.host import HostTarget
from flashgen.launch.variant import Loadable, Variant
from flashgen.plan import plan, workspaces
from flashgen.spec import AttentionSpec

Body = Callable[[dict[str, Any]], None]


class Emulated:
    """In place of a kernel: keeps what it was launched with, and applies a given function to its parameters."""

    def __init__(self, kernel_plan: Any, body: Body) -> None:
        self.plan, self.body = kernel_plan, body
        self.grids: list[Any] = []
        self.values: dict[str, Any] = {}
        self.buffers: dict[str, Any] = {}

    def launch(self, grid: Any, params: bytes, buffers: Any, **_: Any) -> None:
        table = self.plan.params
        assert len(params) == table.bytes
        self.values = dict(zip(table.names, struct.unpack_from(table.format, params), strict=True))
        self.grids.append(grid)
        self.buffers = {buffer.name: buffer for buffer in buffers}
        self.body(self.values)


def emulated(body: Body, guard: Any = None, arch: str = "sm_90a") -> tuple[Executor, Emulated]:
    attention = plan(AttentionSpec(64, dtype="fp16", direction="forward"), None, arch)
    (kernel_plan,) = attention.kernels
    kernel = Emulated(kernel_plan, body)
    variant = Variant(attention, {"forward": Loadable(kernel_plan, kernel)})
    return Executor(variant, lambda access: variant, HostTarget(lambda source: source, guard), workspaces), kernel


def words(address: int) -> Any:
    return (ctypes.c_uint32 * 2).from_address(address)


def aligned(*shape: int) -> np.ndarray[Any, Any]:
    return guarded_copy(np.ones(shape, np.float16))


@pytest.mark.parametrize("guard", [None, GuardedCall])
def test_kernels_find_a_counter_of_zeros_that_they_may_write(guard: Any) -> None:
    seen = []

    def count(values: dict[str, Any]) -> None:
        counter = words(values["counter"])
        seen.append(list(counter))
        counter[0] = counter[1] = 3
        counter[0] = counter[1] = 0

    executor, kernel = emulated(count, guard)
    x = aligned(2, 500, 4, 64)
    for _ in range(2):
        executor.forward(x, x, x)
    assert seen == [[0, 0], [0, 0]]
    buffer = kernel.buffers["counter"]
    assert (buffer.address, buffer.bytes, buffer.writable) == (kernel.values["counter"], 8, True)


@pytest.mark.parametrize("guard", [None, GuardedCall])
def test_a_counter_that_is_not_put_back_is_a_finding(guard: Any) -> None:
    def forget(values: dict[str, Any]) -> None:
        words(values["counter"])[1] = 3

    executor, kernel = emulated(forget, guard)
    x = aligned(1, 70, 2, 64)
    with pytest.raises(EmulationError, match=r"forward_d64\w* left \[0, 3\] in its counter") as caught:
        executor.forward(x, x, x)
    assert (caught.value.kind, caught.value.kernel) == ("counter not put back", kernel.plan.name)
    kernel.body = lambda values: None
    executor.forward(x, x, x)


def test_maps_hold_the_addresses_at_which_the_guard_put_the_arrays() -> None:
    executor, kernel = emulated(lambda values: None, GuardedCall)
    q, k, v = (aligned(1, 70, 2, 64) for _ in "qkv")
    executor.forward(q, k, v)
    for name in "qkvo":
        assert struct.unpack_from("=Q", kernel.values[f"{name}_map"], 8)[0] == kernel.buffers[name].address
    assert kernel.buffers["q"].address != q.ctypes.data


@pytest.mark.parametrize("guard", [None, GuardedCall])
def test_a_kernel_that_may_start_early_finds_everything_in_use_by_the_one_before(guard: Any) -> None:
    executor, kernel = emulated(lambda values: None, guard)
    x = aligned(1, 70, 2, 64)
    executor.forward(x, x, x)
    assert {name: buffer.from_primary for name, buffer in kernel.buffers.items()} == dict.fromkeys(
        ("q", "k", "v", "o", "lse", "counter"), True
    )
    assert {name for name, buffer in kernel.buffers.items() if buffer.writable} == {"o", "lse", "counter"}


def test_other_kernels_start_when_nothing_else_runs() -> None:
    executor, kernel = emulated(lambda values: None, arch="sm_80")
    x = aligned(1, 70, 2, 64)
    executor.forward(x, x, x)
    assert not any(buffer.from_primary for buffer in kernel.buffers.values())


def test_blocks_are_few_so_that_each_takes_several_tiles() -> None:
    executor, kernel = emulated(lambda values: None)
    for length in (1, 1000):
        x = aligned(1, length, 2, 64)
        executor.forward(x, x, x)
    assert kernel.grids == [(2, 1, 1), (3, 1, 1)]
