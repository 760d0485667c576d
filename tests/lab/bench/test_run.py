"""A bench on a clock that passes only when calls take time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashgen.lab.bench.candidate import Call, Candidate, RefusedError
from flashgen.lab.bench.case import Case, Inputs, expected_all
from flashgen.lab.bench.ours import algorithms
from flashgen.lab.bench.peers import peers
from flashgen.lab.bench.run import Effort, time_attention
from flashgen.lab.bench.timings import Timings, write_json
from flashgen.lab.roofline.measure import plans_of
from flashgen.lab.timing.device import Device, HostDevice
from flashgen.spec.schedule import ALGORITHMS, Algorithm

CASE = Case("forward", "fp32", 16, True, 24, 2, 3)
BACKWARD = Case("backward", "fp32", 16, True, 24, 2, 3)
#: The fields of a row, which docs/reference/cli.md lists.
FIELDS = {
    "algorithm": str,
    "pass": str,
    "dtype": str,
    "head_dim": int,
    "causal": bool,
    "len": int,
    "batch": int,
    "heads": int,
    "heads_kv": int,
    "new_tokens": int,
    "gbps": float,
    "ms": float,
    "tflops": float,
    "bytes": int,
    "peer": bool,
}


class Bench:
    """Candidates whose calls take given times, on a clock of its own, with a log of the calls."""

    def __init__(self) -> None:
        self.now = 0.0
        self.log: list[str] = []
        self.released = 0
        self.device = HostDevice("a clock", lambda: self.now)
        self.device.peak_bytes = lambda run: 1000  # type: ignore[method-assign]
        self.device.release = self._release  # type: ignore[method-assign]

    def _release(self) -> None:
        self.released += 1

    def candidate(self, name: str, ms: float, *, peer: bool = False, change: Any = None) -> Candidate:
        def prepare(case: Case, inputs: Inputs, device: Device) -> Call:
            exact = expected_all(case, inputs)

            def call() -> Any:
                self.log.append(name)
                self.now += 1e-3 * ms
                return exact if change is None else change([x.copy() for x in exact])

            return call

        return Candidate(name, prepare, peer)

    def raising(self, name: str, error: Exception, *, peer: bool = False) -> Candidate:
        def prepare(case: Case, inputs: Inputs, device: Device) -> Call:
            raise error

        return Candidate(name, prepare, peer)

    def run(self, *candidates: Candidate, cases: Any = (CASE,), **effort: Any) -> Timings:
        return time_attention(cases, candidates, self.device, effort=Effort(**effort))


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_each_is_checked_once_and_then_timed_in_turn(bench: Bench) -> None:
    timings = bench.run(bench.candidate("fa2", 2.0), bench.candidate("torch", 1.0, peer=True), rounds=3, ms=2.0)
    checks, estimates, rest = bench.log[:2], bench.log[2:4], bench.log[4:]
    assert checks == estimates == ["fa2", "torch"]
    # Each round has one call of fa2 and two of torch.
    for i in range(0, 9, 3):
        assert sorted(rest[i : i + 3]) == ["fa2", "torch", "torch"]
        assert rest[i : i + 3] != ["torch", "fa2", "torch"]
    assert [round(row.timing.ms, 6) for row in timings.rows] == [2.0, 1.0]
    assert [round(timings.ratio(row) or 0, 6) for row in timings.rows] == [0.5, 1.0]


def test_a_wrong_result_is_named_and_never_timed(bench: Bench) -> None:
    def off_in_another_head(made: list[Any]) -> list[Any]:
        made[0][0, :, 0] *= 1.1
        return made

    def off_in_the_last(made: list[Any]) -> list[Any]:
        made[0][-1, :, -1] = np.nan
        return made

    timings = bench.run(
        bench.candidate("right", 1.0),
        bench.candidate("other head", 1.0, change=off_in_another_head),
        bench.candidate("last head", 1.0, change=off_in_the_last),
    )
    assert [row.algorithm for row in timings.rows] == ["right"]
    assert [(s.algorithm, s.is_wrong) for s in timings.skipped] == [("other head", True), ("last head", True)]
    assert bench.log.count("other head") == bench.log.count("last head") == 1
    assert "its result is wrong: relative error" in str(timings)


def test_a_refusal_and_a_lack_of_memory_are_reasons(bench: Bench) -> None:
    timings = bench.run(
        bench.candidate("fa2", 1.0),
        bench.raising("naive", RefusedError("it has no scores")),
        bench.raising("standard", MemoryError()),
        bench.raising("broken", ImportError("no symbol"), peer=True),
    )
    assert {s.algorithm: s.reason for s in timings.skipped} == {
        "naive": "it has no scores",
        "standard": "it needs more memory than there is",
        "broken": "ImportError: no symbol",
    }
    assert not timings.wrong
    assert bench.released == 1
    assert "not timed: naive (forward, fp32, D=16, causal, N=24, B=2, H=3): it has no scores" in str(timings)


def test_a_fault_of_our_own_is_no_reason_to_go_on(bench: Bench) -> None:
    with pytest.raises(ZeroDivisionError):
        bench.run(bench.raising("fa2", ZeroDivisionError()))


def test_a_slow_call_is_timed_once(bench: Bench) -> None:
    timings = bench.run(bench.candidate("naive", 900.0), bench.candidate("fa2", 1.0), rounds=2, ms=1.0)
    assert bench.log.count("naive") == 2
    assert timings.rows[0].timing.rounds == 1
    assert "once" in str(timings)


def test_the_json_has_the_agreed_fields(bench: Bench, tmp_path: Path) -> None:
    seen: list[Timings] = []
    timings = time_attention(
        (CASE, BACKWARD), [bench.candidate("fa2", 1.0)], bench.device, effort=Effort(2, 1.0), finished=seen.append
    )
    # After each case, so that an interrupted run leaves its figures.
    assert [len(each.rows) for each in seen] == [1, 2]
    write_json(timings.as_dict(), tmp_path / "bench.json")
    value = json.loads((tmp_path / "bench.json").read_text())
    assert (value["schema"], value["device"]) == (1, "a clock")
    for row in value["rows"]:
        assert {name: type(row[name]) for name in FIELDS} == FIELDS
    assert [row["pass"] for row in value["rows"]] == ["forward", "backward"]
    first = value["rows"][0]
    assert first["tflops"] == pytest.approx(CASE.flops / 1e-3 / 1e12)
    assert first["bytes"] == 1000 + CASE.argument_bytes
    assert list(tmp_path.iterdir()) == [tmp_path / "bench.json"]


def test_numpy_is_a_peer_with_a_clock_of_its_own(bench: Bench) -> None:
    timings = bench.run(bench.candidate("fa2", 1.0), *peers(["numpy"]), rounds=1, ms=1.0)
    (numpy,) = (row for row in timings.rows if row.peer)
    assert numpy.timing.ms > 0
    assert numpy.bytes == 0
    with pytest.raises(RefusedError, match="too long"):
        peers(["numpy"])[0].prepare(Case("forward", "bf16", 128, False, 8192, 2, 16), CASE.inputs(), HostDevice())


def test_our_algorithms_run_on_the_emulator_or_say_why_not() -> None:
    case = Case("backward", "fp16", 16, True, 20, 1, 2)
    names: tuple[Algorithm, ...] = ("naive", "fa2", "fa3")
    timings = time_attention((case,), algorithms(names), HostDevice("the emulator"), effort=Effort(1, 1.0, 0.0))
    assert [row.algorithm for row in timings.rows] == ["fa2"]
    reasons = {s.algorithm: s.reason for s in timings.skipped}
    assert reasons["naive"] == "it has no backward pass; gradients come from FlashAttention-2"
    assert "algorithm='fa3' cannot be planned" in reasons["fa3"]
    assert not timings.wrong


@pytest.mark.parametrize(
    ("pass_", "missing"), [("forward", {"fa3"}), ("backward", {"fa3", "naive", "grid1d", "grid2d"})]
)
def test_every_algorithm_is_offered_for_the_passes_that_it_has(pass_: Any, missing: set[str]) -> None:
    case = Case(pass_, "bf16", 64, True, 128, 1, 2)
    # The emulator stands in for sm_80, where there is no fa3.
    assert {name for name, _ in plans_of(ALGORITHMS, (case,), None)} == set(ALGORITHMS) - missing
