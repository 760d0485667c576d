"""Calls made into one: the driver is handed the same, and everything else is allocated at once."""

from __future__ import annotations

from typing import Any

import pytest

from flashgen.launch.call.batched_launch import joined, run, taken
from flashgen.spec import KVCache, Rotary, causal


@pytest.fixture
def parts(bench: Any, array: Any) -> Any:
    """A step of decoding: two calls with their results, and the bench."""
    b = bench(64, mask=causal(), cache="contiguous", direction="forward")
    q, new_k, new_v = (array(2, 1, heads, 64) for heads in (4, 2, 2))
    k_cache, v_cache = (array(2, 4096, 2, 64) for _ in range(2))
    cos, sin, seqlens = array(4096, 16), array(4096, 16), array(2, dtype="<i4")
    append = b.executor.append.find(
        k_cache, v_cache, new_k, new_v, KVCache(seqlens), q, Rotary(cos, sin, True, None, False), None
    )
    turned = run(append, new_k)
    cache = KVCache(seqlens, appended=1, num_splits=3)
    forward = b.executor.find_forward(turned[0], k_cache, v_cache, cache=cache)
    return b, [(append, turned), (forward, run(forward, q))]


@pytest.mark.parametrize("wanted", [("o",), ("o", "lse")])
def test_the_driver_is_handed_the_same_but_for_what_is_allocated(parts: Any, wanted: tuple[str, ...]) -> None:
    b, parts = parts
    apart = list(b.driver.launches)
    b.driver.launches.clear()
    call, arrays = joined(parts, wanted), taken(parts)
    pointers = [x.pointer for x in arrays]
    made = call.run(b.executor.target, parts[0][0][2], arrays[0], pointers, None)
    assert [x.name for x in b.driver.launches] == [x.name for x in apart]
    assert len(apart) == 2
    moved: dict[int, int] = {}
    for one, other in zip(apart, b.driver.launches, strict=True):
        assert (one.grid, one.threads, one.smem_bytes, one.stream) == (
            *(other.grid, other.threads, other.smem_bytes, other.stream),
        )
        for name, value in one.values.items():
            if other.values[name] != value:
                assert moved.setdefault(value, other.values[name]) == other.values[name], name
    # The turned queries, both results and what parts leave: nothing else lies elsewhere now.
    assert len(moved) == 5
    assert not set(moved) & set(pointers)
    assert len(made) == len(wanted) + 1
    assert [x.info.pointer for x in made[:-1]] == [b.driver.launches[-1].values[name] for name in wanted]


def test_workspaces_do_not_overlap(parts: Any) -> None:
    b, parts = parts
    b.driver.launches.clear()
    call, arrays = joined(parts, ("o",)), taken(parts)
    *_, workspace = call.run(b.executor.target, parts[0][0][2], arrays[0], [x.pointer for x in arrays], None)
    append, forward = (x.values for x in b.driver.launches)
    assert append["rotated_q"] == forward["q"]
    rows = 2 * 4
    begins = {
        append["rotated_q"]: 2 * rows * 64,
        forward["lse"]: 4 * rows,
        forward["o_partial"]: 4 * 3 * rows * 64,
        forward["row_partial"]: 2 * 4 * 3 * rows,
    }
    at = workspace.info.pointer
    for begin, size in sorted(begins.items()):
        assert begin >= at
        assert begin % 256 == 0
        at = begin + size
    assert at <= workspace.info.pointer + 4 * workspace.info.shape[0]


def test_one_call_is_as_it_was_but_for_results_that_nobody_wants(parts: Any) -> None:
    b, parts = parts
    _, (found, _) = parts
    assert joined(parts[1:], ("o", "lse")) is found[1]
    call = joined(parts[1:], ("o",))
    b.driver.launches.clear()
    out, workspace = call.run(b.executor.target, found[2], found[3][0], found[4], None)
    *_, combine = b.driver.launches
    assert combine.values["o"] == out.info.pointer
    assert combine.values["lse"] == workspace.info.pointer


def test_what_a_call_made_before_is_not_taken(parts: Any) -> None:
    _, parts = parts
    (append, turned), (forward, _) = parts
    arrays = taken(parts)
    assert not any(x is turned[0] for x in arrays)
    assert {id(x) for x in arrays} == {id(x) for x in (*append[3], *forward[3]) if x is not turned[0]}
    assert len(arrays) == 8
