"""``fp8_attention`` on torch tensors, with the emulator in the GPU's place."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import flashgen as fg

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from flashgen.torch.replay import forget_host  # noqa: E402


def plain(made: Any) -> list[Any]:
    return [x.detach() for x in made]


def of_arrays(*tensors: Any, **options: Any) -> list[Any]:
    """The same call on NumPy arrays."""
    return [torch.from_numpy(np.asarray(x)) for x in fg.fp8_attention(*(x.numpy() for x in tensors), **options)]


def assert_equal(found: Any, wanted: Any) -> None:
    for a, b in zip(found, wanted, strict=True):
        assert torch.equal(a, b)


def test_a_call_and_its_replay_have_the_bits_of_the_call_on_arrays(emulated: Any, inputs: Any) -> None:
    q, k, v = plain(inputs(dim=32))
    options = {"mask": fg.causal(), "scale": 0.4, "return_lse": True}
    want = of_arrays(q, k, v, **options)
    for _ in range(3):
        assert_equal(fg.fp8_attention(q, k, v, **options), want)
    assert len(emulated) == 1
    assert want[0].dtype == q.dtype
    # A call like it with other numbers is no copy of its results.
    assert not torch.equal(fg.fp8_attention(-q, k, v, **options)[0], want[0])


def test_options_change_the_call(emulated: Any, inputs: Any) -> None:
    q, k, v = plain(inputs(dim=32))
    outs = [
        fg.fp8_attention(q, k, v, **options)
        for options in ({}, {"rotate": False}, {"scale": 0.9}, {"mask": fg.causal()}, {"score": fg.softcap(1.0)})
    ]
    for i, out in enumerate(outs):
        assert all(not torch.equal(out, other) for other in outs[:i])


def test_layouts_and_strides_do_not_change_the_result(emulated: Any, inputs: Any) -> None:
    q, k, v = plain(inputs(dim=32))
    want = fg.fp8_attention(q, k, v)
    assert torch.equal(fg.fp8_attention(*(x.transpose(1, 2) for x in (q, k, v)), layout="bhsd").transpose(1, 2), want)
    apart = [torch.stack([x, x], -1)[..., 0] for x in (q, k, v)]
    assert torch.equal(fg.fp8_attention(*apart), want)


def test_keys_of_one_batch_are_those_of_each_sequence(emulated: Any, inputs: Any) -> None:
    q, k, v = plain(inputs(dim=32))
    want = fg.fp8_attention(q, k[:1].expand_as(k), v[:1].expand_as(v))
    assert torch.equal(fg.fp8_attention(q, k[:1], v[:1]), want)


def test_packed_sequences_are_those_alone(emulated: Any, rows: Any) -> None:
    q, k, v = plain(rows())
    starts_q, starts_k = torch.tensor([0, 5, 14]).int(), torch.tensor([0, 10, 18]).int()
    sequences = fg.Sequences(starts_q, starts_k, 9, 10)
    found = fg.fp8_attention(q, k, v, mask=fg.causal(), sequences=sequences)
    replayed = fg.fp8_attention(q, k, v, mask=fg.causal(), sequences=sequences)
    parts = [
        fg.fp8_attention(q[None, a:b], k[None, c:d], v[None, c:d], mask=fg.causal())[0]
        for a, b, c, d in ((0, 5, 0, 10), (5, 14, 10, 18))
    ]
    assert torch.equal(found, torch.cat(parts))
    assert torch.equal(replayed, found)


def test_captured_tensors_may_change_between_calls(emulated: Any, inputs: Any) -> None:
    q, k, v = plain(inputs(dim=16))
    slopes = torch.full((4,), 0.5)
    for size in (0.5, 3.0):
        slopes.fill_(size)
        found = fg.fp8_attention(q, k, v, score=fg.alibi(slopes))
        want = of_arrays(q, k, v, score=fg.alibi(np.full(4, size, np.float32)), return_lse=True)[0]
        assert torch.equal(found, want)


@pytest.mark.parametrize("is_packed", [False, True])
def test_it_compiles_in_one_graph_with_the_bits_of_eager_calls(
    emulated: Any, inputs: Any, rows: Any, is_packed: bool
) -> None:
    options: dict[str, Any] = {"mask": fg.causal()}
    if is_packed:
        starts = torch.tensor([0, 5, 14]).int()
        options["sequences"] = fg.Sequences(starts, starts, 9, 9)
    tensors = plain(rows(14, 14) if is_packed else inputs(dim=32))
    want = fg.fp8_attention(*tensors, **options)
    compiled = torch.compile(lambda *x: fg.fp8_attention(*x, **options), backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(*tensors), want)


def test_the_operator_does_what_torch_asks_of_operators(emulated: Any, inputs: Any) -> None:
    q, k, v = plain(inputs(dim=16))
    arguments = (q, k, v, [], '{"mask": "causal"}', 64)
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(torch.ops.flashgen.fp8_forward, arguments, test_utils=tests)


def test_gradients_are_refused_when_they_are_asked_for(emulated: Any, inputs: Any) -> None:
    q, k, v = inputs(dim=16)
    out = fg.fp8_attention(q, k, v)
    assert torch.equal(out, fg.fp8_attention(*plain((q, k, v))))
    with pytest.raises(fg.ArgumentError, match="fp8_attention has no gradients; train with flashgen"):
        out.sum().backward()


def test_autocast_makes_16_bits_of_float32(emulated: Any, inputs: Any) -> None:
    q, k, v = plain(inputs(dim=16))
    wide = [x.float() for x in (q, k, v)]
    with torch.autocast("cpu", torch.float16):
        found = fg.fp8_attention(*wide)
    assert torch.equal(found, fg.fp8_attention(q, k, v))
    with pytest.raises(fg.ArgumentError, match="convert it: fp8_attention quantizes float16"):
        fg.fp8_attention(*wide)


def test_without_a_gpu_the_error_says_what_to_do(inputs: Any) -> None:
    forget_host()
    with pytest.raises(fg.ArgumentError, match="q is on the CPU, but attention runs on NVIDIA GPUs"):
        fg.fp8_attention(*plain(inputs(dim=16)))


def test_arrays_of_two_libraries_are_refused(emulated: Any, inputs: Any) -> None:
    q, k, v = plain(inputs(dim=16))
    with pytest.raises(fg.ArgumentError, match="k is a ndarray"):
        fg.fp8_attention(q, k.numpy(), v)


def test_a_bad_scale_is_refused_before_anything_is_launched(
    emulated: Any, inputs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches: list[Any] = []
    monkeypatch.setattr("flashgen.torch.operators.quantized.run", lambda *given: launches.append(given))
    with pytest.raises(fg.ArgumentError, match=r"scale=0\.0 must be a finite number above 0"):
        fg.fp8_attention(*plain(inputs(dim=32)), scale=0.0)
    assert not launches
