"""A GPU, or the emulator in tests, that builds, verifies and times schedules."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from flashgen.arch import Arch
from flashgen.errors import CompileError, FlashgenError, PlanError
from flashgen.kernel import Kernel
from flashgen.lab.timing.device import Device, is_out_of_memory
from flashgen.lab.tune.search import RefusedError
from flashgen.launch.copies.run import runner
from flashgen.pipeline import TargetName, plans, variant
from flashgen.plan.model.plans import Pass
from flashgen.spec import AttentionSpec, Dropout, Schedule
from flashgen.verify import Case, cases_for, expect, run_case


@dataclass(frozen=True, slots=True, eq=False)
class Arrays:
    """Arguments of a call, on the device."""

    q: Any
    k: Any
    v: Any


def call_options(spec: AttentionSpec) -> dict[str, Any]:
    """The options of a call that is timed. Any dropout will do: times do not depend on which pairs are dropped."""
    return {"dropout": Dropout(0.1, 1)} if spec.dropout else {}


class KernelWorkbench:
    """Kernels of one pass of a spec on a device."""

    def __init__(
        self,
        spec: AttentionSpec,
        pass_: Pass,
        arch: Arch,
        device: Device,
        problems: Mapping[int, Arrays],
        *,
        ordinal: int | None,
        base: Schedule | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """``base`` is the schedule of the forward pass while backward ones are tried; no ordinal: the emulator."""
        self._spec = replace(spec, direction="forward") if pass_ == "forward" else spec
        self._pass, self._arch, self._device, self._problems = pass_, arch, device, problems
        self._ordinal, self._base, self.clock = ordinal, base or Schedule(), clock
        self._options = call_options(spec)

    def build(self, schedule: Schedule) -> Kernel:
        """Compiled, or for the emulator rendered."""
        target: TargetName = "emulator" if self._ordinal is None else "gpu"
        if self._pass == "backward":
            schedule = replace(self._base, backward=schedule.backward)
        try:
            bare = self._spec.declared() if self._spec.tensors else self._spec
            (attention,) = plans(bare, schedule, [self._arch])
            kernel = Kernel(variant(attention, target), target)
        except (PlanError, CompileError) as error:
            raise RefusedError(_first_line(error)) from error
        return kernel

    def fault(self, built: Kernel, *, thorough: bool) -> str | None:
        """Against the oracle: two small cases, or all those of ``flashgen build``."""
        tile_q, tile_kv = built.schedule.tile_q or 64, built.schedule.tile_kv or 64
        cases: Sequence[Case] = cases_for(built.plan.spec, tile_q=tile_q, tile_kv=tile_kv) if thorough else self._small
        for case in cases:
            try:
                results = run_case(runner(built, self._ordinal), built.plan.spec, self._expected(built.plan.spec, case))
            except FlashgenError as error:
                return _first_line(error)
            for result in results:
                if not result.check.ok:
                    return result.describe()
        return None

    @property
    def _small(self) -> tuple[Case, ...]:
        """The same for all schedules, so that the oracle computes them once; tiles end within them, and repeat."""
        return (
            Case("many tiles", 300, 421, heads=2, heads_kv=1),
            Case("odd lengths", 37, 53, batch=2, heads=3, heads_kv=1, scale=0.3),
        )

    @cached_property
    def _expectations(self) -> dict[Any, Any]:
        return {}

    def _expected(self, spec: AttentionSpec, case: Case) -> Any:
        if (case, spec.direction) not in self._expectations:
            self._expectations[case, spec.direction] = expect(spec, case)
        return self._expectations[case, spec.direction]

    def times(self, built: Kernel, length: int, calls: int) -> list[float]:
        """One call first: it loads what is not loaded yet."""
        x = self._problems[length]
        run = self._call(built.with_tensors(self._spec.tensors) if self._spec.tensors else built, x)
        try:
            run()
            return self._device.times(run, calls)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self._device.release()
            raise RefusedError("a call needs more memory than there is") from error

    def _call(self, kernel: Kernel, x: Arrays) -> Callable[[], object]:
        if self._pass == "forward":
            return lambda: kernel(x.q, x.k, x.v, **self._options)
        out, lse = kernel(x.q, x.k, x.v, **self._options)
        # Any gradient of O will do, and O has the right size.
        return lambda: kernel.backward(out, x.q, x.k, x.v, out, lse, **self._options)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
