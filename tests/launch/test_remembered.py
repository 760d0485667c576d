"""A call like one before passes the same checks: what they look at is part of the key of remembered calls."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashgen as fg
from flashgen.errors import ArgumentError
from tests.launch.on_host import executor

Array = np.ndarray[Any, Any]


def plain() -> Array:
    return np.ones((1, 32, 2, 16), np.float32)


def shifted() -> Array:
    return np.ones(1 * 32 * 2 * 16 * 4 + 2, np.uint8)[2:].view(np.float32).reshape(1, 32, 2, 16)


#: Arrays that differ from ``plain()`` in one respect, and what is said of them.
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "big-endian": (lambda: plain().astype(">f4"), "byte order"),
    "masked": (lambda: np.ma.masked_array(plain(), mask=plain() > 0), "MaskedArray"),
    "subclass": (lambda: plain().view(np.recarray), "recarray"),
    "unaligned": (shifted, "no multiple of its element size"),
    "integers": (lambda: plain().view(np.int32), "is int32"),
    "other width": (lambda: plain().astype(np.float16), "is fp16"),
    "last stride": (lambda: np.ones((1, 32, 2, 32), np.float32)[..., ::2], "the last one must be 1"),
    "other shape": (lambda: np.ones((1, 32, 2, 8), np.float32), r"\(1, 32, 2, 8\)"),
    "other rank": (lambda: plain()[0], "must have 4 dimensions"),
}


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("case", REFUSED)
def test_what_a_first_call_refuses_a_later_one_refuses_with_the_same_words(case: str, place: int) -> None:
    make, words = REFUSED[case]
    arrays: list[Any] = [plain(), plain(), plain()]
    arrays[place] = make()
    with pytest.raises(ArgumentError, match=words) as first:
        executor().forward(*arrays)
    later = executor()
    later.forward(plain(), plain(), plain())
    with pytest.raises(ArgumentError) as second:
        later.forward(*arrays)
    assert str(second.value) == str(first.value)


@pytest.mark.parametrize("case", REFUSED)
def test_a_backward_call_checks_every_array_each_time(case: str) -> None:
    make, words = REFUSED[case]
    good = [plain() for _ in range(5)] + [np.ones((1, 2, 32), np.float32)]
    later = executor()
    later.backward(*good)
    for place in range(5):
        arrays = list(good)
        arrays[place] = make()
        with pytest.raises(ArgumentError, match=words):
            later.backward(*arrays)


def test_arrays_that_are_only_read_may_be_read_only(tmp_path: Path) -> None:
    path = tmp_path / "q"
    plain().tofile(path)
    mapped = np.memmap(path, np.float32, "r", shape=(1, 32, 2, 16))
    frozen = plain()
    frozen.flags.writeable = False
    executor().forward(mapped, frozen, np.broadcast_to(plain()[:, :1], (1, 32, 2, 16)))


def memory_map(tmp_path: Path) -> Array:
    path = tmp_path / "cache"
    np.zeros((2, 64, 2, 16), np.float32).tofile(path)
    return np.memmap(path, np.float32, "r", shape=(2, 64, 2, 16))


def frozen(tmp_path: Path) -> Array:
    array = np.zeros((2, 64, 2, 16), np.float32)
    array.flags.writeable = False
    return array


def broadcast(tmp_path: Path) -> Array:
    return np.broadcast_to(np.zeros((1, 64, 2, 16), np.float32), (2, 64, 2, 16))


@pytest.mark.parametrize("is_remembered", [False, True])
@pytest.mark.parametrize("name", ["k_cache", "v_cache"])
@pytest.mark.parametrize("make", [memory_map, frozen, broadcast])
def test_a_cache_that_is_read_only_is_refused(
    tmp_path: Path, make: Callable[[Path], Array], name: str, is_remembered: bool
) -> None:
    kernel = executor(cache="contiguous", direction="forward")
    new = np.ones((2, 3, 2, 16), np.float32)
    arrays = {"k_cache": np.zeros((2, 64, 2, 16), np.float32), "v_cache": np.zeros((2, 64, 2, 16), np.float32)}
    cache = fg.KVCache(np.zeros(2, np.int32))
    if is_remembered:
        kernel.append(*arrays.values(), new, new, cache, None, None, None)
    arrays[name] = make(tmp_path)
    with pytest.raises(ArgumentError, match=f"{name} is read-only"):
        kernel.append(*arrays.values(), new, new, cache, None, None, None)
    # New keys and values are only read.
    new.flags.writeable = False
    arrays[name] = np.zeros((2, 64, 2, 16), np.float32)
    kernel.append(*arrays.values(), new, new, cache, None, None, None)
