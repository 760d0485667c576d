from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from flashgen.cli.gpu.arrays import Gpu
from flashgen.cli.gpu.verification import Verification, verify_all
from flashgen.errors import EmulationError, LaunchError
from flashgen.oracle import CaseSlope, Check
from flashgen.plan import plan
from flashgen.spec import AttentionSpec
from flashgen.verify import Case, CaseResult, Tally
from flashgen.verify import Verification as Checked

SPEC = AttentionSpec(64, direction="forward")
H100 = Gpu(0, "H100", 90, 2**36)


GOOD_SLOPE = CaseSlope(0.0, 0.0, 1e-4, 64)


def checked(target: str, error: float, bound: float, slope: CaseSlope = GOOD_SLOPE) -> Checked:
    check = Check(error, bound, error <= bound)
    tally = Tally()
    result = CaseResult(Case("one query", 1, 1), "o", check, slope)
    tally.add([result])
    return Checked(target, 11, tally.reports(), (result,))


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


def outcome_of(*errors: tuple[float, float]) -> Verification:
    archs, results = ("sm_80", "sm_86")[: len(errors)], iter(errors)
    outcome = verify_all(
        [plan(SPEC, None, arch) for arch in archs], [], lambda plan, target, gpu: checked(target, *next(results))
    )
    assert outcome is not None
    return outcome


def test_each_output_has_its_error_bound_ratio_slope_and_case_on_each_arch() -> None:
    outcome = outcome_of((3.0, 100.0), (1.0, 2.0))
    assert outcome.as_json()["outputs"] == [
        {
            "output": "o",
            "arch": arch,
            "max_error": error,
            "bound": bound,
            "ratio": error / bound,
            "case": "one query (B=1 H=1/1 Sq=1 Sk=1)",
            "worst_ratio": error / bound,
            "slope": 1.0,
            "slope_noise": pytest.approx(5e-4),
        }
        for arch, error, bound in (("sm_80", 3.0, 100.0), ("sm_86", 1.0, 2.0))
    ]


def test_the_summary_names_the_worst_ratio_and_no_error_that_is_larger() -> None:
    outcome = outcome_of((3.0, 100.0), (1.0, 2.0))
    assert outcome.as_json()["worst"] == {
        "output": "o",
        "arch": "sm_86",
        "error": 1.0,
        "bound": 2.0,
        "ratio": 0.5,
        "case": "one query (B=1 H=1/1 Sq=1 Sk=1)",
    }
    assert outcome.describe() == (
        "ok on the emulator: 22 cases, worst ratio 0.50: o of one query (B=1 H=1/1 Sq=1 Sk=1) on sm_86, "
        "error 1.00e+00 of at most 2.00e+00"
    )


def test_a_systematic_error_fails_with_a_command_that_repeats_it() -> None:
    outcome = verify_all(
        [plan(SPEC, None, "sm_80")],
        [],
        lambda plan, target, gpu: checked(target, 1.0, 2.0, CaseSlope(0.03, 0.0, 1e-4, 64)),
    )
    assert outcome is not None
    assert not outcome.ok
    failure, again, command = outcome.failures
    assert failure.startswith(
        "sm_80: FAILED: o has a systematic error: the slope of the results on the oracle is 1.03 "
    )
    assert again == "To see it again:"
    assert command.startswith("  flashgen build --head-dim 64 --dtype bf16 --forward-only ")
    assert command.endswith(" --arch sm_80")


def test_one_failure_fails_all_and_names_the_arch() -> None:
    outcome = outcome_of((1.0, 2.0), (3.0, 2.0))
    assert not outcome.ok
    failure, *_ = outcome.failures
    assert failure.startswith("sm_86: FAILED: o of one query")


@pytest.mark.parametrize("error", [EmulationError("a race in line 7"), LaunchError("illegal address")])
def test_a_kernel_that_does_not_come_through_is_a_failure_without_a_number(error: Exception) -> None:
    def check(plan: Any, target: str, gpu: Gpu | None) -> Checked:
        raise error

    outcome = verify_all([plan(SPEC, None, "sm_80")], [], check)
    assert outcome is not None
    assert not outcome.ok
    assert str(error) in outcome.failures[0]
    assert (outcome.as_json()["worst"], outcome.as_json()["outputs"]) == (None, [])


def test_an_error_that_is_not_finite_is_the_worst_and_null_in_json() -> None:
    outcome = outcome_of((math.inf, 2.0), (1.0, 2.0))
    assert not outcome.ok
    value = outcome.as_json()
    assert (value["worst"]["arch"], value["worst"]["error"], value["worst"]["ratio"]) == ("sm_80", None, None)
    assert [output["max_error"] for output in value["outputs"]] == [None, 1.0]


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
