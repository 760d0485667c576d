from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from flashgen.cli.gpus import Gpu
from flashgen.cli.verification import verify_all
from flashgen.errors import EmulationError, LaunchError
from flashgen.oracle import Check
from flashgen.plan import plan
from flashgen.spec import AttentionSpec
from flashgen.verify import Case, CaseResult
from flashgen.verify import Verification as Checked

SPEC = AttentionSpec(64, direction="forward")
H100 = Gpu(0, "H100", 90, 2**36)


def checked(target: str, error: float, bound: float) -> Checked:
    check = Check(error, bound, error <= bound)
    result = CaseResult(Case("one query", 1, 1), "o", check)
    return Checked(target, 11, error, bound, check.ok, (result,))


def checker(seen: list[tuple[str, str]], error: float = 1.0, bound: float = 2.0) -> Callable[..., Checked]:
    def check(plan: Any, target: str, gpu: Gpu | None) -> Checked:
        seen.append((plan.arch.name, target))
        return checked(target, error, bound)

    return check


def test_a_plan_is_verified_on_a_gpu_that_runs_it_and_else_on_the_emulator() -> None:
    seen: list[tuple[str, str]] = []
    plans = [plan(SPEC, None, arch) for arch in ("sm_80", "sm_90")]
    outcome = verify_all(plans, [H100], checker(seen))
    assert seen == [("sm_80", "emulator"), ("sm_90", "gpu")]
    assert outcome is not None
    assert (outcome.target, outcome.cases, outcome.ok) == ("emulator and gpu", 22, True)


def test_the_error_reported_is_the_one_nearest_to_its_bound() -> None:
    errors = iter([(3.0, 100.0), (1.0, 2.0)])
    outcome = verify_all(
        [plan(SPEC, None, arch) for arch in ("sm_80", "sm_86")],
        [],
        lambda plan, target, gpu: checked(target, *next(errors)),
    )
    assert outcome is not None
    assert (outcome.max_error, outcome.bound) == (1.0, 2.0)


def test_one_failure_fails_all_and_names_the_arch() -> None:
    errors = iter([(1.0, 2.0), (3.0, 2.0)])
    outcome = verify_all(
        [plan(SPEC, None, arch) for arch in ("sm_80", "sm_86")],
        [],
        lambda plan, target, gpu: checked(target, *next(errors)),
    )
    assert outcome is not None
    assert not outcome.ok
    (failure,) = outcome.failures
    assert failure.startswith("sm_86: FAILED: o of one query")


@pytest.mark.parametrize("error", [EmulationError("a race in line 7"), LaunchError("illegal address")])
def test_a_kernel_that_does_not_come_through_is_a_failure_without_a_number(error: Exception) -> None:
    def check(plan: Any, target: str, gpu: Gpu | None) -> Checked:
        raise error

    outcome = verify_all([plan(SPEC, None, "sm_80")], [], check)
    assert outcome is not None
    assert not outcome.ok
    assert str(error) in outcome.failures[0]
    assert outcome.as_json()["max_error"] is None


def test_nan_is_the_worst_error_and_null_in_json() -> None:
    errors = iter([(math.nan, 2.0), (1.0, 2.0)])
    outcome = verify_all(
        [plan(SPEC, None, arch) for arch in ("sm_80", "sm_86")],
        [],
        lambda plan, target, gpu: checked(target, *next(errors)),
    )
    assert outcome is not None
    assert not outcome.ok
    assert outcome.as_json()["max_error"] is None


def test_without_gpu_and_compiler_nothing_is_claimed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FLASHGEN_CXX", "no-such-compiler")
    seen: list[tuple[str, str]] = []
    assert verify_all([plan(SPEC, None, "sm_80")], [], checker(seen)) is None
    assert seen == []
    said = capsys.readouterr().err
    assert "NOT VERIFIED" in said
    assert "no-such-compiler" in said


def test_a_gpu_makes_the_compiler_unnecessary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHGEN_CXX", "no-such-compiler")
    outcome = verify_all([plan(SPEC, None, "sm_90")], [H100], checker([]))
    assert outcome is not None
    assert outcome.target == "gpu"
