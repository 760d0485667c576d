"""Calls like one before are made without finding anything out again; calls that differ in anything are not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import flashgen as fg

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch
replay = pytest.importorskip("flashgen.torch.replay")
kvcache = pytest.importorskip("flashgen.compat.flash_attn").flash_attn_with_kvcache
varlen = pytest.importorskip("flashgen.compat.flash_attn").flash_attn_varlen_func

from tests.torch.results import Recorder  # noqa: E402

CAUSAL = (None, 0, None, None)


def halves(*shape: int, seed: int = 0) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).half()


@contextmanager
def nothing_found_out() -> Iterator[None]:
    """Finding a call is an error: all must be known."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("the call was looked for again")

    from flashgen.launch.append import Appender
    from flashgen.launch.executor import Executor

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Executor, "find_forward", refuse)
        patch.setattr(Appender, "find", refuse)
        yield


def qkv(seed: int = 0) -> Any:
    return tuple(halves(2, 9, heads, 16, seed=seed + i) for i, heads in enumerate((4, 2, 2)))


def test_the_second_call_attends_to_its_own_tensors(emulated: Any, reference: Any) -> None:
    slopes = torch.rand(4)
    for options in ({"mask": fg.causal()}, {"score": fg.alibi(slopes)}):
        fg.attention(*qkv(), **options)
        with torch.no_grad():
            expected = fg.attention(*[x.requires_grad_() for x in qkv(5)], **options, return_lse=True)
        with nothing_found_out():
            found = fg.attention(*qkv(5), **options, return_lse=True)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def step(q: Any, caches: Any, seqlens: Any, *new: Any, **options: Any) -> Any:
    return kvcache(q, *caches, *new, cache_seqlens=seqlens, causal=True, num_splits=2, **options)


@pytest.mark.parametrize("returns_lse", [False, True])
def test_a_step_of_decoding_appends_turns_and_attends_in_one_call(emulated: Any, returns_lse: bool) -> None:
    seqlens, angles = torch.tensor([10, 25], dtype=torch.int32), (halves(40, 4), halves(40, 4, seed=1))
    results = []
    for known in (False, True):
        caches = halves(2, 2, 40, 2, 16).unbind()
        for seed in (3, 4):
            q, k, v = halves(2, 1, 4, 16, seed=seed), *halves(2, 2, 1, 2, 16, seed=seed + 2).unbind()
            if known:
                with nothing_found_out():
                    out = step(q, caches, seqlens + seed, k, v, *angles, return_softmax_lse=returns_lse)
            else:
                replay.forget_host()
                out = step(q, caches, seqlens + seed, k, v, *angles, return_softmax_lse=returns_lse)
            results.append((*(out if returns_lse else [out]), *(cache.clone() for cache in caches)))
    for first, second in zip(results[:2], results[2:], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert len(results[0]) == 3 + returns_lse


def test_a_length_that_is_a_number_may_be_another_number(emulated: Any) -> None:
    q, caches = halves(2, 1, 4, 16), halves(2, 2, 40, 2, 16).unbind()
    step(q, caches, 7)
    with nothing_found_out():
        found = step(q, caches, 9)
    assert torch.equal(found, step(q, caches, torch.tensor([9, 9], dtype=torch.int32)))


def differing() -> dict[str, Any]:
    """A way of a call to be unlike ``attend(*qkv(), CAUSAL)``, by what differs."""
    q, k, v = qkv()
    wide = torch.zeros(2, 9, 4, 17).half()
    unaligned = torch.zeros(q.numel() + 1).half()[1:].view(q.shape)
    return {
        "shape": (q[:, :8], k, v),
        "strides": (wide[..., :16], k, v),
        "alignment": (unaligned, k, v),
        "element type": (q.float(), k.float(), v.float()),
        "gradients": (q.clone().requires_grad_(), k, v),
        "type": (torch.nn.Parameter(q, requires_grad=False), k, v),
        "the same tensor twice": (q, k, k),
    }


@pytest.mark.parametrize("what", differing() if torch else ())
def test_a_call_with_other_tensors_is_another_call(emulated: Any, what: str) -> None:
    q, k, v = qkv()
    fg.flash_attn_func(q, k, v, causal=True)
    options = CAUSAL, None, None
    assert replay.again((q, k, v), options) is not None
    assert replay.again(differing()[what], options) is None


def test_whose_address_it_is_counts(emulated: Any) -> None:
    """The alignment of slopes is of no account, and does not stand for that of queries."""
    (q, k, v), slopes = qkv(), torch.zeros(5)
    between = torch.zeros(q.numel() + 2).half()[2:].view(q.shape)
    assert [x.data_ptr() % 16 for x in (q, slopes[1:], between, slopes[:4])] == [0, 4, 4, 0]
    fg.attention(q, k, v, score=fg.alibi(slopes[1:]))
    with pytest.raises(AssertionError, match="looked for again"), nothing_found_out():
        fg.attention(between, k, v, score=fg.alibi(slopes[:4]))


def test_a_call_that_has_one_tensor_twice_is_no_call_of_two(emulated: Any) -> None:
    q, k, v = qkv()
    fg.flash_attn_func(q, k, k, causal=True)
    with nothing_found_out():
        same = fg.flash_attn_func(q, v, v, causal=True)
    assert not torch.equal(fg.flash_attn_func(q, k, v, causal=True), same)


def test_what_looks_at_operators_sees_them(emulated: Any) -> None:
    q, k, v = qkv()
    plain = fg.flash_attn_func(q, k, v, causal=True)
    with Recorder() as recorder:
        fg.flash_attn_func(q, k, v, causal=True)
    assert torch.ops.flashgen.forward.default in recorder.seen
    with torch.autocast("cpu", torch.bfloat16):
        assert fg.flash_attn_func(q, k, v, causal=True).dtype is torch.bfloat16
    each = torch.vmap(lambda x: fg.flash_attn_func(x, k, v, causal=True))(torch.stack([q, q]))
    assert torch.equal(each[1], plain)


def test_options_are_looked_at_anew(emulated: Any) -> None:
    q, caches, seqlens = halves(2, 1, 4, 16), halves(2, 2, 40, 2, 16).unbind(), torch.tensor([9, 9], dtype=torch.int32)
    for _ in range(2):
        kvcache(q, *caches, cache_seqlens=seqlens, num_splits=1, softmax_scale=1.0)
    for wrong in ({"num_splits": True}, {"num_splits": 300}, {"window_size": [1, -2]}, {"softcap": -1.0}):
        with pytest.raises(fg.ArgumentError, match=next(iter(wrong))):
            kvcache(q, *caches, cache_seqlens=seqlens, **{"num_splits": 1, "softmax_scale": 1.0, **wrong})
    windowed = kvcache(q, *caches, cache_seqlens=seqlens, num_splits=1, window_size=[4, 0])
    assert torch.equal(windowed, kvcache(q, *caches, cache_seqlens=seqlens, num_splits=1, window_size=(4, 0)))


def test_a_number_in_a_tensor_is_looked_at_anew(emulated: Any, reference: Any) -> None:
    (q, k, v), cap = qkv(), torch.tensor(4.0)
    first = fg.flash_attn_func(q, k, v, softcap=cap)
    assert torch.equal(first, fg.flash_attn_func(q, k, v, softcap=4.0))
    q, caches, seqlens = halves(2, 1, 4, 16), halves(2, 2, 40, 2, 16).unbind(), torch.tensor([9, 9], dtype=torch.int32)
    for number in (4.0, 0.5):
        cap.fill_(number)
        found = step(q, caches, seqlens, softcap=cap)
        assert torch.equal(found, step(q, caches, seqlens, softcap=number))
    left = torch.tensor(4)
    for number in (4, 1):
        left.fill_(number)
        found = step(q, caches, seqlens, window_size=(left, 0))
        assert torch.equal(found, step(q, caches, seqlens, window_size=(number, 0)))


def test_without_the_emulator_calls_on_the_cpu_are_refused_again() -> None:
    q, k, v = qkv()
    with fg.torch.emulate_cpu():
        for _ in range(2):
            fg.flash_attn_func(q, k, v, causal=True)
    with pytest.raises(fg.ArgumentError, match="q is on the CPU"):
        fg.flash_attn_func(q, k, v, causal=True)


def test_where_packed_sequences_begin_is_checked_each_time(emulated: Any) -> None:
    q, k, v = (x[0] for x in qkv())
    for starts in ((0, 4, 9), (0, 4, 9), (0, 6, 4)):
        given = torch.tensor(starts, dtype=torch.int32)
        if starts[1] == 6:
            with pytest.raises(fg.ArgumentError, match="cu_seqlens_q has lengths"):
                varlen(q, k, v, given, given, 9, 9)
        else:
            varlen(q, k, v, given, given, 9, 9)


def test_as_many_calls_are_kept_as_were_made_last(emulated: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "_CALLS_KEPT", 2)
    given = {i: (halves(1, 3, 1, 16), halves(1, 3, 1, 16), halves(1, 3, 1, 16 * i)[..., :16]) for i in (1, 2, 3)}
    for i in (1, 2, 1, 3):
        fg.attention(*given[i])
    known = [i for i in given if replay.again(given[i], ((None,) * 4, None, None)) is not None]
    assert known == [1, 3]


def test_a_torch_without_the_comparison_computes_the_same(emulated: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = qkv()
    expected = fg.flash_attn_func(q, k, v, causal=True)
    replay.forget_host()
    monkeypatch.setattr(replay, "_Guards", None)
    for _ in range(2):
        assert torch.equal(fg.flash_attn_func(q, k, v, causal=True), expected)
    assert replay.again((q, k, v), (CAUSAL, None, None)) is None
