"""FlashAttention-3's published tests of caches, in 16 bits and in float8, on any device: their calls, and the rules.

The rules are those of its 16-bit tests: the largest error may be twice that of the same formula in the inputs' dtype,
three times with a softcap, and the mean error one and a half times. In float8 the formula computes in bfloat16, and the
rounding error of ``x + 0.3 - 0.3`` in bfloat16 is added. For 64 queries or more in float8 the kernel rounds P to e4m3,
and so does the formula then: P as a share of the row's largest, times 256. FlashAttention-3 rounds P in both formulas,
as a share of the row's sum, so that in long rows all of P rounds to zero, and allows four times the error.

Options are drawn, since all combinations are a million calls. FlashAttention-3 tests heads of 128 alone, without
softcaps, float8's scales and ``rotary_seqlens``. Its values are as wide as keys there, although its test draws other
widths and ``qv`` for other heads. It has five sequences for the three here, always asks for the log-sum-exp, which it
does not check, and calls each problem for every number of splits, with metadata and without.
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
#: New queries, and the room for keys.
CACHED_LENGTHS = (
    *((1, 128), (1, 339), (3, 1024), (64, 800), (64, 256), (3, 799), (64, 2048), (16, 20_000), (128, 128)),
    *((256, 512), (2048, 3577)),
)
BATCH = 3


class Errors(NamedTuple):
    """What a call gave, what is right, and what the formula gives in 16 bits."""

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

    def check_sixteen_bits(self, factor: float, mean: float | None, what: object) -> None:
        """flash-attn's rule: the reference is rounded to 16 bits before it is compared."""
        found, exact, rounded = self.found.float(), self.exact.to(self.rounded.dtype).float(), self.rounded.float()
        assert torch.isfinite(found).all(), what
        error, theirs = (found - exact).abs(), (rounded - exact).abs()
        limit = factor * theirs.max() + 1e-5
        assert error.max() <= limit, f"{what}: error {error.max():.3g}, limit {limit:.3g}"
        if mean is not None:
            limit = mean * theirs.mean()
            assert error.mean() <= limit, f"{what}: mean error {error.mean():.3g}, limit {limit:.3g}"


def codes(*shape: int, device: str, size: float = 1.0, dtype: str = "float8_e4m3fn") -> Any:
    return (torch.randn(shape, device=device) * size).to(getattr(torch, dtype))


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
    """Attention of numbers in float32; ``rounds`` to "bfloat16" or "float16", or to bfloat16 and P to "e4m3"."""
    pairs, rows = allowed
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    if rounds is not None:
        dtype = torch.bfloat16 if rounds == "e4m3" else getattr(torch, rounds)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
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


class CacheProblem:
    """A cache, and what comes into it; the options are drawn."""

    def __init__(
        self,
        random: Random,
        dim: int,
        lengths: tuple[int, int],
        mask: tuple[bool, bool],
        device: str,
        dtype: str = "float8_e4m3fn",
    ) -> None:
        draw, (len_q, room), self.device, self.dtype = random, lengths, device, dtype
        self.is_eight_bit = dtype.startswith("float8")
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
        self.dim_v = dim if self.is_eight_bit else draw.choice(self.widths_of_values())
        self.has_qv = dim == 64 and self.dim_v >= 256
        shapes = (
            (self.queries, self.heads, dim),
            (self.new, self.heads_kv, dim),
            (self.new, self.heads_kv, self.dim_v),
        )
        self.q, self.k, self.v = (self.numbers(BATCH, max(counts), *shape) for counts, *shape in shapes)
        self.qv = self.numbers(BATCH, max(self.queries), self.heads, self.dim_v) if self.has_qv else None
        size = self.page_size or room
        each = -(-room // size)
        self.table = torch.randperm(2 * BATCH * each, device=device)[: BATCH * each].view(BATCH, -1).int()
        self.k_cache, self.v_cache = (
            self.numbers(2 * BATCH * each, size, self.heads_kv, width) for width in (dim, self.dim_v)
        )
        rotary_dim = int(draw.choice((0.0, 0.5, 1.0)) * dim) // 16 * 16 if any(self.new) else 0
        angles = torch.rand(each * size, rotary_dim // 2, device=device) * 2 * torch.pi
        tables = (angles.cos().to(self.q.dtype), angles.sin().to(self.q.dtype))
        self.angles = tables if rotary_dim else (None, None)
        self.interleaved = draw.random() < 0.5
        has_scales = draw.random() < 0.75 and self.is_eight_bit
        self.scales = [torch.rand(BATCH, self.heads_kv, device=device) * 2 if has_scales else None for _ in "qkv"]
        self.prepares = draw.random() < 0.3
        self.positions: list[int] | None = None
        self.rows_of_table: list[int] | None = None
        if not self.is_eight_bit:
            self.positions = [n // 2 for n in self.seqlens] if rotary_dim and draw.random() < 0.5 else None
            self.rows_of_table = draw.sample(range(2 * BATCH), BATCH) if draw.random() < 0.5 else None

    def widths_of_values(self) -> tuple[int, ...]:
        """As in FlashAttention-3's test; narrow keys beside wide values have a second query, ``qv``."""
        if self.dim <= 64:
            return self.dim, 256, 512
        return (128, self.dim) if 128 < self.dim <= 192 else (self.dim,)

    def numbers(self, *shape: int) -> Any:
        return codes(*shape, device=self.device, dtype=self.dtype)

    def counts(self, draw: Random, longest: int) -> list[int]:
        """Rows of each sequence; the first has the most."""
        if not self.is_packed:
            return [longest] * BATCH
        return [longest, *(draw.randint(max(1, longest - 20), longest) for _ in range(BATCH - 1))]

    def packed(self, x: Any, counts: Sequence[int]) -> Any:
        return torch.cat([rows[:count] for rows, count in zip(x.view(torch.uint8), counts, strict=True)]).view(x.dtype)

    def starts(self, counts: Sequence[int]) -> Any:
        return self.ints([sum(counts[:b]) for b in range(BATCH + 1)])

    def ints(self, values: Sequence[int]) -> Any:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def places(self) -> dict[str, Any]:
        """Which rows or pages the sequences have."""
        if self.page_size is None:
            return {"cache_batch_idx": self.table[:, 0]}
        if self.rows_of_table is None:
            return {"page_table": self.table}
        # What other rows say is never read.
        table = self.table.new_full((2 * BATCH, self.table.shape[1]), 10**6)
        rows = self.ints(self.rows_of_table)
        table[rows.long()] = self.table
        return {"page_table": table, "cache_batch_idx": rows}

    def metadata(self, interface: Any, lengths: Any, **masking: Any) -> Any:
        sizes = (BATCH, max(self.queries), self.room, self.heads, self.heads_kv, self.dim)
        how = {"page_size": self.page_size, "num_splits": self.num_splits, "has_softcap": self.cap > 0}
        how |= {"headdim_v": self.dim_v, "softcap": self.cap, "has_qv": self.has_qv}
        return interface.get_scheduler_metadata(*sizes, lengths, self.q.dtype, **masking, **how)

    def call(self, interface: Any) -> Any:
        """The function under test; the result is (batch, longest, heads, dim) with zeros behind the rows."""
        lengths = self.ints(self.seqlens)
        q, qv, new, packed = self.q, self.qv, (self.k, self.v), {}
        if self.is_packed:
            q, new = self.packed(q, self.queries), tuple(self.packed(x, self.new) for x in new)
            qv = None if qv is None else self.packed(qv, self.queries)
            packed = {"cu_seqlens_q": self.starts(self.queries), "max_seqlen_q": max(self.queries)}
            packed |= {"cu_seqlens_k_new": self.starts(self.new)} if any(self.new) else {}
        masking = {"causal": self.causal, "window_size": self.window, "attention_chunk": self.chunk}
        out = interface.flash_attn_with_kvcache(
            *(q, self.k_cache, self.v_cache),
            *(new if any(self.new) else (None, None)),
            qv=qv,
            rotary_cos=self.angles[0],
            rotary_sin=self.angles[1],
            rotary_interleaved=self.interleaved,
            rotary_seqlens=None if self.positions is None else self.ints(self.positions),
            cache_seqlens=lengths,
            cache_leftpad=self.ints(self.leftpad) if self.has_leftpad else None,
            q_descale=self.scales[0],
            k_descale=self.scales[1],
            v_descale=self.scales[2],
            softcap=self.cap,
            num_splits=self.num_splits,
            scheduler_metadata=self.metadata(interface, lengths, **masking) if self.prepares else None,
            **masking,
            **self.places(),
            **packed,
        )
        assert out.dtype == (torch.bfloat16 if self.is_eight_bit else q.dtype)
        if not self.is_packed:
            return out
        rows = torch.split(out, self.queries)
        return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)

    def turned(self, x: Any, b: int, *, one_position: bool = False) -> Any:
        """Rows of sequence b, turned by their positions, and rounded."""
        if self.angles[0] is None:
            return x
        first = (self.positions or self.seqlens)[b]
        steps = torch.zeros(len(x)).long() if one_position else torch.arange(len(x))
        return turned(x, self.angles, first + steps, interleaved=self.interleaved)

    def formula(self) -> str:
        """How the formula rounds: P to e4m3 where Hopper's kernel for many queries in float8 runs."""
        if not self.is_eight_bit:
            return self.dtype
        by_boxes = self.page_size is None or (self.page_size % 8 == 0 and not self.has_leftpad)
        is_hopper = self.device != "cuda" or torch.cuda.get_device_capability()[0] == 9
        rounds_p = is_hopper and by_boxes and max(self.queries) >= 64 and self.num_splits < 2
        return "e4m3" if rounds_p else "bfloat16"

    def rows(self, cache: Any) -> Any:
        """The bytes of keys or values of each sequence, (batch, room, heads, dim)."""
        return cache.view(torch.uint8)[self.table.long()].flatten(1, 2)

    def check(self, interface: Any) -> None:
        keys, values = self.rows(self.k_cache).clone(), self.rows(self.v_cache).clone()
        saved = self.k_cache.clone(), self.v_cache.clone()
        out = self.call(interface)
        if self.prepares:
            # The same metadata serves further calls.
            self.k_cache.copy_(saved[0])
            self.v_cache.copy_(saved[1])
            assert torch.equal(self.call(interface), out)
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
            q, k, v = (scaled(x, scale) for x, scale in zip((q, k, v), own, strict=True))
            if self.qv is not None:
                q, k = torch.cat([q, self.qv[b : b + 1, :queries].float()], -1), torch.cat([k, v], -1)
            allowed = allowed_pairs((queries, end - self.leftpad[b]), self.causal, self.window, self.chunk, self.device)
            made = (reference(q, k, v, allowed, self.cap, rounds) for rounds in (None, self.formula()))
            parts.append(Errors(*(x[0].flatten() for x in (out[b : b + 1, :queries], *made))))
        self.check_cache(keys, values, what)
        factor, errors = 3 if self.cap else 2, Errors(*(torch.cat(part) for part in zip(*parts, strict=True)))
        if self.is_eight_bit:
            errors.check(factor, what, mean=1.5)
        else:
            errors.check_sixteen_bits(factor, None if self.cap else 1.5, what)

    def check_cache(self, keys: Any, values: Any, what: object) -> None:
        """New keys and values are where they belong, and nothing else has changed."""
        assert torch.equal(self.rows(self.v_cache), values), what
        found = self.rows(self.k_cache)
        if self.is_eight_bit or self.angles[0] is None:
            assert torch.equal(found, keys), what
        else:
            found, keys = found.view(self.q.dtype), keys.view(self.q.dtype)
            torch.testing.assert_close(found, keys, rtol=1e-3, atol=1e-3, msg=lambda text: f"{what}: {text}")
