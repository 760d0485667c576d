"""Queries in float8 that attend to caches in float8, with the emulator in the GPU's place."""

from __future__ import annotations

from typing import Any

import pytest

import flashgen as fg

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch
fa2 = pytest.importorskip("flashgen.compat.flash_attn").flash_attn_with_kvcache
interface = pytest.importorskip("flashgen.compat.flash_attn_interface")
serving = pytest.importorskip("flashgen.serving")

from tests.torch.caches import causal, ints  # noqa: E402
from tests.torch.results import Recorder  # noqa: E402
from tests.torch.test_kvcache_float8 import Float8Caches, check_packed  # noqa: E402
from tests.torch.test_replay import nothing_found_out  # noqa: E402

E4M3 = torch.float8_e4m3fn
fa3 = interface.flash_attn_with_kvcache


class Float8Queries(Float8Caches):
    """``Float8Caches`` with queries and new keys in float8, too, and a scale of queries."""

    def __init__(self, page_size: int | None = None, dtype: str = "e4m3", new: int = 3) -> None:
        super().__init__(page_size, dtype, new)
        self.q, self.k, self.v = (x.to(E4M3) for x in (self.q, self.k, self.v))
        self.q_descale = torch.rand(2, 2, generator=torch.Generator().manual_seed(2)) * 2 + 0.1

    @property
    def scales(self) -> dict[str, Any]:
        return super().scales | {"q_descale": self.q_descale}

    @property
    def pages(self) -> dict[str, Any]:
        """``places`` under FlashAttention-3's names."""
        return {"page_table" if name == "block_table" else name: x for name, x in self.places.items()}

    def wide(self, q_scale: Any) -> Any:
        """The queries as numbers; the scale is broadcast to (2, 4)."""
        return self.q.double() * q_scale[:, None, :, None]

    def attended(self, reference: Any, lengths: Any, mask: Any = None, q_scale: Any = None) -> Any:
        of_heads = self.q_descale.repeat_interleave(2, 1) if q_scale is None else q_scale
        codes, self.q = self.q, self.wide(of_heads.double())
        try:
            return super().attended(reference, lengths, mask)
        finally:
            self.q = codes


def assert_close(found: Any, exact: Any, atol: float = 4e-2) -> None:
    """A result in bfloat16, which has 8 bits of values of at most 8."""
    assert torch.allclose(found[0].double(), exact[0], atol=atol, rtol=2**-8)
    assert torch.allclose(found[1].double(), exact[1], atol=1e-3)


@pytest.mark.parametrize(
    ("page_size", "dtype", "is_causal"), [(None, "e4m3", False), (5, "e4m3", True), (None, "e5m2", True)]
)
def test_new_keys_go_into_the_cache_as_they_are(
    emulated: Any, reference: Any, page_size: int | None, dtype: str, is_causal: bool
) -> None:
    at = Float8Queries(page_size, dtype)
    before = at.keys(at.k_cache.float()).clone()
    found = fa3(
        *(at.q, at.k_cache, at.v_cache, at.k, at.v),
        cache_seqlens=at.seqlens,
        causal=is_causal,
        return_softmax_lse=True,
        **at.scales,
        **at.pages,
    )
    assert found[0].dtype == torch.bfloat16
    lengths = [length + 3 for length in at.seqlens.tolist()]
    assert_close(found, at.attended(reference, lengths, causal if is_causal else None))
    held, new = at.keys(at.k_cache.float()), at.k.float().to(at.k_cache.dtype).float()
    for b, length in enumerate(at.seqlens.tolist()):
        assert torch.equal(held[b, length : length + 3], new[b])
        assert torch.equal(held[b, :length], before[b, :length])
    assert [(spec.dtype, spec.out_dtype, spec.cache_dtype) for spec in emulated] == [("e4m3", "bf16", dtype)]


@pytest.mark.parametrize(
    "options",
    [
        {"window_size": (6, 0)},
        {"causal": True, "softcap": 3.0},
        {"causal": True, "cache_leftpad": ints(4, 0)},
        {"causal": True, "num_splits": 2},
        {"causal": True, "batch_invariant": True},
        {"causal": True, "alibi_slopes": torch.linspace(0.1, 0.5, 4)},
    ],
    ids=str,
)
def test_options_mean_what_they_mean_for_16_bit_queries(emulated: Any, options: dict[str, Any]) -> None:
    at = Float8Queries(5)
    where = {"cache_seqlens": at.seqlens, **at.places, **options}
    out = fa2(at.q, at.k_cache, at.v_cache, **at.scales, **where)
    # Scales of queries that are powers of two leave them exact in 16 bits.
    at.q_descale = torch.exp2(torch.randint(-1, 2, (2, 2)).float())
    out = fa2(at.q, at.k_cache, at.v_cache, **at.scales, **where)
    wide = at.wide(at.q_descale.repeat_interleave(2, 1)).half()
    of_cache = {"k_descale": at.k_descale, "v_descale": at.v_descale}
    expected = fa2(wide, at.k_cache, at.v_cache, **of_cache, **where)
    assert torch.allclose(out.float(), expected.float(), atol=1e-3, rtol=2**-7)


@pytest.mark.parametrize("shape", [None, (), (1,), (2,), (4,), (2, 2), (2, 4), "expanded"], ids=str)
def test_scales_of_queries_may_be_shared(emulated: Any, reference: Any, shape: Any) -> None:
    at = Float8Queries()
    scale = torch.tensor([[0.7, 0.3, 1.1, 0.4], [0.5, 2.0, 0.6, 1.3]])
    given = {None: None, "expanded": scale[:1, :1].expand(2, 4)}.get(shape)
    if isinstance(shape, tuple):
        given = scale[: shape[0] if len(shape) == 2 else 1, : shape[-1] if shape else 1].reshape(shape).contiguous()
    of_heads = torch.ones(2, 4)
    if given is not None:
        of_heads = given.repeat_interleave(2, -1) if given.shape[-1:] == (2,) else given
        of_heads = of_heads.expand(2, 4)
    exact = at.attended(reference, at.seqlens.tolist(), q_scale=of_heads)
    at.q_descale = given
    for _ in range(2):  # as a new call, and as one like before
        found = fa3(
            *(at.q, at.k_cache, at.v_cache),
            cache_seqlens=at.seqlens,
            return_softmax_lse=True,
            **at.scales,
            **at.pages,
        )
        assert_close(found, exact)


@pytest.mark.parametrize("appends", [False, True])
def test_a_call_like_before_is_replayed_with_its_own_scales(emulated: Any, reference: Any, appends: bool) -> None:
    def step(at: Float8Queries) -> Any:
        new = (at.k, at.v) if appends else ()
        options = {"cache_seqlens": at.seqlens, "causal": True, "return_softmax_lse": True}
        return fa3(at.q, at.k_cache, at.v_cache, *new, **options, **at.scales, **at.pages)

    step(Float8Queries(5))
    at = Float8Queries(5)
    at.q_descale, at.v_descale = at.q_descale * 0.5, at.v_descale * 0.25
    with nothing_found_out():
        found = step(at)
    assert_close(found, at.attended(reference, [n + 3 * appends for n in at.seqlens.tolist()], causal))


def test_dense_calls_in_float8_are_replayed(emulated: Any) -> None:
    q, k, v = (torch.randn(1, 20, heads, 32).to(E4M3) for heads in (4, 2, 2))
    first = fg.attention(q, k, v, mask=fg.causal(), q_scale=0.5)
    with nothing_found_out():
        assert torch.equal(fg.attention(q, k, v, mask=fg.causal(), q_scale=0.5), first)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("out_dtype", [None, torch.float16])
def test_attention_takes_queries_in_float8(emulated: Any, reference: Any, out_dtype: Any, compiled: bool) -> None:
    at = Float8Queries(5)

    def attend(q: Any, k: Any, v: Any, q_scale: Any, k_scale: Any, v_scale: Any) -> Any:
        cache = fg.KVCache(at.seqlens, block_table=at.table, k_scale=k_scale, v_scale=v_scale)
        options = {"q_scale": q_scale, "out_dtype": out_dtype}
        return fg.attention(q, k, v, mask=fg.causal(), cache=cache, return_lse=True, **options)

    call = torch.compile(attend, fullgraph=True, backend="aot_eager") if compiled else attend
    for q_scale in (at.q_descale, at.q_descale, at.q_descale.repeat_interleave(2, 1), 0.5, 0.5):
        found = call(at.q, at.k_cache, at.v_cache, q_scale, at.k_descale, at.v_descale)
        assert found[0].dtype == (out_dtype or torch.bfloat16)
        of_heads = q_scale if isinstance(q_scale, torch.Tensor) else torch.full((2, 4), q_scale)
        if of_heads.shape[1] == 2:
            of_heads = of_heads.repeat_interleave(2, 1)
        assert_close(found, at.attended(reference, at.seqlens.tolist(), causal, q_scale=of_heads))


def test_each_page_may_have_a_scale(emulated: Any) -> None:
    at, table = Float8Queries(5), torch.exp2(torch.randint(-2, 2, (30, 2)).float())
    where = {"seqlens": at.seqlens, "block_table": at.table}
    cache = fg.KVCache(**where, k_scale=table, v_scale=table.flip(0))
    k, v = (
        (held.float() * scale[:, None, :, None]).half()
        for held, scale in ((at.k_cache, table), (at.v_cache, table.flip(0)))
    )
    options = {"mask": fg.causal(), "page_scales": True}
    out = fg.attention(at.q, at.k_cache, at.v_cache, cache=cache, q_scale=0.5, **options)
    wide = fg.attention((at.q.float() * 0.5).half(), k, v, mask=fg.causal(), cache=fg.KVCache(**where))
    assert torch.allclose(out.float(), wide.float(), atol=2e-2)


def test_packed_queries_and_keys_have_the_scales_of_their_sequences(emulated: Any) -> None:
    at, other = Float8Queries(5), Float8Queries(5)
    # FlashAttention-3's tables of angles have the dtype of queries.
    rotary = {"rotary_cos": at.cos.to(E4M3), "rotary_sin": at.sin.to(E4M3)}
    check_packed(at, other, at.scales, rotary, atol=2e-2)


def test_a_step_compiles_in_one_graph(emulated: Any) -> None:
    at, other = Float8Queries(5), Float8Queries(5)

    def step(q: Any, k_cache: Any, v_cache: Any, k: Any, v: Any, seqlens: Any, *scales: Any) -> Any:
        names = ("q_descale", "k_descale", "v_descale")
        named = dict(zip(names, scales, strict=True))
        return fa3(q, k_cache, v_cache, k, v, cache_seqlens=seqlens, page_table=at.table, causal=True, **named)

    rest = at.k, at.v, at.seqlens, at.q_descale, at.k_descale, at.v_descale
    eager = step(at.q, at.k_cache, at.v_cache, *rest)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(other.q, other.k_cache, other.v_cache, *rest), eager)
    assert torch.equal(other.k_cache.view(torch.uint8), at.k_cache.view(torch.uint8))


def test_dispatch_modes_and_shape_functions_see_the_operator(emulated: Any) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    from flashgen.torch.sdpa.forms import Form, program_for

    at = Float8Queries()
    call = {"cache_seqlens": at.seqlens, **at.places, **at.scales}
    plain = fa2(at.q, at.k_cache, at.v_cache, **call)
    with Recorder() as seen:
        assert torch.equal(fa2(at.q, at.k_cache, at.v_cache, **call), plain)
    assert [name for name in map(str, seen.seen) if "flashgen" in name] == ["flashgen.cache_forward.default"]
    with FlopCounterMode(display=False) as counter:
        fa2(at.q, at.k_cache, at.v_cache, **call)
    assert counter.get_total_flops() == 2 * 2 * 3 * 4 * 40 * 32
    text = program_for(Form(None, None), ())[0].rule
    named = {"k_scale": at.k_descale, "v_scale": at.v_descale, "q_scale": at.q_descale, "out_dtype": torch.float16}
    arguments = (at.q, at.k_cache, at.v_cache, [], text, at.seqlens, at.rows)
    # torch's other checks multiply float8 tensors, which it cannot on a CPU.
    operator = torch.ops.flashgen.cache_forward.default
    torch.library.opcheck(operator, arguments, named, test_utils="test_faketensor")


def test_a_serving_step_takes_tokens_in_float8(emulated: Any) -> None:
    at, other = Float8Queries(5), Float8Queries(5)
    counts = at.seqlens + 3
    pages = torch.stack([at.table[b, (at.seqlens[b] + j) // 5] for b in range(2) for j in range(3)])
    places = torch.stack([(at.seqlens[b] + j) % 5 for b in range(2) for j in range(3)])
    slots, step = pages * 5 + places, {"num_tokens": 6, "max_query_len": 3, "page_size": 5}
    planned = serving.plan(ints(0, 3, 6), counts, at.table, slots, **step)
    of_heads = {"k_scale": at.k_descale[0], "v_scale": at.v_descale[0]}
    serving.append(planned, at.k.flatten(0, 1), at.v.flatten(0, 1), at.k_cache, at.v_cache, **of_heads)
    q = at.q.flatten(0, 1)
    out = serving.run(planned, q, at.k_cache, at.v_cache, **of_heads, q_scale=at.q_descale[0], out_dtype=torch.float16)
    scales = {"k_descale": at.k_descale[0], "v_descale": at.v_descale[0], "q_descale": at.q_descale[0]}
    new = other.k, other.v
    where = {"cache_seqlens": at.seqlens, "page_table": at.table, "causal": True}
    whole = fa3(other.q, other.k_cache, other.v_cache, *new, **where, **scales)
    assert out.dtype == torch.float16
    assert torch.allclose(out.float(), whole.flatten(0, 1).float(), atol=4e-2)
    assert torch.equal(at.k_cache.view(torch.uint8), other.k_cache.view(torch.uint8))
    nothing = serving.plan(ints(0), ints(), at.table[:0], num_tokens=0, max_query_len=0)
    assert serving.run(nothing, q, at.k_cache, at.v_cache).dtype == torch.bfloat16


def test_its_kernel_is_prepared(emulated: list[Any]) -> None:
    at = Float8Queries(5)
    sizes = {"batch_size": 2, "max_seqlen_q": 3, "max_seqlen_k": 40, "num_heads_q": 4, "num_heads_kv": 2, "headdim": 16}
    where = {"cache_seqlens": at.seqlens, "qkv_dtype": E4M3, "page_size": 5, "causal": True}
    interface.get_scheduler_metadata(**sizes, **where)
    fa3(at.q, at.k_cache, at.v_cache, cache_seqlens=at.seqlens, causal=True, **at.pages, **at.scales)
    assert [(spec.dtype, spec.cache_dtype) for spec in emulated] == [("e4m3", "e4m3")]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"q_descale": torch.ones(3)}, r"q_scale is fp32 of shape \(3,\); pass float32 of one of the shapes"),
        ({"q_descale": torch.ones(2).half()}, r"q_scale is fp16 of shape \(2,\)"),
        ({"q_descale": 0.5}, "q_descale is a float; pass a torch.Tensor"),
        ({"k": torch.zeros(2, 3, 2, 16).half()}, "k is fp16, but this kernel was built for e4m3; convert it"),
        (
            {"q": torch.zeros(2, 3, 4, 16).half()},
            r"q_descale is for q of torch\.float8_e4m3fn, and q is torch\.float16",
        ),
        (
            {"q": torch.zeros(2, 3, 4, 16).to(torch.float8_e5m2), "q_descale": None},
            "q is torch.float8_e5m2; convert it",
        ),
        ({"k_cache": torch.zeros(3, 40, 2, 16), "v_cache": torch.zeros(3, 40, 2, 16)}, "pass a cache in q's dtype, in"),
    ],
)
def test_what_does_not_go_with_float8_queries_is_refused_by_name(emulated: Any, options: Any, words: str) -> None:
    at = Float8Queries()
    given = {"q": at.q, "k_cache": at.k_cache, "v_cache": at.v_cache, "k": at.k, "v": at.v, "cache_seqlens": at.seqlens}
    with pytest.raises(fg.FlashgenError, match=words):
        fa2(**{**given, "q_descale": at.q_descale, **options})
    with pytest.raises(fg.ArgumentError, match=r"out_dtype=torch\.float16 is for q of torch\.float8_e4m3fn"):
        serving.run(
            serving.plan(ints(0, 3), ints(9), ints([0, 1]), num_tokens=3, max_query_len=3),
            *(torch.zeros(3, 4, 16).half(), at.k_cache, at.v_cache),
            out_dtype=torch.float16,
        )
