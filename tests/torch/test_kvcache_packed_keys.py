"""Packed new keys (FlashAttention-3's ``cu_seqlens_k_new``), and packed queries with rotary embedding."""

from __future__ import annotations

from typing import Any

import pytest

import flashgen as fg

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch
fa3 = pytest.importorskip("flashgen.compat.flash_attn_interface").flash_attn_with_kvcache

from tests.torch.caches import Caches, ints  # noqa: E402

#: The first sequence has 3 new keys, the second 1, and the last row is of neither.
STARTS = ints(0, 3, 4)


def places(at: Caches) -> dict[str, Any]:
    return {"page_table": at.table} if at.page_size else {"cache_batch_idx": at.rows}


def packed(x: Any) -> Any:
    """The new rows of ``Caches``, packed; what follows must not be read."""
    return torch.cat([x[0], x[1, :1], torch.full_like(x[1, :1], float("nan"))])


def one_by_one(at: Caches, **options: Any) -> tuple[Any, Any]:
    """The same by a call for each sequence, without anything packed."""
    results = []
    for b, new in enumerate((3, 1)):
        where = {"page_table": at.table[b : b + 1]} if at.page_size else {"cache_batch_idx": at.rows[b : b + 1]}
        results.append(
            fa3(
                *(at.q[b : b + 1], at.k_cache, at.v_cache, at.k[b : b + 1, :new], at.v[b : b + 1, :new]),
                cache_seqlens=at.seqlens[b : b + 1],
                return_softmax_lse=True,
                **where,
                **options,
            )
        )
    return tuple(torch.cat(parts) for parts in zip(*results, strict=True))


def close(a: Any, b: Any) -> bool:
    return bool(torch.allclose(a.float(), b.float(), atol=2e-3))


@pytest.mark.parametrize("rotary", [None, "interleaved", "halves"])
@pytest.mark.parametrize("page_size", [None, 5])
def test_packed_keys_go_where_they_would_go_alone(emulated: Any, page_size: int | None, rotary: str | None) -> None:
    at, other = Caches(page_size), Caches(page_size)
    options: dict[str, Any] = {"causal": True}
    if rotary:
        options |= {"rotary_cos": at.cos, "rotary_sin": at.sin, "rotary_interleaved": rotary == "interleaved"}
    out, lse = fa3(
        *(at.q, at.k_cache, at.v_cache, packed(at.k), packed(at.v)),
        cache_seqlens=at.seqlens,
        cu_seqlens_k_new=STARTS,
        return_softmax_lse=True,
        **places(at),
        **options,
    )
    exact, exact_lse = one_by_one(other, **options)
    assert torch.equal(at.k_cache, other.k_cache)
    assert torch.equal(at.v_cache, other.v_cache)
    assert close(out, exact)
    assert torch.allclose(lse, exact_lse, atol=1e-4)
    assert at.seqlens.tolist() == [10, 25]


@pytest.mark.parametrize("page_size", [None, 5])
def test_rows_before_the_first_sequence_go_nowhere(emulated: Any, page_size: int | None) -> None:
    at, other = Caches(page_size), Caches(page_size)
    before = torch.full_like(at.k[1, :2], float("nan"))
    new = [torch.cat([before, packed(x)]) for x in (at.k, at.v)]
    options = {"cache_seqlens": at.seqlens, "causal": True, **places(at)}
    fa3(at.q, at.k_cache, at.v_cache, *new, cu_seqlens_k_new=STARTS + 2, **options)
    one_by_one(other, causal=True)
    assert torch.equal(at.k_cache, other.k_cache)
    assert torch.equal(at.v_cache, other.v_cache)


@pytest.mark.parametrize("one_position", [False, True])
@pytest.mark.parametrize("keys", ["packed", "padded"])
def test_packed_queries_are_turned_by_their_positions(emulated: Any, keys: str, one_position: bool) -> None:
    at, other = Caches(5), Caches(5)
    options = {"rotary_cos": at.cos, "rotary_sin": at.sin, "rotary_seqlens": ints(4, 20), "causal": not one_position}
    if keys == "packed":
        new = {"k": packed(at.k), "v": packed(at.v), "cu_seqlens_k_new": STARTS}
        own = {"k": packed(at.k), "v": packed(at.v), "cu_seqlens_k_new": STARTS}
    else:
        new = own = {"k": at.k, "v": at.v}
    out, lse = fa3(
        *(at.q.flatten(0, 1), at.k_cache, at.v_cache),
        cache_seqlens=at.seqlens,
        cu_seqlens_q=ints(0, 3, 6),
        max_seqlen_q=3,
        return_softmax_lse=True,
        page_table=at.table,
        **new,
        **options,
    )
    exact, exact_lse = fa3(
        *(other.q, other.k_cache, other.v_cache),
        cache_seqlens=other.seqlens,
        return_softmax_lse=True,
        page_table=other.table,
        **own,
        **options,
    )
    assert torch.equal(at.k_cache, other.k_cache)
    assert close(out, exact.flatten(0, 1))
    assert torch.allclose(lse, torch.cat([*exact_lse], -1), atol=1e-4)


def test_keys_beyond_the_room_of_a_sequence_are_left_out(emulated: Any) -> None:
    at, before = Caches(), Caches()
    fa3(
        *(at.q, at.k_cache, at.v_cache, packed(at.k), packed(at.v)),
        cache_seqlens=ints(39, 40),
        cu_seqlens_k_new=STARTS,
        **places(at),
    )
    before.k_cache[at.rows[0], 39] = at.k[0, 0]
    assert torch.equal(at.k_cache, before.k_cache)


def test_more_rows_than_one_launch_takes_are_appended(emulated: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from flashgen.torch.operators import packed_keys

    monkeypatch.setattr(packed_keys, "_MOST", 3)
    at, other = Caches(), Caches()
    new = packed(at.k), packed(at.v)
    out = fa3(
        at.q, at.k_cache, at.v_cache, *new, cache_seqlens=at.seqlens, cu_seqlens_k_new=STARTS, causal=True, **places(at)
    )
    exact, _ = one_by_one(other, causal=True)
    assert torch.equal(at.k_cache, other.k_cache)
    assert close(out, exact)


def test_packed_keys_compile_in_one_graph(emulated: Any) -> None:
    at, other = Caches(5), Caches(5)

    def step(q: Any, k_cache: Any, v_cache: Any, k: Any, v: Any, starts: Any) -> Any:
        options = {"cache_seqlens": at.seqlens, "cu_seqlens_k_new": starts, "page_table": at.table, "causal": True}
        return fa3(q, k_cache, v_cache, k, v, rotary_cos=at.cos, rotary_sin=at.sin, **options)

    eager = step(at.q, at.k_cache, at.v_cache, packed(at.k), packed(at.v), STARTS)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    found = compiled(other.q, other.k_cache, other.v_cache, packed(other.k), packed(other.v), STARTS)
    assert torch.equal(found, eager)
    assert torch.equal(other.k_cache, at.k_cache)


def test_without_new_keys_their_places_mean_nothing(emulated: Any) -> None:
    at = Caches(5)
    options = {"cache_seqlens": at.seqlens, "page_table": at.table}
    plain = fa3(at.q, at.k_cache, at.v_cache, **options)
    assert torch.equal(fa3(at.q, at.k_cache, at.v_cache, cu_seqlens_k_new=STARTS, **options), plain)


def test_a_call_without_packed_keys_is_not_taken_for_one_with_them(emulated: Any) -> None:
    at = Caches()
    options = {"cache_seqlens": at.seqlens, "cache_batch_idx": at.rows}
    fa3(at.q, at.k_cache, at.v_cache, at.k, at.v, **options)
    with pytest.raises(fg.ArgumentError, match=r"k has shape .* must have 3 dimensions"):
        fa3(at.q, at.k_cache, at.v_cache, at.k, at.v, cu_seqlens_k_new=STARTS, **options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"cu_seqlens_k_new": [0, 3, 4]}, "cu_seqlens_k_new is a list; pass a torch.Tensor"),
        ({"cu_seqlens_k_new": ints(0, 4)}, r"cu_seqlens_k_new is torch.int32 of shape \(2,\) on cpu; pass 3 int32"),
        ({"cu_seqlens_k_new": STARTS.long()}, "cu_seqlens_k_new is torch.int64"),
        ({"v": torch.ones(4, 2, 16).half()}, "k has 5 rows and v has 4"),
    ],
)
def test_what_does_not_fit_is_refused(emulated: Any, options: Any, words: str) -> None:
    at = Caches()
    given = {"k": packed(at.k), "v": packed(at.v), "cu_seqlens_k_new": STARTS, **options}
    with pytest.raises(fg.ArgumentError, match=words):
        fa3(at.q, at.k_cache, at.v_cache, cache_seqlens=at.seqlens, **places(at), **given)
    assert emulated == []
