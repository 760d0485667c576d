from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import pytest

import flashgen as fg
from flashgen import tuned
from flashgen.arch import get_arch
from flashgen.errors import ArgumentError
from flashgen.lab.timing.device import HostDevice
from flashgen.lab.tune import tuning as tune_module
from flashgen.lab.tune.search import RefusedError
from flashgen.lab.tune.tuning import problems_of, searched
from flashgen.lab.tune.workbench import KernelWorkbench
from flashgen.plan.candidates import schedules
from flashgen.spec import AttentionSpec, Schedule, WarpPartition

SPEC = AttentionSpec(16, dtype="fp16", mask=fg.causal(), direction="forward")
TILES = (Schedule(), Schedule(tile_q=32, tile_kv=32, stages=1, warps=WarpPartition("split_q", 2), algorithm="fa2"))


def test_a_search_on_the_emulator_times_only_verified_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune_module, "schedules", lambda spec, arch, pass_: TILES)
    # Each look at the clock takes a second.
    monkeypatch.setattr(tune_module, "KernelWorkbench", partial(KernelWorkbench, clock=count().__next__))
    device = HostDevice("the emulator")
    problems = problems_of(SPEC, (40,), device, tokens=40, batch=1, heads=1)
    found = searched(SPEC, "the emulator", get_arch("sm_80"), device, problems, 5.0, ordinal=None)
    assert (found.gpu, found.lengths) == ("the emulator", (40,))
    assert [trial.schedule for trial in found.trials] == list(TILES)
    assert all(len(trial.ms) == 1 for trial in found.trials), str(found)
    assert found.schedule in TILES
    assert "tuned on the emulator for lengths 40: " in str(found)


def bench(spec: AttentionSpec = SPEC, pass_: Any = "forward") -> KernelWorkbench:
    return KernelWorkbench(spec, pass_, get_arch("sm_80"), HostDevice(), {}, ordinal=None)


@pytest.mark.parametrize("factor", [1.0, 0.9])
def test_a_kernel_that_is_wrong_has_a_fault(factor: float) -> None:
    class Scaled:
        """The oracle times a factor, in the place of a kernel."""

        def __init__(self, kernel: Any) -> None:
            self.plan, self.schedule = kernel.plan, kernel.schedule

        def __call__(self, q: Any, k: Any, v: Any, *, scale: float, **more: Any) -> Any:
            out, lse = fg.oracle.forward(self.plan.spec, q, k, v, scale=scale)
            return (factor * out).astype(q.dtype), lse.astype(np.float32)

    workbench = bench()
    built: Any = Scaled(workbench.build(TILES[1]))
    fault = workbench.fault(built, thorough=False)
    assert (fault is None) == (factor == 1.0)
    assert fault is None or fault.startswith("FAILED: o of many tiles")


def test_a_schedule_that_cannot_be_planned_is_refused() -> None:
    with pytest.raises(RefusedError, match="cannot be planned"):
        bench().build(Schedule(tile_q=256, tile_kv=256, stages=4))


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90a"])
@pytest.mark.parametrize("pass_", ["forward", "backward"])
def test_schedules_begin_with_the_plans_own_and_give_different_kernels(arch: str, pass_: Any) -> None:
    spec = AttentionSpec(64, dtype="fp16", mask=fg.causal())
    row = get_arch(arch)
    found = schedules(spec, row, pass_)
    assert found[0] == Schedule()
    assert len(set(found)) == len(found)
    assert len(found) > 1 or (arch, pass_) == ("sm_90a", "backward")
    plans = [fg.plan.plan(spec, schedule, row) for schedule in found]
    texts = {repr([k for k in plan.kernels if k.pass_ == pass_]) for plan in plans}
    assert len(texts) == len(found)
    algorithms = {kernel.algorithm for plan in plans for kernel in plan.kernels}
    # A forward schedule of FlashAttention-2 would take FlashAttention-3's backward kernels away.
    assert algorithms == {"FlashAttention-3" if arch == "sm_90a" else "FlashAttention-2"}


def test_forward_only_both_algorithms_are_tried_on_hopper() -> None:
    row = get_arch("sm_90a")
    spec = AttentionSpec(64, dtype="fp16", mask=fg.causal(), direction="forward")
    algorithms = {fg.plan.plan(spec, each, row).kernel("forward").algorithm for each in schedules(spec, row, "forward")}
    assert algorithms == {"FlashAttention-3", "FlashAttention-2"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"spec": replace(SPEC, varlen=True)}, "lengths of its own"),
        ({"budget": 0}, "budget=0 is out of range"),
        ({"budget": "60s"}, "budget='60s' is out of range"),
        ({"q": np.zeros((1, 8, 1, 16), np.float16)}, "q is a NumPy array in host memory"),
        ({"q": 3}, "int is not an array"),
    ],
)
def test_a_wrong_argument_is_named(change: dict[str, Any], message: str) -> None:
    q = np.zeros((1, 8, 1, 16), np.float16)
    arguments: dict[str, Any] = {"spec": SPEC, "q": q, "k": q, "v": q} | change
    with pytest.raises(ArgumentError, match=message):
        fg.tune(**arguments)


@pytest.mark.gpu
def test_a_gpu_is_tuned_and_the_next_build_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    from flashgen.lab.timing.device import GpuDevice
    from flashgen.launch.driver.devices import find_gpus

    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path / "cache"))
    device = GpuDevice(find_gpus()[0])
    arrays = problems_of(SPEC, (256,), device, tokens=256, batch=1, heads=2)[256]
    found = fg.tune(SPEC, arrays.q, arrays.k, arrays.v, budget=20)
    assert any(trial.ms for trial in found.trials)
    kernel = fg.build(SPEC)
    assert kernel.plan.tuning == found
    assert found.headline in str(kernel.plan)
    assert tuned.forget(SPEC, found.gpu)
