"""flash-attn's published matrix of tests, for its functions of packed sequences: a sample of dims, all shapes.

Inputs are a padded batch, whose rows within lengths are packed for the call; its rule for errors is that of the dense
functions: at most twice, for gradients three times, what the same formula in the inputs' dtype is off.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import pytest

import flashgen as fg

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.gpu, pytest.mark.torch]

DIMS = (32, 40, 59, 64, 80, 96, 111, 128, 160, 192, 224, 256)
LENGTHS = (
    *((1, 147), (113, 203), (128, 217), (113, 211), (108, 256), (256, 512), (512, 256), (1024, 1024), (1023, 1024)),
    *((1024, 1023), (2048, 2048)),
)
#: More, where a mask is aligned by them.
CAUSAL_LENGTHS = ((1, 239), (239, 1), (3, 799), (799, 3), (127, 512), (512, 127), (127, 513), (513, 127))
HEADS = ((6, 6), (6, 1), (6, 2))
BATCH, DROPPED = 4, 0.17

OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "local": {"window_size": (53, 21), "deterministic": True},
    "softcap": {"softcap": 50.0, "causal": True},
    "alibi": {"alibi_slopes": True, "causal": True},
    "dropout": {"dropout_p": DROPPED, "causal": True},
    "dropout, local and alibi": {"dropout_p": DROPPED, "window_size": (91, 40), "alibi_slopes": True},
}
#: Every third dim for each kind, in turns: each is a kernel to build.
CASES = [(kind, dim) for i, kind in enumerate(OPTIONS) for dim in DIMS[i % 3 :: 3]]


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
    distance = torch.arange(of_k.longest, device="cuda") - torch.arange(of_q.longest, device="cuda")[:, None] - missing
    left, right = window
    allowed = of_q.exist[:, :, None] & of_k.exist[:, None]
    if left >= 0:
        allowed &= distance >= -left
    if right >= 0:
        allowed &= distance <= right
    return (allowed & (distance <= 0) if causal else allowed)[:, None], distance[:, None].abs()


def reference(q: Any, k: Any, v: Any, rules: Any, kept: Any, *, exact: bool) -> Any:
    """Attention in float32, or in the inputs' dtype with the scale applied to k, for the other order of rounding."""
    allowed, distance, cap, slopes = rules
    dtype, group, scale = q.dtype, q.shape[2] // k.shape[2], q.shape[-1] ** -0.5
    if exact:
        q, k, v = q.float(), k.float(), v.float()
    k, v = (x.repeat_interleave(group, 2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q * scale, k) if exact else torch.einsum("bqhd,bkhd->bhqk", q, k * scale)
    if cap:
        scores = cap * torch.tanh(scores / cap)
    if slopes is not None:
        scores = scores - slopes.view(-1, q.shape[2], 1, 1) * distance
    scores = scores.masked_fill(~allowed, float("-inf"))
    weights = torch.softmax(scores, -1).to(v.dtype).masked_fill(~allowed.any(-1, keepdim=True), 0.0)
    if kept is not None:
        weights, v = weights.masked_fill(~kept, 0.0), v / (1 - DROPPED)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v).to(dtype)


def run(attend: Any, tensors: Any, do: Any) -> tuple[Any, ...]:
    out = attend(*tensors)
    return (out.detach(), *torch.autograd.grad(out, tensors, do))


def reach_of_rounding_out(tensors: Any, do: Any, out: Any, rules: Any) -> tuple[float, float]:
    """How far dq and dk move when each element of the output is rounded at random, in rounding steps of one.

    dS = P (dP - D) with D the sum of dO times the output as it was rounded. Where a row has one probability near 1
    that is all there is, and a reference whose D comes from dP itself has no error at all.
    """
    q, k, _ = (x.detach().float() for x in tensors)
    allowed, distance, cap, slopes = rules
    group, scale = q.shape[2] // k.shape[2], q.shape[-1] ** -0.5
    k = k.repeat_interleave(group, 2)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * scale
    slope = 1.0
    if cap:
        capped = torch.tanh(scores / cap)
        scores, slope = cap * capped, 1 - capped * capped
    if slopes is not None:
        scores = scores - slopes.view(-1, q.shape[2], 1, 1) * distance
    weights = torch.softmax(scores.masked_fill(~allowed, float("-inf")), -1).nan_to_num(0.0)
    moved = weights * slope * (do.float() * out.float()).square().sum(-1).sqrt().transpose(1, 2)[..., None]
    dq = torch.einsum("bhqk,bkhd->bqhd", moved, k) * scale
    dk = torch.einsum("bhqk,bqhd->bkhd", moved, q) * scale
    dk = dk.unflatten(2, (-1, group)).sum(3)
    return dq.abs().max().item(), dk.abs().max().item()


def compare(found: Any, rounded: Any, exact: Any, reach: tuple[float, float] | None) -> None:
    """flash-attn's rule; where logits are capped, so that rows have one large probability, with ours for dQ and dK."""
    for name, factor, *results in zip(("out", "dq", "dk", "dv"), (2, 3, 3, 3), found, rounded, exact, strict=True):
        ours, theirs, right = (x.float() for x in results)
        slack = 3e-4 if reach and name != "out" else 1e-5
        if reach and name in ("dq", "dk"):
            slack += torch.finfo(results[0].dtype).eps * reach[("dq", "dk").index(name)]
        limit = factor * (theirs - right).abs().max() + slack
        error = (ours - right).abs().max()
        assert error <= limit, f"{name}: error {error:.3g}, limit {limit:.3g}"


def dropped(signed: Any, allowed: Any, of_q: Rows, of_k: Rows) -> Any:
    """Which pairs were kept, by the signs of probabilities, of which the expected part is below 0."""
    assert all(size % 128 == 0 for size in signed.shape[2:])
    signed = signed[:, :, : of_q.longest, : of_k.longest]
    assert not signed.masked_fill(allowed, 0).any()
    # What is too small for the dtype has no sign.
    count = (signed != 0).sum().item()
    assert abs((signed < 0).sum().item() / count - DROPPED) < 5 * (DROPPED * (1 - DROPPED) / count) ** 0.5
    return signed >= 0


def padded_inputs(dim: int, dtype: Any, of_q: Rows, of_k: Rows, heads: tuple[int, int], size: float = 1.0) -> Any:
    shapes = ((of_q.longest, heads[0], size), (of_k.longest, heads[1], 1.0), (of_k.longest, heads[1], 1.0))
    made = [torch.randn(BATCH, n, h, dim, device="cuda") * s for n, h, s in shapes]
    return tuple(x.to(dtype).requires_grad_() for x in made)


def check(dim: int, dtype: Any, lengths: tuple[int, int], heads: tuple[int, int], options: dict[str, Any]) -> None:
    of_q, of_k = Rows.drawn(lengths[0]), Rows.drawn(lengths[1])
    cap, drops = options.get("softcap", 0.0), "dropout_p" in options
    tensors = padded_inputs(dim, dtype, of_q, of_k, heads, cap or 1.0)
    if "alibi_slopes" in options:
        options = options | {"alibi_slopes": torch.rand(BATCH, heads[0], device="cuda") * 0.3}
    allowed, distance = allowed_pairs(of_q, of_k, options.get("causal", False), options.get("window_size", (-1, -1)))
    seen = []

    def attend(q: Any, k: Any, v: Any) -> Any:
        rows = of_q.pack(q), of_k.pack(k), of_k.pack(v)
        where = of_q.starts, of_k.starts, *lengths
        out, lse, signed = fg.flash_attn_varlen_func(*rows, *where, **options, return_attn_probs=True)
        assert lse.shape == (heads[0], out.shape[0])
        seen.append(dropped(signed, allowed, of_q, of_k) if drops else None)
        assert drops or signed.numel() == 0
        return of_q.unpack(out)

    do = torch.randn_like(tensors[0])
    found = run(attend, tensors, do)
    rules = allowed, distance, cap, options.get("alibi_slopes")
    exact, rounded = (
        run(lambda *x, exact=exact: reference(*x, rules, seen[0], exact=exact), tensors, do) for exact in (True, False)
    )
    compare(found, rounded, exact, reach_of_rounding_out(tensors, do, exact[0], rules) if cap else None)


@pytest.mark.parametrize(("kind", "dim"), CASES)
def test_output_and_gradients(plain_outputs: None, kind: str, dim: int) -> None:
    torch.manual_seed(0)
    options = OPTIONS[kind]
    dtype = torch.float16 if dim % 64 == 0 else torch.bfloat16
    # With one key its gradient of queries is 0 in any arithmetic, unless what is kept counts more often.
    lengths = LENGTHS + (CAUSAL_LENGTHS if options.get("causal") and kind != "dropout" else ())
    for pair, heads in zip(lengths, itertools.cycle(HEADS)):
        if kind == "softcap" and pair[0] > 1024:
            continue
        check(dim, dtype, pair, heads, dict(options))


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
    for lengths, heads in zip(((128, 192), (239, 700), (799, 300)), itertools.cycle(HEADS)):
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
        exact, rounded = (
            run(lambda *x, exact=exact, rules=rules: reference(*x, rules, None, exact=exact), tensors, do)
            for exact in (True, False)
        )
        compare(run(attend, tensors, do), rounded, exact, None)


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
