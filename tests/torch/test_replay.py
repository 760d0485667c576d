"""Calls like one before are made without finding anything out again; calls that differ in anything are not."""

from __future__ import annotations

import weakref
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

    from flashgen.launch.executor import Executor
    from flashgen.launch.kvcache.append import Appender

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


RECORDED = {
    "attention": lambda q, k, v, slopes: fg.attention(q, k, v, mask=fg.causal()),
    "attention with tensors": lambda q, k, v, slopes: fg.attention(q, k, v, score=fg.alibi(slopes)),
    "flash_attn_func": lambda q, k, v, slopes: fg.flash_attn_func(q, k, v, causal=True),
    "flash_attn_func with tensors": lambda q, k, v, slopes: fg.flash_attn_func(q, k, v, alibi_slopes=slopes),
}


@pytest.mark.parametrize("call", RECORDED.values(), ids=RECORDED)
def test_the_second_call_records_gradients_by_its_own_tensors(emulated: Any, call: Any) -> None:
    def gradients(seed: int) -> tuple[Any, ...]:
        inputs = [*(x.requires_grad_() for x in qkv(seed)), torch.linspace(0.1, 0.4, 4).mul(seed).requires_grad_()]
        out = call(*inputs)
        return (out.detach(), *torch.autograd.grad(out.square().sum(), inputs, allow_unused=True))

    expected = gradients(5)
    replay.forget_host()
    gradients(1)
    with nothing_found_out():
        found = gradients(5)
    assert [x is None for x in found] == [x is None for x in expected]
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("kind", [torch.Tensor, torch.nn.Parameter] if torch else ())
def test_a_call_before_that_recorded_nothing_is_no_reason_to_record_nothing(emulated: Any, kind: Any) -> None:
    q, k, v = (torch.nn.Parameter(x) if kind is torch.nn.Parameter else x.requires_grad_() for x in qkv())
    with torch.no_grad():
        first = fg.attention(q, k, v)
        with nothing_found_out():
            assert torch.equal(fg.attention(q, k, v), first)
    recorded = fg.attention(q, k, v)
    assert recorded.grad_fn is not None
    with torch.no_grad():
        assert fg.attention(q, k, v).grad_fn is None
    with nothing_found_out():
        assert fg.attention(q, k, v).grad_fn is not None
    assert fg.attention(q.detach(), k, v).grad_fn.next_functions[0][0] is None


def test_gradients_are_as_reproducible_as_torch_says_now(emulated: Any) -> None:
    q, k, v = (x.requires_grad_() for x in qkv())
    reproducible = []
    for switch in (False, True, False):
        torch.use_deterministic_algorithms(switch)
        try:
            for _ in range(2):
                kernel, *_ = fg.attention(q, k, v).grad_fn.call
                reproducible.append(kernel.spec.deterministic)
        finally:
            torch.use_deterministic_algorithms(False)
    assert reproducible == [False, False, True, True, False, False]


@pytest.mark.parametrize("records", [False, True])
def test_autocast_casts_to_what_it_says_now(emulated: Any, records: bool) -> None:
    q, k, v = (x.requires_grad_(records) for x in qkv())
    for _ in range(2):
        for dtype in (torch.float16, torch.bfloat16):
            with torch.autocast("cpu", dtype):
                assert fg.attention(q, k, v).dtype is dtype


def test_nothing_that_a_call_had_is_kept(emulated: Any) -> None:
    for records in (False, True):
        inputs = [*(x.requires_grad_(records) for x in qkv()), torch.zeros(4)]
        for _ in range(2):
            inputs.append(fg.flash_attn_func(*inputs[:3], alibi_slopes=inputs[3]))
        kept = [weakref.ref(x) for x in inputs]
        del inputs
        assert [x() for x in kept] == [None] * len(kept)


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
    """A way of a call to be unlike ``attention(*qkv(), mask=causal())``, by what differs."""
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


@pytest.mark.parametrize("records", [False, True])
@pytest.mark.parametrize("what", differing() if torch else ())
def test_a_call_with_other_tensors_is_another_call(emulated: Any, what: str, records: bool) -> None:
    def recorded(tensors: Any) -> Any:
        """The same; where gradients are recorded those that want some want none, and the others do."""
        for x in {id(x): x for x in tensors}.values():
            x.requires_grad_(x.requires_grad != records)
        return tensors

    q, k, v = recorded(qkv())
    fg.attention(q, k, v, mask=fg.causal())
    options = CAUSAL, None, None, None, 0
    assert replay.replayed(((q, k, v), options)) is not None
    assert replay.replayed((recorded(differing()[what]), options)) is None


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


def test_options_are_read_again(emulated: Any) -> None:
    q, caches, seqlens = halves(2, 1, 4, 16), halves(2, 2, 40, 2, 16).unbind(), torch.tensor([9, 9], dtype=torch.int32)
    for _ in range(2):
        kvcache(q, *caches, cache_seqlens=seqlens, num_splits=1, softmax_scale=1.0)
    for wrong in ({"num_splits": True}, {"num_splits": 300}, {"window_size": [1, -2]}, {"softcap": -1.0}):
        with pytest.raises(fg.ArgumentError, match=next(iter(wrong))):
            kvcache(q, *caches, cache_seqlens=seqlens, **{"num_splits": 1, "softmax_scale": 1.0, **wrong})
    windowed = kvcache(q, *caches, cache_seqlens=seqlens, num_splits=1, window_size=[4, 0])
    assert torch.equal(windowed, kvcache(q, *caches, cache_seqlens=seqlens, num_splits=1, window_size=(4, 0)))


def test_a_number_in_a_tensor_is_read_again(emulated: Any, reference: Any) -> None:
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
            with pytest.raises(fg.ArgumentError, match=r"cu_seqlens_q\[2\]=4 is below"):
                varlen(q, k, v, given, given, 9, 9)
        else:
            varlen(q, k, v, given, given, 9, 9)


@pytest.mark.parametrize("with_slopes", [False, True])
def test_packed_sequences_of_the_second_call_are_its_own(
    emulated: Any, monkeypatch: pytest.MonkeyPatch, with_slopes: bool
) -> None:
    monkeypatch.setattr("flashgen.torch.function._reads_offsets", lambda kernel: False)
    starts = {1: torch.tensor([0, 4, 9], dtype=torch.int32), 5: torch.tensor([0, 7, 9], dtype=torch.int32)}

    def results(seed: int, records: bool) -> tuple[Any, ...]:
        inputs = [x[0].clone().requires_grad_(records) for x in qkv(seed)]
        slopes = torch.linspace(0.1, 0.4, 4).mul(seed) if with_slopes else None
        out = varlen(*inputs, starts[seed], starts[seed], 9, 9, causal=True, alibi_slopes=slopes)
        return (out.detach(), *(torch.autograd.grad(out.square().sum(), inputs) if records else ()))

    for records in (False, True):
        expected = results(5, records)
        replay.forget_host()
        results(1, records)
        with nothing_found_out():
            found = results(5, records)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_the_number_of_keys_in_pages_is_read_each_time(emulated: Any) -> None:
    q, pages, table = halves(6, 4, 16), halves(2, 6, 5, 2, 16).unbind(), torch.tensor([[4, 0, 2], [1, 5, 3]]).int()
    starts = torch.tensor([0, 2, 6], dtype=torch.int32)

    def call(*keys: int) -> Any:
        counted = torch.tensor([0, *keys], dtype=torch.int32)
        return varlen(q, *pages, starts, counted, 4, 15, causal=True, block_table=table)

    expected = call(7, 20)
    replay.forget_host()
    other = call(9, 24)
    with nothing_found_out():
        assert torch.equal(call(7, 20), expected)
    assert not torch.equal(other, expected)
    seqlens = torch.tensor([7, 13], dtype=torch.int32)
    each = [
        kvcache(q[None, i:j], *pages, cache_seqlens=seqlens[n : n + 1], block_table=table[n : n + 1], causal=True)
        for n, (i, j) in enumerate(((0, 2), (2, 6)))
    ]
    assert torch.allclose(torch.cat(each, 1)[0].float(), expected.float(), atol=2e-3)


def test_as_many_calls_are_kept_as_were_made_last(emulated: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "_CALLS_KEPT", 2)
    given = {i: (halves(1, 3, 1, 16), halves(1, 3, 1, 16), halves(1, 3, 1, 16 * i)[..., :16]) for i in (1, 2, 3)}
    for i in (1, 2, 1, 3):
        fg.attention(*given[i])
    known = [i for i in given if replay.replayed((given[i], ((None,) * 4, None, None, None, 0))) is not None]
    assert known == [1, 3]


def test_a_torch_without_the_comparison_computes_the_same(emulated: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = qkv()
    expected = fg.attention(q, k, v, mask=fg.causal())
    replay.forget_host()
    monkeypatch.setattr(replay, "_Guards", None)
    for _ in range(2):
        assert torch.equal(fg.attention(q, k, v, mask=fg.causal()), expected)
    assert replay.replayed(((q, k, v), (CAUSAL, None, None, None, 0))) is None
