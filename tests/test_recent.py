"""``Recent``: what is asked for stays, and the rest makes room."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from flashgen.common.recent import Recent


def filled(most: int, count: int) -> Recent[int, str]:
    recent: Recent[int, str] = Recent(most)
    for number in range(count):
        recent.keep(number, str(number))
    return recent


def test_however_many_come_only_so_many_stay_and_they_are_the_last() -> None:
    for count in range(30):
        kept = [number for number in range(count) if filled(8, count).get(number)]
        assert kept == list(range(count))[count - len(kept) :]
        assert min(count, 4) <= len(kept) == len(filled(8, count)) <= 8


def test_what_is_asked_for_in_time_is_never_forgotten() -> None:
    recent = filled(8, 1)
    for number in range(1, 1000):
        recent.keep(number, str(number))
        if number % 4 == 0:
            assert recent.get(0) == "0"


def test_the_first_value_of_a_key_stays_in_either_generation() -> None:
    recent = filled(8, 6)
    for number in (0, 5):
        assert recent.keep(number, "another") == str(number) == recent.get(number)


def test_what_is_forgotten_can_come_again() -> None:
    recent = filled(8, 8)
    recent.forget(lambda number: number % 2 == 0)
    assert [recent.get(number) for number in range(4)] == [None, "1", None, "3"]
    assert recent.keep(0, "anew") == "anew" == recent.get(0)


def test_of_equal_keys_the_first_one_stays() -> None:
    recent = filled(2, 2)
    assert recent.get(False) == "0"
    assert [type(key) for key in recent._young] == [int]


def test_threads_that_keep_the_same_key_get_the_same_value() -> None:
    recent: Recent[int, object] = Recent(16)
    with ThreadPoolExecutor(8) as pool:
        for key in range(100):
            # One key after another: a thread that came late with one might find it gone, as others came meanwhile.
            first, *others = pool.map(lambda _, key=key: recent.keep(key, object()), range(8))
            assert all(other is first for other in others)
