from __future__ import annotations

from flashgen.lab.timing.device import HostDevice, is_out_of_memory
from flashgen.lab.timing.rounds import Timing, calls_for, interleaved


class Clock:
    """Seconds that pass only when a call takes them."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_call_is_timed_by_the_clock() -> None:
    clock = Clock()

    def run() -> None:
        clock.now += 0.25

    assert HostDevice("CPU", clock).times(run, 3) == [250.0] * 3


def test_rounds_take_all_in_turn_and_in_changing_order() -> None:
    order: list[str] = []

    def times(name: str, ms: float) -> list[float]:
        order.append(name)
        return [ms]

    timed = {name: (lambda calls, name=name: times(name, 2.0)) for name in "abc"}
    found = interleaved(timed, dict.fromkeys("abc", 2.0), 6, 2.0)
    rounds = [tuple(order[i : i + 3]) for i in range(0, len(order), 3)]
    assert [sorted(each) for each in rounds] == [["a", "b", "c"]] * 6
    assert len(set(rounds)) > 1
    assert {name: timing.ms for name, timing in found.items()} == {"a": 2.0, "b": 2.0, "c": 2.0}


def test_short_calls_are_repeated_and_long_ones_are_not() -> None:
    asked: dict[str, int] = {}

    def times(name: str, calls: int) -> list[float]:
        asked[name] = calls
        return [1.0] * calls

    interleaved({n: (lambda c, n=n: times(n, c)) for n in ("short", "long")}, {"short": 0.5, "long": 80.0}, 1, 25.0)
    assert asked == {"short": 50, "long": 1}
    assert calls_for(0.0, 25.0) == 200


def test_a_timing_is_the_median_and_its_spread_that_of_the_rounds() -> None:
    timing = Timing.of([1.0, 4.0, 2.0])
    assert (timing.ms, timing.spread, timing.rounds) == (2.0, 1.5, 3)


def test_out_of_memory_is_known_by_each_librarys_error() -> None:
    class OutOfMemoryError(RuntimeError):
        pass

    assert is_out_of_memory(OutOfMemoryError())
    assert is_out_of_memory(MemoryError())
    assert not is_out_of_memory(RuntimeError("out of luck"))
