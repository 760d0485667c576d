"""FlashAttention-3's published tests in float8, on any device: what their calls are made of, and the rules for errors.

The rules are those of its 16-bit tests. The largest error may be twice that of the same formula in bfloat16, three
times with a softcap, plus the rounding error of ``x + 0.3 - 0.3`` in bfloat16. With a cache the mean error is at most
one and a half times that of the formula. Without one, and for 64 queries or more, the kernel rounds P to e4m3, and so
does the formula then: P as a share of the row's largest, times 256. FlashAttention-3 rounds P in both formulas, as a
share of the row's sum, so that in long rows all of P rounds to zero, and allows four times the error with a cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any, NamedTuple

try:
    import torch
except ImportError:
    # Tests of this folder skip themselves; what they share must still import.
    torch = None

from tests.gpu.flash_attn_matrix import band, distances, turned

DIMS = (64, 96, 128, 192, 256)
#: Causal, local.
MASKS = ((False, False), (True, False), (False, True))
HEADS = {"mha": (6, 6), "mqa": (6, 1), "gqa": (6, 2)}
BATCH = 3


class Errors(NamedTuple):
    """What a call gave, what is right, and what the formula gives in bfloat16."""

    found: Any
    exact: Any
    rounded: Any

    def check(self, factor: float, what: object, *, mean: float | None = None) -> None:
        found, exact, rounded = (x.float() for x in self)
        # A step of bfloat16 at most, with the signs of both roundings.
        step = (exact.bfloat16() + 0.3 - 0.3 - exact.bfloat16()).abs().float()
        assert torch.isfinite(found).all(), what
        error, theirs = (found - exact).abs(), (rounded - exact).abs()
        limit = factor * theirs.max() + 2 * step.max()
        assert error.max() <= limit, f"{what}: error {error.max():.3g}, limit {limit:.3g}"
        if mean is not None:
            limit = mean * theirs.mean() + step.mean()
            assert error.mean() <= limit, f"{what}: mean error {error.mean():.3g}, limit {limit:.3g}"


def codes(*shape: int, device: str, size: float = 1.0) -> Any:
    return (torch.randn(shape, device=device) * size).to(torch.float8_e4m3fn)


def scaled(x: Any, scale: Any) -> Any:
    """The numbers that codes (batch, length, heads, dim) stand for; query heads share the scale of their keys."""
    if scale is None:
        return x.float()
    return x.float() * scale.repeat_interleave(x.shape[2] // scale.shape[1], 1)[:, None, :, None]


def allowed_pairs(
    lengths: tuple[int, int], causal: bool, window: tuple[int, int], chunk: int, device: str
) -> tuple[Any, Any]:
    """Which keys each query attends to, and which queries attend to any."""
    distance = distances(*lengths, device=device)
    allowed = band(distance, causal, window)
    if chunk:
        key = torch.arange(lengths[1], device=device)
        query = torch.arange(lengths[0], device=device)[:, None] + lengths[1] - lengths[0]
        allowed = allowed & (key.div(chunk, rounding_mode="floor") == query.div(chunk, rounding_mode="floor"))
    return allowed, allowed.any(-1)


def reference(q: Any, k: Any, v: Any, allowed: tuple[Any, Any], cap: float, rounds: str | None) -> Any:
    """Attention of numbers in float32; ``rounds`` to "bf16", and P to "e4m3" besides."""
    pairs, rows = allowed
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    if rounds is not None:
        q, k, v = q.bfloat16(), k.bfloat16(), v.bfloat16()
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k * q.shape[-1] ** -0.5).float()
    if cap:
        scores = cap * torch.tanh(scores / cap)
    scores = scores.masked_fill(~pairs, -torch.inf)
    largest = scores.amax(-1, keepdim=True).masked_fill(~rows[:, None], 0.0)
    weights = (scores - largest).exp()
    total = weights.sum(-1, keepdim=True).masked_fill(~rows[:, None], 1.0)
    if rounds == "e4m3":
        weights = (weights * 256).to(torch.float8_e4m3fn).float() / 256
    return torch.einsum("bhqk,bkhd->bqhd", (weights / total).to(v.dtype), v)


def sum_errors(q: Any, k: Any, v: Any, allowed: tuple[Any, Any], cap: float) -> Any:
    """Errors of O because Hopper adds up products of e4m3 in 14 bits: each sum of Q K^T loses part of the last one."""
    pairs, _ = allowed
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k * q.shape[-1] ** -0.5)
    lost = 2.0**-13 * q.shape[-1] ** 0.5 * scores.abs().masked_fill(~pairs, 0.0).amax(-1, keepdim=True)
    if cap:
        scores = cap * torch.tanh(scores / cap)
    weights = scores.masked_fill(~pairs, -torch.inf).softmax(-1).nan_to_num(0.0)
    return torch.einsum("bhqk,bkhd->bqhd", (weights * lost) ** 2, v**2).sqrt()


def check_output(
    function: Any,
    dim: int,
    heads: tuple[int, int],
    lengths: tuple[int, int],
    mask: tuple[bool, bool],
    cap: float,
    random: Random,
    device: str,
) -> None:
    """``flash_attn_func`` with random scales of each sequence and head of keys."""
    (causal, local), (len_q, len_kv) = mask, lengths
    window = (random.randrange(len_kv), random.randrange(len_kv)) if local else (-1, -1)
    chunk = random.choice((0, random.randint(1, 2 * len_kv))) if causal or local else 0
    # With a cap, products reach its range.
    q = codes(2, len_q, heads[0], dim, device=device, size=cap / 4 or 1.0)
    k, v = (codes(2, len_kv, heads[1], dim, device=device) for _ in "kv")
    scales = [torch.rand(2, heads[1], device=device) * 2 for _ in "qkv"]
    named = dict(zip(("q_descale", "k_descale", "v_descale"), scales, strict=True))
    options = {"causal": causal, "window_size": window, "attention_chunk": chunk, "softcap": cap}
    out = function(q, k, v, **options, **named, num_splits=random.choice((1, 3)), pack_gqa=random.choice((True, False)))
    assert out.dtype == torch.bfloat16
    numbers = [scaled(x, scale) for x, scale in zip((q, k, v), scales, strict=True)]
    allowed = allowed_pairs(lengths, causal, window, chunk, device)
    exact, rounded = (reference(*numbers, allowed, cap, rounds) for rounds in (None, "e4m3"))
    # The formula in bfloat16 adds up products in float32.
    rounded = rounded + (rounded - exact).sign() * sum_errors(*numbers, allowed, cap)
    Errors(out, exact, rounded).check(3 if cap else 2, (lengths, dim, heads, options))


class CacheProblem:
    """A cache, and what comes into it; the options are drawn."""

    def __init__(
        self, random: Random, dim: int, lengths: tuple[int, int], mask: tuple[bool, bool], device: str
    ) -> None:
        draw, (len_q, room), self.device = random, lengths, device
        (self.causal, self.local), self.dim, self.room = mask, dim, room
        self.heads, self.heads_kv = draw.choice(((6, 6), (6, 1), (6, 3)))
        self.page_size = draw.choice((None, 1, 4, 128))
        self.cap = draw.choice((0.0, 0.0, 15.0))
        self.is_packed = draw.random() < 0.5
        self.queries = self.counts(draw, len_q)
        self.new: Sequence[int] = (0,) * BATCH
        if len_q <= room and draw.random() < 0.6:
            self.new = self.counts(draw, draw.choice((len_q, draw.randint(1, len_q))))
        # All queries have a position, so that there is an angle for each.
        most = room - (len_q if any(self.new) else 0)
        self.seqlens = [draw.randint(0 if any(self.new) else 1, most) for _ in range(BATCH)]
        self.leftpad = [draw.randint(0, length - 1) if length else 0 for length in self.seqlens]
        self.has_leftpad = draw.random() < 0.5
        if not self.has_leftpad:
            self.leftpad = [0] * BATCH
        self.window = (draw.randrange(room), draw.randrange(room)) if self.local else (-1, -1)
        self.chunk = draw.choice((0, draw.randint(1, 2 * room))) if self.causal or self.local else 0
        self.num_splits = draw.choice((0, 1, 3))
        self.q, *new = (
            codes(BATCH, max(counts), heads, dim, device=device)
            for counts, heads in ((self.queries, self.heads), (self.new, self.heads_kv), (self.new, self.heads_kv))
        )
        self.k, self.v = new
        size = self.page_size or room
        each = -(-room // size)
        self.table = torch.randperm(2 * BATCH * each, device=device)[: BATCH * each].view(BATCH, -1).int()
        self.k_cache, self.v_cache = (codes(2 * BATCH * each, size, self.heads_kv, dim, device=device) for _ in "kv")
        rotary_dim = int(draw.choice((0.0, 0.5, 1.0)) * dim) // 16 * 16 if any(self.new) else 0
        angles = torch.rand(each * size, rotary_dim // 2, device=device) * 2 * torch.pi
        tables = (angles.cos().to(self.q.dtype), angles.sin().to(self.q.dtype))
        self.angles = tables if rotary_dim else (None, None)
        self.interleaved = draw.random() < 0.5
        has_scales = draw.random() < 0.75
        self.scales = [torch.rand(BATCH, self.heads_kv, device=device) * 2 if has_scales else None for _ in "qkv"]
        self.prepares = draw.random() < 0.3

    def counts(self, draw: Random, longest: int) -> list[int]:
        """Rows of each sequence; the first has the most."""
        if not self.is_packed:
            return [longest] * BATCH
        return [longest, *(draw.randint(max(1, longest - 20), longest) for _ in range(BATCH - 1))]

    def packed(self, x: Any, counts: Sequence[int]) -> Any:
        return torch.cat([rows[:count] for rows, count in zip(x.view(torch.uint8), counts, strict=True)]).view(x.dtype)

    def starts(self, counts: Sequence[int]) -> Any:
        return torch.tensor([sum(counts[:b]) for b in range(BATCH + 1)], dtype=torch.int32, device=self.device)

    def call(self, interface: Any) -> Any:
        """The function under test; the result is (batch, longest, heads, dim) with zeros behind the rows."""
        lengths, leftpad = (
            torch.tensor(x, dtype=torch.int32, device=self.device) for x in (self.seqlens, self.leftpad)
        )
        places = {"cache_batch_idx": self.table[:, 0]} if self.page_size is None else {"page_table": self.table}
        q, new, packed = self.q, (self.k, self.v), {}
        if self.is_packed:
            q, new = self.packed(q, self.queries), tuple(self.packed(x, self.new) for x in new)
            packed = {"cu_seqlens_q": self.starts(self.queries), "max_seqlen_q": max(self.queries)}
            packed |= {"cu_seqlens_k_new": self.starts(self.new)} if any(self.new) else {}
        masking = {"causal": self.causal, "window_size": self.window, "attention_chunk": self.chunk}
        if self.prepares:
            sizes = (BATCH, max(self.queries), self.room, self.heads, self.heads_kv, self.dim)
            how = {"page_size": self.page_size, "num_splits": self.num_splits, "has_softcap": self.cap > 0}
            metadata = interface.get_scheduler_metadata(*sizes, lengths, q.dtype, **masking, **how)
        out = interface.flash_attn_with_kvcache(
            *(q, self.k_cache, self.v_cache),
            *(new if any(self.new) else (None, None)),
            rotary_cos=self.angles[0],
            rotary_sin=self.angles[1],
            rotary_interleaved=self.interleaved,
            cache_seqlens=lengths,
            cache_leftpad=leftpad if self.has_leftpad else None,
            q_descale=self.scales[0],
            k_descale=self.scales[1],
            v_descale=self.scales[2],
            softcap=self.cap,
            num_splits=self.num_splits,
            scheduler_metadata=metadata if self.prepares else None,
            **masking,
            **places,
            **packed,
        )
        assert out.dtype == torch.bfloat16
        if not self.is_packed:
            return out
        rows = torch.split(out, self.queries)
        return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)

    def turned(self, x: Any, b: int, *, one_position: bool = False) -> Any:
        """Rows of sequence b, turned by their positions, and rounded."""
        if self.angles[0] is None:
            return x
        steps = torch.zeros(len(x)).long() if one_position else torch.arange(len(x))
        return turned(x, self.angles, self.seqlens[b] + steps, interleaved=self.interleaved)

    def rounds_p(self) -> bool:
        """Whether Hopper's kernel for many queries runs."""
        by_boxes = self.page_size is None or (self.page_size % 8 == 0 and not self.has_leftpad)
        is_hopper = self.device != "cuda" or torch.cuda.get_device_capability()[0] == 9
        return is_hopper and by_boxes and max(self.queries) >= 64 and self.num_splits < 2

    def rows(self, cache: Any) -> Any:
        """The codes of keys or values of each sequence, (batch, room, heads, dim)."""
        return cache.view(torch.uint8)[self.table.long()].flatten(1, 2)

    def check(self, interface: Any) -> None:
        keys, values = self.rows(self.k_cache).clone(), self.rows(self.v_cache).clone()
        out = self.call(interface)
        # A cap reaches the range of products, as in FlashAttention-3's test without a cache.
        what = {name: x for name, x in vars(self).items() if not isinstance(x, torch.Tensor)}
        parts = []
        for b, (length, queries, new) in enumerate(zip(self.seqlens, self.queries, self.new, strict=True)):
            end = length + new
            keys[b, length:end] = self.turned(self.k[b, :new], b).view(torch.uint8)
            values[b, length:end] = self.v[b, :new].view(torch.uint8)
            q = self.turned(self.q[b, :queries], b, one_position=not (self.causal or self.local))[None]
            k, v = (x[b : b + 1, self.leftpad[b] : end].view(q.dtype) for x in (keys, values))
            own = [None if scale is None else scale[b : b + 1] for scale in self.scales]
            numbers = [scaled(x, scale) for x, scale in zip((q, k, v), own, strict=True)]
            allowed = allowed_pairs((queries, end - self.leftpad[b]), self.causal, self.window, self.chunk, self.device)
            rounded = "e4m3" if self.rounds_p() else "bf16"
            made = (reference(*numbers, allowed, self.cap, rounds) for rounds in (None, rounded))
            parts.append(Errors(*(x[0].flatten().float() for x in (out[b : b + 1, :queries], *made))))
        assert torch.equal(self.rows(self.k_cache), keys), what
        assert torch.equal(self.rows(self.v_cache), values), what
        Errors(*(torch.cat(part) for part in zip(*parts, strict=True))).check(3 if self.cap else 2, what, mean=1.5)
