"""flash-attn's published matrix of tests, for its functions of packed sequences; ``flash_attn_matrix`` says what it is.

Inputs are a padded batch, whose rows within lengths are packed for the call. The whole matrix takes minutes on an H200:
``DRAWN_CASES=nightly pytest -m gpu tests/gpu/test_flash_attn_varlen.py -n 11``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

import flashgen as fg
from tests.gpu.flash_attn_matrix import (
    CAUSAL_LENGTHS,
    DIMS,
    HEADS,
    KINDS,
    LENGTHS,
    WHOLE,
    Case,
    Kind,
    band,
    cases,
    check,
    compare,
    distances,
    kept_pairs,
    options_of,
    reference,
    references,
    run,
)

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.gpu, pytest.mark.torch]

BATCH = 4


@dataclass(frozen=True)
class Rows:
    """Which rows of a padded batch there are."""

    lengths: Any
    longest: int

    @classmethod
    def drawn(cls, longest: int) -> Rows:
        """At most 20 are missing, as in flash-attn's tests."""
        return cls(torch.randint(max(1, longest - 20), longest + 1, (BATCH,), device="cuda"), longest)

    @property
    def exist(self) -> Any:
        return torch.arange(self.longest, device="cuda") < self.lengths[:, None]

    @property
    def starts(self) -> Any:
        return torch.nn.functional.pad(self.lengths.cumsum(0), (1, 0)).int()

    def pack(self, x: Any) -> Any:
        return x[self.exist]

    def unpack(self, x: Any) -> Any:
        padded = x.new_zeros(BATCH, self.longest, *x.shape[1:])
        return padded.index_put((self.exist,), x)


def allowed_pairs(of_q: Rows, of_k: Rows, causal: bool, window: tuple[int, int]) -> Any:
    """(batch, 1, queries, keys): bands start where a sequence's own last query meets its own last key."""
    missing = (of_k.lengths - of_q.lengths)[:, None, None]
    every = of_k.longest - of_q.longest
    distance = distances(of_q.longest, of_k.longest) + every - missing
    allowed = of_q.exist[:, :, None] & of_k.exist[:, None] & band(distance, causal, window)
    return allowed[:, None], distance[:, None].abs()


def padded_inputs(dim: int, dtype: Any, of_q: Rows, of_k: Rows, heads: tuple[int, int], size: float = 1.0) -> Any:
    shapes = ((of_q.longest, heads[0], size), (of_k.longest, heads[1], 1.0), (of_k.longest, heads[1], 1.0))
    made = [torch.randn(BATCH, n, h, dim, device="cuda") * s for n, h, s in shapes]
    return tuple(x.to(dtype).requires_grad_() for x in made)


def check_case(kind: Kind, case: Case) -> None:
    of_q, of_k = Rows.drawn(case.lengths[0]), Rows.drawn(case.lengths[1])
    tensors = padded_inputs(kind.dim, getattr(torch, kind.dtype), of_q, of_k, case.heads, kind.cap or 1.0)
    slopes = torch.rand(BATCH, case.heads[0], device="cuda") * 0.3 if kind.alibi else None
    allowed, distance = allowed_pairs(of_q, of_k, kind.causal, case.window)
    options, kept = options_of(kind, case, slopes), []
    do = torch.randn_like(tensors[0])

    def attend(q: Any, k: Any, v: Any, deterministic: bool) -> Any:
        rows = of_q.pack(q), of_k.pack(k), of_k.pack(v)
        where = of_q.starts, of_k.starts, *case.lengths
        more = {**options, "deterministic": deterministic, "return_attn_probs": True}
        out, lse, signed = fg.flash_attn_varlen_func(*rows, *where, **more)
        assert lse.shape == (case.heads[0], out.shape[0])
        assert kind.drops or signed.numel() == 0
        if kind.drops:
            kept.append(kept_pairs(signed, allowed, case.lengths))
        return of_q.unpack(out)

    attends = [partial(attend, deterministic=way) for way in case.deterministic]
    check(attends, tensors, do, (allowed, distance, kind.cap, slopes), kept)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_output_and_gradients(plain_outputs: None, kind: Kind) -> None:
    torch.manual_seed(0)
    for case in cases(kind):
        check_case(kind, case)


@pytest.mark.parametrize("packed", ["qkv", "kv"])
@pytest.mark.parametrize("length", [97, 257, 1024])
def test_packed_functions_are_the_same_as_the_plain_one(plain_outputs: None, length: int, packed: str) -> None:
    torch.manual_seed(0)
    rows = Rows.drawn(length)
    tensors = tuple(
        rows.pack(x).detach().requires_grad_() for x in padded_inputs(64, torch.bfloat16, rows, rows, (4, 4))
    )
    do, options = torch.randn_like(tensors[0]), {"causal": True, "deterministic": True}
    where = rows.starts, rows.starts, length, length

    def attend(q: Any, k: Any, v: Any) -> Any:
        if packed == "qkv":
            return fg.flash_attn_varlen_qkvpacked_func(torch.stack([q, k, v], 1), rows.starts, length, **options)
        return fg.flash_attn_varlen_kvpacked_func(q, torch.stack([k, v], 1), *where, **options)

    expected = run(lambda q, k, v: fg.flash_attn_varlen_func(q, k, v, *where, **options), tensors, do)
    assert all(torch.equal(a, b) for a, b in zip(run(attend, tensors, do), expected, strict=True))


@pytest.mark.parametrize("dim", [64, 128])
def test_flash_attention_3s_function_uses_a_part_of_each_sequence(plain_outputs: None, dim: int) -> None:
    """What is not used is NaN, and sequences may be empty."""
    from flashgen.compat import flash_attn_interface as fa3

    torch.manual_seed(0)
    for lengths, heads in zip(((128, 192), (239, 700), (799, 300)), HEADS.values(), strict=True):
        whole, used = [Rows.drawn(n) for n in lengths], []
        for rows in whole:
            part = (torch.rand(BATCH, device="cuda") * rows.lengths).long()
            part[1] = 0
            used.append(Rows(part, rows.longest))
        tensors = padded_inputs(dim, torch.bfloat16, *used, heads)

        def attend(*x: Any, whole: Any = whole, used: Any = used, lengths: Any = lengths) -> Any:
            of = (0, 1, 1)
            rows = [
                whole[i].pack(t.masked_fill(~used[i].exist[..., None, None], torch.nan))
                for i, t in zip(of, x, strict=True)
            ]
            where = *(r.starts for r in whole), *lengths, *(r.lengths.int() for r in used)
            return whole[0].unpack(fa3.flash_attn_varlen_func(*rows, *where, causal=True))

        allowed, distance = allowed_pairs(*used, True, (-1, -1))
        do, rules = torch.randn_like(tensors[0]), (allowed, distance, 0.0, None)
        exact, rounded = references(tensors, do, rules)
        compare(run(attend, tensors, do), rounded, exact, None)


@pytest.mark.parametrize("page_size", [16, 256, 512])
@pytest.mark.parametrize("dim", DIMS if WHOLE else [59, 128])
def test_keys_in_pages(plain_outputs: None, dim: int, page_size: int) -> None:
    torch.manual_seed(0)
    for lengths in CAUSAL_LENGTHS + LENGTHS:
        of_q, of_k = Rows.drawn(lengths[0]), Rows.drawn(lengths[1])
        q, k, v = (x.detach() for x in padded_inputs(dim, torch.float16, of_q, of_k, (6, 2)))
        each = -(-lengths[1] // page_size)
        table = torch.randperm(3 * BATCH * each, device="cuda")[: BATCH * each].view(BATCH, each)
        pages = [torch.full((3 * BATCH * each, page_size, 2, dim), torch.nan, device="cuda").half() for _ in range(2)]
        for cache, x in zip(pages, (k, v), strict=True):
            rows = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, each * page_size - lengths[1]))
            cache[table] = rows.unflatten(1, (each, page_size))
        where = of_q.starts, of_k.starts, *lengths
        out = fg.flash_attn_varlen_func(of_q.pack(q), *pages, *where, causal=True, block_table=table.int())
        rules = *allowed_pairs(of_q, of_k, True, (-1, -1)), 0.0, None
        exact, rounded = (of_q.pack(reference(q, k, v, rules, None, exact=e)).float() for e in (True, False))
        assert (out - exact).abs().max() <= 2 * (rounded - exact).abs().max() + 1e-5, lengths


@pytest.mark.parametrize("dim", [64, 128])
def test_fewer_keys_than_queries(plain_outputs: None, dim: int) -> None:
    """The last query of each sequence has a key, and no other has one."""
    torch.manual_seed(0)
    starts = [torch.tensor(x, dtype=torch.int32, device="cuda") for x in ([0, 76, 110, 256], [0, 1, 2, 3])]
    tensors = tuple((torch.randn(n, 5, dim, device="cuda") * 3).half().requires_grad_() for n in (256, 3, 3))
    do, last = torch.randn_like(tensors[0]), starts[0][1:].long() - 1
    out, dq, dk, dv = run(lambda *x: fg.flash_attn_varlen_func(*x, *starts, 256, 3, causal=True), tensors, do)
    assert torch.equal(out[last], tensors[2])
    assert torch.equal(dv, do[last])
    assert max(dq.abs().max(), dk.abs().max()) < 1e-2
    out[last] = 0
    assert not out.any()


def test_the_same_bits_in_50_deterministic_runs(plain_outputs: None) -> None:
    """And in others too, but for the gradient of queries."""
    torch.manual_seed(0)
    of_q, of_k = Rows.drawn(239), Rows.drawn(700)
    padded = padded_inputs(128, torch.bfloat16, of_q, of_k, (6, 2))
    tensors = tuple(r.pack(x).detach().requires_grad_() for r, x in zip((of_q, of_k, of_k), padded, strict=True))
    do, where = torch.randn_like(tensors[0]), (of_q.starts, of_k.starts, 239, 700)
    for deterministic in (True, False):

        def attend(*x: Any, deterministic: bool = deterministic) -> Any:
            return fg.flash_attn_varlen_func(*x, *where, window_size=(60, 8), deterministic=deterministic)

        out, dq, dk, dv = run(attend, tensors, do)
        for _ in range(50):
            again = run(attend, tensors, do)
            assert all(torch.equal(a, b) for a, b in zip(again[::2], (out, dk), strict=True))
            assert torch.equal(again[3], dv)
            assert torch.equal(again[1], dq) or not deterministic


def test_a_replay_reads_where_sequences_begin(plain_outputs: None) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(300, 4, 64, device="cuda", dtype=torch.float16) for _ in range(3))
    starts = torch.tensor([0, 100, 180, 300], dtype=torch.int32, device="cuda")

    def call() -> Any:
        return fg.flash_attn_varlen_func(q, k, v, starts, starts, 200, 200, causal=True)

    first, graph = call(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    graph.replay()
    assert torch.equal(out, first)
    starts.copy_(torch.tensor([0, 17, 217, 300], dtype=torch.int32))
    graph.replay()
    assert torch.equal(out, call())
    assert not torch.equal(out, first)


def test_a_compiled_call_gives_the_same_bits(plain_outputs: None) -> None:
    torch.manual_seed(0)
    starts = torch.tensor([0, 100, 180, 300], dtype=torch.int32, device="cuda")
    tensors = tuple(torch.randn(300, 4, 64, device="cuda").bfloat16().requires_grad_() for _ in range(3))

    def call(q: Any, k: Any, v: Any) -> Any:
        sequences = fg.Sequences(starts, starts, 120, 120)
        return fg.attention(q, k, v, mask=fg.causal(), sequences=sequences, deterministic=True)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    do = torch.randn_like(tensors[0])
    assert all(torch.equal(a, b) for a, b in zip(run(compiled, tensors, do), run(call, tensors, do), strict=True))


def test_tensors_of_two_devices_are_refused(plain_outputs: None) -> None:
    q, starts = torch.randn(30, 2, 64, device="cuda", dtype=torch.float16), torch.tensor([0, 30], dtype=torch.int32)
    with pytest.raises(fg.ArgumentError, match=r"sequences\.cu_seqlens_q is on the CPU"):
        fg.flash_attn_varlen_func(q, q, q, starts, starts, 30, 30)
