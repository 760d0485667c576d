"""``flash_attn_with_kvcache`` to what looks at operators: compilers, dispatch modes and autograd."""

from __future__ import annotations

from typing import Any

import pytest

import flashgen as fg

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch
fa2 = pytest.importorskip("flashgen.compat.flash_attn").flash_attn_with_kvcache
fa3 = pytest.importorskip("flashgen.compat.flash_attn_interface").flash_attn_with_kvcache

from tests.torch.caches import Caches, ints  # noqa: E402
from tests.torch.results import Recorder  # noqa: E402


def test_compiled_in_one_graph_and_checked_as_operators(emulated: Any) -> None:
    from flashgen.torch.sdpa.forms import Form, program_for

    at, other = Caches(), Caches()

    def step(q: Any, k_cache: Any, v_cache: Any, k: Any, v: Any, seqlens: Any) -> Any:
        return fa2(q, k_cache, v_cache, k, v, at.cos, at.sin, seqlens, at.rows, causal=True)

    arguments = (at.q, at.k_cache, at.v_cache, at.k, at.v, at.seqlens)
    eager = step(*arguments)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(other.q, other.k_cache, other.v_cache, *arguments[3:]), eager)
    assert torch.equal(other.k_cache, at.k_cache)
    text = program_for(Form(None, 0), ())[0].rule
    ops, places = torch.ops.flashgen, (at.seqlens, at.rows)
    attending = (at.q, at.k_cache, at.v_cache, [], text, *places, None, None, 3, 2)
    # What a compiler would do with it was done above.
    torch.library.opcheck(ops.cache_forward.default, attending, test_utils=("test_schema", "test_faketensor"))
    appending = (at.k_cache, at.v_cache, at.k, at.v, at.q, text, *places)
    torch.library.opcheck(ops.cache_append.default, (*appending, None, None, at.cos, at.sin))


@pytest.mark.parametrize("compiled", [False, True])
def test_a_function_of_parameters_runs_and_its_gradients_are_refused(emulated: Any, compiled: bool) -> None:
    """A model that decodes may have been left to record gradients."""
    at = Caches()
    weight = torch.ones(16).half().requires_grad_()

    def step(k_cache: Any, v_cache: Any) -> Any:
        return fa2(at.q * weight, k_cache, v_cache, at.k, at.v, cache_seqlens=at.seqlens, causal=True, **at.places)

    call = torch.compile(step, fullgraph=True, backend="aot_eager") if compiled else step
    out = call(at.k_cache, at.v_cache)
    other = Caches()
    with torch.no_grad():
        assert torch.equal(out, step(other.k_cache, other.v_cache))
    assert torch.equal(at.k_cache, other.k_cache)
    with pytest.raises(fg.ArgumentError, match="has no gradients"):
        out.sum().backward()


def test_a_length_is_left_open_by_a_compiler(emulated: Any) -> None:
    at = Caches()

    def step(length: int) -> Any:
        return fa2(at.q, at.k_cache, at.v_cache, cache_seqlens=length, causal=True, **at.places)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=True)
    compiled(5)
    with torch.compiler.set_stance("fail_on_recompile"):
        for length in (6, 7):
            assert torch.equal(compiled(length), step(length))


@pytest.mark.parametrize("limit", ["window_size", "attention_chunk"])
def test_a_compiled_function_follows_its_limits(emulated: Any, limit: str) -> None:
    """A kernel's limits are no sizes to leave open."""
    at = Caches()

    def step(limited: int) -> Any:
        options = {limit: (limited, 0) if limit == "window_size" else limited}
        return fa3(at.q, at.k_cache, at.v_cache, cache_seqlens=at.seqlens, **options, **at.places)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=True)
    for limited in (2, 4):
        assert torch.equal(compiled(limited), step(limited))


def test_a_dispatch_mode_sees_operators_that_do_the_same(emulated: Any) -> None:
    def step(at: Caches) -> Any:
        # Every other number of a row: kernels want them side by side.
        rows, seqlens = (torch.stack([x, -x], 1)[:, 0] for x in (at.rows, at.seqlens))
        options = {"alibi_slopes": torch.ones(4), "cache_leftpad": ints(2, 0), "causal": True}
        return fa2(at.q, at.k_cache, at.v_cache, at.k, at.v, at.cos, at.sin, seqlens, rows, **options)

    one, other = Caches(), Caches()
    with Recorder() as recorder:
        watched = step(one)
    ops = torch.ops.flashgen
    seen = [op for op in recorder.seen if op.namespace == "flashgen"]
    assert seen == [ops.cache_append.default, ops.cache_forward.default]
    assert torch.equal(step(other), watched)
    assert torch.equal(one.k_cache, other.k_cache)


def test_strided_arguments_are_taken_and_gradients_are_refused(emulated: Any) -> None:
    at = Caches()
    plain = fa2(at.q, at.k_cache, at.v_cache, cache_seqlens=ints(9, 9), **at.places)
    strided = at.q.transpose(-1, -2).contiguous().transpose(-1, -2).requires_grad_()
    out = fa2(strided, at.k_cache, at.v_cache, cache_seqlens=ints(9).expand(2), **at.places)
    assert torch.equal(out, plain)
    with pytest.raises(fg.ArgumentError, match="has no gradients"):
        out.sum().backward()
