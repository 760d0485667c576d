"""Sequences that lie behind one another, in torch: each as if it were alone, for every path and every name."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest

import flashgen as fg

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch
fa3 = pytest.importorskip("flashgen.compat.flash_attn_interface")

from tests.torch.packed import LENGTHS, close, forward_and_backward, sequences, starts  # noqa: E402
from tests.torch.results import same  # noqa: E402

P = 0.3


def causal(q: Any, k: Any, v: Any, of: Any = None, **options: Any) -> Any:
    return fg.attention(q, k, v, mask=fg.causal(), sequences=of or sequences(), return_lse=True, **options)


def alone(q: Any, k: Any, v: Any, number: int, call: Any) -> tuple[Any, ...]:
    """What a call on a batch of one sequence gives."""
    (first, last), (of_k, to_k) = (starts(*n)[number : number + 2].tolist() for n in zip(*LENGTHS, strict=True))
    mine = (x.detach()[None, a:b].requires_grad_() for x, a, b in ((q, first, last), (k, of_k, to_k), (v, of_k, to_k)))
    out, lse, dq, dk, dv = forward_and_backward(call, *mine)
    return out[0], lse[0], dq[0], dk[0], dv[0]


def cut(results: tuple[Any, ...], number: int) -> tuple[Any, ...]:
    """The part of a packed call's results that is one sequence's."""
    of_q, of_k = (slice(*starts(*n)[number : number + 2].tolist()) for n in zip(*LENGTHS, strict=True))
    out, lse, dq, dk, dv = results
    return out[of_q], lse[:, of_q], dq[of_q], dk[of_k], dv[of_k]


def test_a_sequence_gives_what_it_gives_alone(emulated: Any, rows: Any) -> None:
    found = forward_and_backward(causal, *rows())
    assert [tuple(x.shape) for x in found[:2]] == [(14, 6, 16), (6, 14)]

    def dense(q: Any, k: Any, v: Any) -> Any:
        return fg.attention(q, k, v, mask=fg.causal(), return_lse=True)

    for number in (0, 2):
        expected = alone(*rows(), number, dense)
        assert same(cut(found, number)[:2], expected[:2])
        assert close(cut(found, number)[2:], expected[2:])
    assert not found[3][7:10].any(), "keys that no query attends to have a gradient"
    assert {spec.varlen for spec in emulated} == {True, False}


def test_heads_first(emulated: Any, rows: Any) -> None:
    tensors = tuple(x.detach() for x in rows())
    first = fg.attention(*(x.transpose(0, 1) for x in tensors), mask=fg.causal(), layout="bhsd", sequences=sequences())
    assert torch.equal(first.transpose(0, 1), causal(*tensors)[0])


@pytest.mark.parametrize("score", [None, fg.softcap(2.0)])
def test_rows_beyond_what_is_used_take_no_part(emulated: Any, rows: Any, score: Any) -> None:
    q, k, v = rows()
    used = {"seqused_q": torch.tensor([3, 0, 9]).int(), "seqused_k": torch.tensor([7, 2, 4]).int()}
    with torch.no_grad():
        q[3:5], k[7 + 2 : 10], k[14:], v[14:] = (float("nan"),) * 4
    out, lse, *gradients = forward_and_backward(lambda *x: causal(*x, sequences(**used), score=score), q, k, v)
    assert not any(x.isnan().any() for x in (out, *gradients))
    assert not out[3:5].any()
    assert (lse[:, 3:5] == -torch.inf).all()
    expected = fg.attention(q[None, :3], k[None, :7], v[None, :7], mask=fg.causal(), score=score)
    assert torch.equal(out[:3], expected[0])


def test_pairs_are_dropped_by_sequence(emulated: Any, rows: Any) -> None:
    """Sequences of the same length drop what a batch drops; which that is, the oracle says elsewhere."""
    q, k, v = rows(2 * 9, 2 * 12)
    even = sequences(((9, 12),) * 2)
    packed = forward_and_backward(lambda *x: causal(*x, even, dropout_p=P, deterministic=True), q, k, v)

    def dense(q: Any, k: Any, v: Any) -> Any:
        batch = (q.unflatten(0, (2, 9)), k.unflatten(0, (2, 12)), v.unflatten(0, (2, 12)))
        options = {"dropout_p": P, "deterministic": True, "return_lse": True}
        out, lse = fg.attention(*batch, mask=fg.causal(), **options)
        return out.flatten(0, 1), lse.transpose(0, 1).flatten(1)

    assert same(packed, forward_and_backward(dense, q, k, v))
    assert not torch.equal(packed[0], causal(q, k, v, even, dropout_p=P)[0])


def test_where_sequences_begin_must_stay_until_the_backward_pass(emulated: Any, rows: Any) -> None:
    of = sequences()
    for score in (None, fg.softcap(2.0)):
        out, _ = causal(*rows(), of, score=score)
        of.cu_seqlens_q[1] = 4
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_opcheck_finds_nothing(emulated: Any, rows: Any) -> None:
    options = {"deterministic": True, "dropout_p": P, "rng_state": torch.tensor([1, 2])}
    of, slopes = sequences(seqused_k=torch.tensor([7, 2, 4]).int()), torch.rand(6).requires_grad_()
    program = fg.torch.program.written_program(fg.causal(), fg.alibi(slopes))[0].rule
    places = (of.cu_seqlens_q, of.cu_seqlens_k, None, of.seqused_k, 9, 8)
    arguments = (*rows(), *places, [slopes], program)
    torch.library.opcheck(torch.ops.flashgen.varlen_forward.default, arguments, options)
    arguments = tuple(x.detach() if torch.is_tensor(x) else x for x in arguments)
    out, lse = torch.ops.flashgen.varlen_forward(*arguments, **options)
    gradients = (torch.ones_like(out), *arguments[:3], out, lse, *arguments[3:])
    for wanted in ([True], [False], []):
        more = options | {"wanted": wanted, "dlse": torch.ones_like(lse)}
        checks = ("test_schema", "test_faketensor")
        torch.library.opcheck(torch.ops.flashgen.varlen_backward.default, gradients, more, test_utils=checks)


def test_flops_are_counted_within_sequences(emulated: Any, rows: Any) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        out, _ = causal(*rows(), sequences(seqused_k=torch.tensor([7, 3, 4]).int()))
        out.sum().backward()
    assert counter.get_total_flops() == (2 + 5) * 2 * 6 * (5 * 7 + 9 * 4) * 16


def test_autocast_checkpoints_and_vmap_go_through_the_operator(emulated: Any, rows: Any) -> None:
    tensors = tuple(x.detach() for x in rows())
    expected = causal(*tensors)[0]
    with torch.autocast("cpu", torch.float16):
        assert torch.equal(causal(*(x.float() for x in tensors))[0], expected)
    q, k, v = tensors
    mapped = torch.vmap(lambda q: causal(q, k, v)[0])(torch.stack([q, 2 * q]))
    assert torch.equal(mapped[0], expected)
    assert torch.equal(mapped[1], causal(2 * q, k, v)[0])
    assert torch.ops.flashgen.varlen_forward.default in fg.torch.SAC_SAVE


def test_the_signatures_are_flash_attns() -> None:
    def names(function: Any) -> list[str]:
        return [p.name if p.default is p.empty else f"{p.name}={p.default}" for p in parameters(function)]

    def parameters(function: Any) -> Any:
        return inspect.signature(function).parameters.values()

    where = ["cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"]
    tail = ["dropout_p=0.0", "softmax_scale=None", "causal=False", "window_size=(-1, -1)", "softcap=0.0"]
    tail += ["alibi_slopes=None", "deterministic=False", "return_attn_probs=False"]
    assert names(fg.flash_attn_varlen_func) == ["q", "k", "v", *where, *tail, "block_table=None"]
    assert names(fg.flash_attn_varlen_kvpacked_func) == ["q", "kv", *where, *tail]
    assert names(fg.flash_attn_varlen_qkvpacked_func) == ["qkv", "cu_seqlens", "max_seqlen", *tail]
    dense = names(fa3.flash_attn_func)
    used = ["seqused_q=None", "seqused_k=None"]
    assert names(fa3.flash_attn_varlen_func) == [*dense[:3], *where, *used, *dense[3:]]


def test_options_mean_what_they_mean_for_a_batch(emulated: Any, rows: Any) -> None:
    of, alibi = sequences(), torch.rand(3, 6)
    options = {"causal": True, "window_size": (4, 2), "softcap": 2.0, "softmax_scale": 0.4}
    where = of.cu_seqlens_q, of.cu_seqlens_k, 9, 8

    def packed(q: Any, k: Any, v: Any) -> Any:
        more = {"alibi_slopes": alibi, "deterministic": True, "return_attn_probs": True}
        return fg.flash_attn_varlen_func(q, k, v, *where, **options, **more)[:2]

    found = forward_and_backward(packed, *rows())
    for number in (0, 2):

        def dense(q: Any, k: Any, v: Any, mine: Any = alibi[number : number + 1]) -> Any:
            return fg.flash_attn_func(q, k, v, **options, alibi_slopes=mine, return_attn_probs=True)[:2]

        assert close(cut(found, number), alone(*rows(), number, dense))
    assert {spec.deterministic for spec in emulated if spec.varlen} == {True}


def test_packed_tensors_have_packed_gradients(emulated: Any, rows: Any) -> None:
    q, k, v = rows(14, 14, 2, 2)
    do, of = torch.randn(14, 2, 16).half(), starts(5, 0, 9)
    out = fg.flash_attn_varlen_func(q, k, v, of, of, 9, 9, causal=True, deterministic=True)
    expected = torch.autograd.grad(out, (q, k, v), do)
    qkv = torch.stack([q, k, v], 1).detach().requires_grad_()
    out = fg.flash_attn_varlen_qkvpacked_func(qkv, of, 9, causal=True, deterministic=True)
    assert same(torch.autograd.grad(out, qkv, do)[0].unbind(1), expected)
    kv = torch.stack([k, v], 1).detach().requires_grad_()
    out = fg.flash_attn_varlen_kvpacked_func(q, kv, of, of, 9, 9, causal=True, deterministic=True)
    dq, dkv = torch.autograd.grad(out, (q, kv), do)
    assert same((dq, *dkv.unbind(1)), expected)


def test_flash_attention_3s_function_takes_what_is_used(emulated: Any, rows: Any) -> None:
    tensors, used = tuple(x.detach() for x in rows()), {"seqused_k": torch.tensor([7, 2, 4]).int()}
    of = sequences(**used)
    where = of.cu_seqlens_q, of.cu_seqlens_k, 9, 8
    expected = causal(*tensors, of, scale=0.4)
    assert same(
        fa3.flash_attn_varlen_func(*tensors, *where, None, used["seqused_k"], 0.4, True, return_attn_probs=True),
        expected,
    )
    assert torch.equal(
        fa3.flash_attn_varlen_func(*tensors, *where, **used, causal=True, softmax_scale=0.4), expected[0]
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"block_table": torch.zeros(3, 1).int(), "dropout_p": 0.5},
            r"dropout_p=0\.5 does not go with block_table",
        ),
        ({"cu_seqlens_q": [0, 5, 5, 14]}, r"sequences\.cu_seqlens_q is a list; pass a torch\.Tensor"),
        ({"cu_seqlens_k": None}, "cu_seqlens_k=None says not where sequences begin"),
        ({"cu_seqlens_k": torch.zeros(4)}, r"sequences\.cu_seqlens_k is fp32 .*pass 4 contiguous int32"),
        ({"cu_seqlens_k": starts(7, 8)}, r"sequences\.cu_seqlens_k is .* of shape \(3,\); pass 4 contiguous int32"),
        ({"max_seqlen_q": 9.0}, "max_seqlen_q=9.0 is out of range"),
        ({"max_seqlen_k": 7}, "sequence 2 of .*cu_seqlens_k has 8 rows, more than max_seqlen_k=7"),
        ({"alibi_slopes": torch.ones(2, 6)}, r"alibi_slopes has shape \(2, 6\); it must be \(6,\) or \(3, 6\)"),
        ({"q": torch.zeros(2, 7, 6, 16).half()}, r"q has shape \(2, 7, 6, 16\).* takes \(total_q, heads_q, head_dim\)"),
    ],
)
def test_what_is_not_done_is_refused_by_name(emulated: Any, rows: Any, change: Any, words: str) -> None:
    of = sequences()
    given = dict(zip("qkv", (x.detach() for x in rows()), strict=True))
    where = {name: getattr(of, name) for name in ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")}
    with pytest.raises(fg.ArgumentError, match=words):
        fg.flash_attn_varlen_func(**(given | where | {"causal": True} | change))


def test_lengths_may_be_numbers_of_other_libraries(emulated: Any, rows: Any) -> None:
    of, tensors = sequences(), [x.detach() for x in rows()]
    found = [
        fg.flash_attn_varlen_func(*tensors, of.cu_seqlens_q, of.cu_seqlens_k, number(9), number(8))
        for number in (int, np.int64, torch.tensor)
    ]
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_sequences_and_ranks_go_together(emulated: Any, rows: Any) -> None:
    q, k, v = rows()
    with pytest.raises(fg.ArgumentError, match=r"sequences=3 says not where sequences begin; pass flashgen\.Sequences"):
        fg.attention(q, k, v, sequences=3)
    with pytest.raises(
        fg.ArgumentError, match=r"q is a Tensor of shape \(1, 14, 6, 16\); pass .*\(heads, total length, dim"
    ):
        fg.attention(q[None], k, v, sequences=sequences(), layout="bhsd")
    with pytest.raises(fg.ArgumentError, match=r"qkv has shape \(14, 2, 6, 16\); it must be \(total, 3, heads"):
        fg.flash_attn_varlen_qkvpacked_func(torch.zeros(14, 2, 6, 16), starts(14), 14)
