"""``flash_attn_with_kvcache`` of both generations, with the emulator in the GPU's place."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

import flashgen as fg

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch
fa2 = pytest.importorskip("flashgen.compat.flash_attn").flash_attn_with_kvcache
fa3 = pytest.importorskip("flashgen.compat.flash_attn_interface").flash_attn_with_kvcache


def ints(*values: Any) -> Any:
    return torch.tensor(values, dtype=torch.int32)


class Caches:
    """Two sequences: keys that were there and keys that come, in a cache with rows to spare or in pages."""

    def __init__(self, page_size: int | None = None, new: int = 3) -> None:
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Any:
            return torch.randn(shape, generator=generator).half()

        self.q, self.k, self.v = normal(2, 3, 4, 16), normal(2, new, 2, 16), normal(2, new, 2, 16)
        self.cos, self.sin = normal(40, 4), normal(40, 4)
        self.seqlens, self.rows = ints(10, 25), ints(2, 0)
        shape = (3, 40, 2, 16) if page_size is None else (30, page_size, 2, 16)
        self.k_cache, self.v_cache, self.page_size = normal(*shape), normal(*shape), page_size
        each = 40 // (page_size or 40)
        self.table = torch.randperm(30, generator=generator)[: 2 * each].view(2, each).int()

    @property
    def places(self) -> dict[str, Any]:
        return {"cache_batch_idx": self.rows} if self.page_size is None else {"block_table": self.table}

    def keys(self, cache: Any) -> Any:
        """What a cache has of each sequence, (2, 40, 2, 16)."""
        at = self.rows if self.page_size is None else self.table
        return cache[at.long()].reshape(2, 40, 2, 16)

    def expected(self, k: Any, reference: Any, q: Any, mask: Any = None, lengths: Any = None) -> Any:
        """Attention in float64 to the keys of each sequence, and to k behind them."""
        found = []
        for b, length in enumerate(self.seqlens.tolist() if lengths is None else lengths):
            keys = torch.cat([self.keys(self.k_cache)[b, :length], k[b]])
            values = torch.cat([self.keys(self.v_cache)[b, :length], self.v[b, : len(k[b])]])
            allowed = None if mask is None else mask(q.shape[1], len(keys))
            found.append(reference(q[b : b + 1], keys[None], values[None], allowed))
        return [torch.cat(parts) for parts in zip(*found, strict=True)]


def causal(len_q: int, len_kv: int) -> Any:
    return torch.ones(len_q, len_kv, dtype=torch.bool).tril(len_kv - len_q)


def turned(x: Any, at: Caches, steps: Any, interleaved: bool) -> Any:
    """The first 8 elements turned in pairs, in float64."""
    positions = at.seqlens.long()[:, None] + steps
    cos, sin = at.cos.double()[positions][:, :, None], at.sin.double()[positions][:, :, None]
    x = x.double()
    a, b = (x[..., 0:8:2], x[..., 1:8:2]) if interleaved else (x[..., :4], x[..., 4:8])
    pair = a * cos - b * sin, a * sin + b * cos
    first = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat([first, x[..., 8:]], -1)


def test_the_signatures_are_flash_attns() -> None:
    names = list(inspect.signature(fa2).parameters)
    assert names[:9] == [
        "q",
        "k_cache",
        "v_cache",
        "k",
        "v",
        "rotary_cos",
        "rotary_sin",
        "cache_seqlens",
        "cache_batch_idx",
    ]
    assert names[9:] == [
        *("cache_leftpad", "block_table", "softmax_scale", "causal", "window_size", "softcap", "rotary_interleaved"),
        *("alibi_slopes", "num_splits", "return_softmax_lse"),
    ]
    defaults = {n: p.default for n, p in inspect.signature(fa2).parameters.items()}
    assert (defaults["window_size"], defaults["rotary_interleaved"], defaults["num_splits"]) == ((-1, -1), True, 0)
    assert fg.flash_attn_with_kvcache is fa2
    names = list(inspect.signature(fa3).parameters)
    assert names[5:13] == [
        *("qv", "rotary_cos", "rotary_sin", "cache_seqlens", "cache_batch_idx", "cache_leftpad", "page_table"),
        "cu_seqlens_q",
    ]
    assert names[13:] == [
        *("cu_seqlens_k_new", "max_seqlen_q", "rotary_seqlens", "q_descale", "k_descale", "v_descale"),
        *("softmax_scale", "causal", "window_size", "attention_chunk", "softcap", "rotary_interleaved"),
        *("scheduler_metadata", "num_splits", "pack_gqa", "sm_margin", "return_softmax_lse"),
    ]


@pytest.mark.parametrize(
    ("page_size", "interleaved", "is_causal"),
    [(None, True, True), (None, False, False), (5, True, True), (5, False, True)],
)
def test_new_keys_are_turned_put_into_the_cache_and_attended_to(
    emulated: Any, reference: Any, page_size: int | None, interleaved: bool, is_causal: bool
) -> None:
    at = Caches(page_size)
    q = turned(at.q, at, torch.arange(3) if is_causal else torch.zeros(3).long(), interleaved)
    k = turned(at.k, at, torch.arange(3), interleaved)
    exact, exact_lse = at.expected(k, reference, q, causal if is_causal else None)
    before = at.keys(at.k_cache).clone(), at.keys(at.v_cache).clone()
    out, lse = fa2(
        *(at.q, at.k_cache, at.v_cache, at.k, at.v, at.cos, at.sin, at.seqlens),
        causal=is_causal,
        rotary_interleaved=interleaved,
        num_splits=2,
        return_softmax_lse=True,
        **at.places,
    )
    assert torch.allclose(out.double(), exact, atol=5e-3)
    assert torch.allclose(lse.double(), exact_lse, atol=5e-3)
    for b, length in enumerate(at.seqlens.tolist()):
        before[0][b, length : length + 3], before[1][b, length : length + 3] = k[b].half(), at.v[b]
    assert torch.allclose(at.keys(at.k_cache).double(), before[0].double(), atol=1e-3, rtol=1e-3)
    assert torch.equal(at.keys(at.v_cache), before[1])


def test_one_length_may_be_a_number_and_no_length_is_all_there_is_room_for(emulated: Any, reference: Any) -> None:
    at = Caches()
    nothing = at.k[:, :0]
    for given, lengths in ((7, [7, 7]), (None, [40, 40])):
        exact, _ = at.expected(nothing, reference, at.q, lengths=lengths)
        out = fa2(at.q, at.k_cache, at.v_cache, cache_seqlens=given, **at.places)
        assert torch.allclose(out.double(), exact, atol=5e-3)


def test_leftpad_window_softcap_and_alibi_count_from_the_first_key(emulated: Any) -> None:
    at, left = Caches(), ints(4, 0)
    options = {"causal": True, "window_size": (6, 0), "softcap": 3.0, "alibi_slopes": torch.rand(2, 4)}
    out = fa2(at.q, at.k_cache, at.v_cache, cache_seqlens=at.seqlens, cache_leftpad=left, **at.places, **options)
    for b, (first, length) in enumerate(zip(left.tolist(), at.seqlens.tolist(), strict=True)):
        own = {**options, "alibi_slopes": options["alibi_slopes"][b : b + 1]}
        k, v = (at.keys(cache)[b : b + 1, first:length] for cache in (at.k_cache, at.v_cache))
        alone = fg.flash_attn_func(at.q[b : b + 1], k, v, **own)
        assert torch.allclose(out[b : b + 1].float(), alone.float(), atol=2e-3)


def test_the_third_generation_has_chunks_positions_and_values_of_their_own_width(emulated: Any, reference: Any) -> None:
    at = Caches(5)
    wide = torch.cat([at.v_cache, at.v_cache], -1)
    out, lse = fa3(
        *(at.q, at.k_cache, wide),
        cache_seqlens=at.seqlens,
        page_table=at.table,
        attention_chunk=4,
        pack_gqa=True,
        return_softmax_lse=True,
    )
    exact, exact_lse = at.expected(
        at.k[:, :0], reference, at.q, lambda n, m: (torch.arange(m - n, m) // 4)[:, None] == torch.arange(m) // 4
    )
    assert torch.allclose(out.double(), torch.cat([exact, exact], -1), atol=5e-3)
    assert torch.allclose(lse.double(), exact_lse, atol=5e-3)
    # New keys at the positions of seqlens, said twice.
    angles = {"rotary_cos": at.cos, "rotary_sin": at.sin, "cache_seqlens": at.seqlens, "causal": True}
    again = Caches(5)
    first = fa3(at.q, at.k_cache, at.v_cache, at.k, at.v, page_table=at.table, **angles)
    second = fa3(
        *(again.q, again.k_cache, again.v_cache, again.k, again.v),
        rotary_seqlens=at.seqlens,
        page_table=at.table,
        **angles,
    )
    assert torch.equal(first, second)


@pytest.mark.parametrize("page_size", [None, 5])
def test_packed_queries_are_those_of_each_sequence(emulated: Any, page_size: int | None) -> None:
    at = Caches(page_size)
    places = at.places if page_size is None else {"page_table": at.table}
    options = {"cache_seqlens": at.seqlens, "causal": True, "return_softmax_lse": True, **places}
    alone, alone_lse = fa3(at.q, at.k_cache, at.v_cache, **options)
    packed = torch.cat([at.q[0], at.q[1, 1:]])
    starts = {"cu_seqlens_q": ints(0, 3, 5), "max_seqlen_q": 3}
    out, lse = fa3(packed, at.k_cache, at.v_cache, **options, **starts, num_splits=2)
    assert torch.allclose(out.float(), torch.cat([alone[0], alone[1, 1:]]).float(), atol=2e-3)
    assert torch.allclose(lse, torch.cat([alone_lse[0], alone_lse[1, :, 1:]], -1), atol=1e-4)
    at.seqlens = ints(9, 9)
    one_length, _ = fa3(packed, at.k_cache, at.v_cache, **{**options, "cache_seqlens": at.seqlens}, **starts)
    as_number, _ = fa3(packed, at.k_cache, at.v_cache, **{**options, "cache_seqlens": 9}, **starts)
    assert torch.equal(one_length, as_number)
    with pytest.raises(fg.ArgumentError, match="do not go with cu_seqlens_q"):
        fa3(packed, at.k_cache, at.v_cache, at.k, at.v, None, at.cos, at.sin, **options, **starts)


def test_the_varlen_function_finds_keys_in_pages(emulated: Any) -> None:
    at = Caches(5)
    options = {"causal": True, "softmax_scale": 0.3}
    expected, expected_lse = fa3(
        *(at.q, at.k_cache, at.v_cache),
        cache_seqlens=at.seqlens,
        page_table=at.table,
        return_softmax_lse=True,
        **options,
    )
    starts = ints(0, 3, 6), ints(0, 10, 35)
    out, lse, _ = fg.flash_attn_varlen_func(
        *(at.q.flatten(0, 1), at.k_cache, at.v_cache, *starts, 3, 25),
        block_table=at.table,
        return_attn_probs=True,
        **options,
    )
    assert torch.allclose(out.float(), expected.flatten(0, 1).float(), atol=2e-3)
    assert torch.allclose(lse, torch.cat([*expected_lse], -1), atol=1e-4)


def test_compiled_in_one_graph_and_checked_as_operators(emulated: Any) -> None:
    from flashgen.torch.forms import Form, program_for

    at, other = Caches(), Caches()

    def step(q: Any, k_cache: Any, v_cache: Any, k: Any, v: Any, seqlens: Any) -> Any:
        return fa2(q, k_cache, v_cache, k, v, at.cos, at.sin, seqlens, at.rows, causal=True)

    arguments = (at.q, at.k_cache, at.v_cache, at.k, at.v, at.seqlens)
    eager = step(*arguments)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(other.q, other.k_cache, other.v_cache, *arguments[3:]), eager)
    assert torch.equal(other.k_cache, at.k_cache)
    text = program_for(Form(None, 0))[0].text
    ops, places = torch.ops.flashgen, (at.seqlens, at.rows)
    attending = (at.q, at.k_cache, at.v_cache, [], text, *places, None, None, 3, 2)
    # What a compiler would do with it was done above.
    torch.library.opcheck(ops.cache_forward.default, attending, test_utils=("test_schema", "test_faketensor"))
    appending = (at.k_cache, at.v_cache, at.k, at.v, at.q, text, *places)
    torch.library.opcheck(ops.cache_append.default, (*appending, None, None, at.cos, at.sin))


def test_a_dispatch_mode_sees_operators_that_do_the_same(emulated: Any) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Recorder(TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    def step(at: Caches) -> Any:
        # Every other number of a row: kernels want them side by side.
        rows, seqlens = (torch.stack([x, -x], 1)[:, 0] for x in (at.rows, at.seqlens))
        options = {"alibi_slopes": torch.ones(4), "cache_leftpad": ints(2, 0), "causal": True}
        return fa2(at.q, at.k_cache, at.v_cache, at.k, at.v, at.cos, at.sin, seqlens, rows, **options)

    seen: list[Any] = []
    one, other = Caches(), Caches()
    with Recorder():
        watched = step(one)
    ops = torch.ops.flashgen
    assert [op for op in seen if op.namespace == "flashgen"] == [ops.cache_append.default, ops.cache_forward.default]
    assert torch.equal(step(other), watched)
    assert torch.equal(one.k_cache, other.k_cache)


def test_one_length_in_a_tensor_without_dimensions_is_refused(emulated: Any) -> None:
    at = Caches()
    with pytest.raises(fg.ArgumentError, match=r"cache\.seqlens is torch.int32 of shape \(\); pass 2 integers"):
        fa2(at.q, at.k_cache, at.v_cache, cache_seqlens=torch.tensor(9, dtype=torch.int32), **at.places)


def test_strided_arguments_are_taken_and_gradients_are_refused(emulated: Any) -> None:
    at = Caches()
    plain = fa2(at.q, at.k_cache, at.v_cache, cache_seqlens=ints(9, 9), **at.places)
    strided = at.q.transpose(-1, -2).contiguous().transpose(-1, -2).requires_grad_()
    out = fa2(strided, at.k_cache, at.v_cache, cache_seqlens=ints(9).expand(2), **at.places)
    assert torch.equal(out, plain)
    with pytest.raises(fg.ArgumentError, match="has no gradients"):
        out.sum().backward()


@pytest.mark.parametrize(
    ("function", "options", "words"),
    [
        (fa2, {"v": None}, "k and v go together"),
        (fa2, {"cache_seqlens": None}, "cache_seqlens=None"),
        (fa2, {"k": None, "v": None, "rotary_cos": 1, "rotary_sin": 1}, "pass k and v too"),
        (fa2, {"rotary_cos": 1}, "rotary_cos and rotary_sin go together"),
        (fa2, {"softcap": -1.0}, "softcap=-1.0"),
        (fa2, {"alibi_slopes": torch.ones(3)}, r"alibi_slopes has shape \(3,\)"),
        (fa2, {"num_splits": 1000}, "num_splits=1000 is out of range"),
        (fa2, {"k": torch.ones(2, 3, 16)}, "k has shape .* must have 4 dimensions"),
        (fa3, {"qv": 1}, "qv is not supported"),
        (fa3, {"cu_seqlens_k_new": 1}, "cu_seqlens_k_new is not supported"),
        (fa3, {"cu_seqlens_q": torch.ones(3)}, "q has shape .* must have 3 dimensions"),
        (fa3, {"v_descale": 1}, "v_descale is not supported"),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(emulated: Any, function: Any, options: Any, words: str) -> None:
    at = Caches()
    given = {"k": at.k, "v": at.v, "cache_seqlens": at.seqlens, **options}
    with pytest.raises(fg.ArgumentError, match=words):
        function(at.q, at.k_cache, at.v_cache, **given)
    assert emulated == []
