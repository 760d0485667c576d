"""What flash-attn's published tests are made of: the matrix of options, the reference, and the rule for errors.

The rule: the largest error against attention in float32 is at most twice, for gradients three times, that of the same
formula computed in the inputs' dtype, and 1e-5, or for gradients with a cap 3e-4, where that is right by accident.

DRAWN_CASES=nightly takes the whole matrix: every dim, dtype, mask, ALiBi, dropout and softcap, reproducible or not,
with every pair of lengths and every number of heads. Otherwise a sample has all of these, but not with each other.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

try:
    import torch
except ImportError:
    # Tests of this folder skip themselves; what they share must still import.
    torch = None

WHOLE = os.environ.get("DRAWN_CASES") == "nightly"
DIMS = (32, 40, 59, 64, 80, 96, 111, 128, 160, 192, 224, 256)
DTYPES = ("float16", "bfloat16")
LENGTHS = (
    *((113, 203), (128, 217), (113, 211), (108, 256), (256, 512), (512, 256), (1024, 1024), (1023, 1024)),
    *((1024, 1023), (2048, 2048), (1, 147)),
)
#: More, where a mask is aligned by them, and nothing is dropped: with few keys some gradients of queries are 0 in any
#: arithmetic, unless what is kept counts more often.
CAUSAL_LENGTHS = ((1, 239), (239, 1), (3, 799), (799, 3), (127, 512), (512, 127), (127, 513), (513, 127))
HEADS = {"mha": (6, 6), "mqa": (6, 1), "gqa": (6, 2)}
DROPPED = 0.17


@dataclass(frozen=True)
class Kind:
    """The options of one item of the matrix, each a kernel to build."""

    dim: int
    dtype: str
    causal: bool
    local: bool
    alibi: bool
    drops: bool
    cap: float

    def __str__(self) -> str:
        names = [name for name in ("causal", "local", "alibi", "drops", "cap") if getattr(self, name)]
        return "-".join([str(self.dim), self.dtype, *names])


_RULES = [
    (causal, local, alibi, drops, cap)
    for causal, local, alibi in itertools.product((False, True), repeat=3)
    for drops, cap in ((False, 0.0), (True, 0.0), (False, 50.0))
]
_ALL = [Kind(dim, dtype, *rules) for dim in DIMS for dtype in DTYPES for rules in _RULES]
#: Three dims for each combination of rules, and each dtype in turn.
_SAMPLE = [
    Kind(DIMS[(n + n // len(_RULES)) % len(DIMS)], DTYPES[(n + n // len(DIMS)) % 2], *_RULES[n % len(_RULES)])
    for n in range(3 * len(_RULES))
]
KINDS = _ALL if WHOLE else _SAMPLE


@dataclass(frozen=True)
class Case:
    """What the kernels of a kind are called with."""

    lengths: tuple[int, int]
    heads: tuple[int, int]
    window: tuple[int, int]
    #: Whether gradients are to be reproducible; where both, one after the other.
    deterministic: tuple[bool, ...]


def cases(kind: Kind) -> Iterator[Case]:
    """Every pair of lengths, each with a window of its own, with every number of heads or with one in turn."""
    random = Random(str(kind))
    pairs = LENGTHS + (CAUSAL_LENGTHS if kind.causal and not kind.drops else ())
    for number, lengths in enumerate(pairs):
        # Were no query to see two keys, gradients of queries would be 0 but for rounding.
        left, right = random.randint(min(1, lengths[1] - 1), lengths[1] - 1), random.randrange(lengths[1])
        window = (left, right) if kind.local else (-1, -1)
        for heads in HEADS.values() if WHOLE else [list(HEADS.values())[number % len(HEADS)]]:
            yield Case(lengths, heads, window, (False, True) if WHOLE else (number % 2 == 0,))


def options_of(kind: Kind, case: Case, slopes: Any) -> dict[str, Any]:
    """As flash-attn's functions take them."""
    options = {"causal": kind.causal, "window_size": case.window, "softcap": kind.cap, "alibi_slopes": slopes}
    return options | {"dropout_p": DROPPED if kind.drops else 0.0}


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


def run(attend: Callable[..., Any], tensors: Any, do: Any) -> tuple[Any, ...]:
    """The output, and the gradients of the tensors."""
    out = attend(*tensors)
    return (out.detach(), *torch.autograd.grad(out, tensors, do))


def references(tensors: Any, do: Any, rules: Any, kept: Any = None) -> tuple[Any, Any]:
    """What ``run`` should give, and what the formula in the inputs' dtype gives."""
    exact, rounded = (
        run(lambda *x, exact=exact: reference(*x, rules, kept, exact=exact), tensors, do) for exact in (True, False)
    )
    return exact, rounded


def check(attends: Sequence[Callable[..., Any]], tensors: Any, do: Any, rules: Any, kept: list[Any]) -> None:
    """Holds functions that mean the same against the reference; each may add to ``kept`` which pairs it kept."""
    right = None
    for attend in attends:
        found = run(attend, tensors, do)
        if right is None or kept:
            right = references(tensors, do, rules, kept[-1] if kept else None)
        exact, rounded = right
        compare(found, rounded, exact, reach_of_rounding_out(tensors, do, exact[0], rules) if rules[2] else None)


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


def reach_of_rounding_out(tensors: Any, do: Any, out: Any, rules: Any) -> tuple[float, float]:
    """How far dq and dk move when each element of the output is rounded at random, in rounding steps of one.

    dS = P (dP - D) with D the sum of dO times the output as it was rounded. Where a row has one probability near 1
    that is all there is, and a reference whose D comes from dP itself has no error at all.
    """
    q, k, _ = (x.detach().float() for x in tensors)
    allowed, distance, cap, slopes = rules
    group, scale = q.shape[2] // k.shape[2], q.shape[-1] ** -0.5
    k = k.repeat_interleave(group, 2)
    capped = torch.tanh(torch.einsum("bqhd,bkhd->bhqk", q, k) * scale / cap)
    scores, slope = cap * capped, 1 - capped * capped
    if slopes is not None:
        scores = scores - slopes.view(-1, q.shape[2], 1, 1) * distance
    weights = torch.softmax(scores.masked_fill(~allowed, float("-inf")), -1).nan_to_num(0.0)
    moved = weights * slope * (do.float() * out.float()).square().sum(-1).sqrt().transpose(1, 2)[..., None]
    dq = torch.einsum("bhqk,bkhd->bqhd", moved, k) * scale
    dk = torch.einsum("bhqk,bqhd->bkhd", moved, q) * scale
    dk = dk.unflatten(2, (-1, group)).sum(3)
    return dq.abs().max().item(), dk.abs().max().item()


def kept_pairs(signed: Any, allowed: Any, lengths: tuple[int, int]) -> Any:
    """Which pairs were kept, by the signs of probabilities, of which the expected part is below 0."""
    assert all(size % 128 == 0 for size in signed.shape[2:])
    signed = signed[:, :, : lengths[0], : lengths[1]]
    assert not signed.masked_fill(allowed, 0).any()
    # What is too small for the dtype has no sign.
    count = max((signed != 0).sum().item(), 1)
    assert abs((signed < 0).sum().item() / count - DROPPED) < 5 * (DROPPED * (1 - DROPPED) / count) ** 0.5
    return signed >= 0


def band(distance: Any, causal: bool, window: tuple[int, int]) -> Any:
    """Which pairs are so near that they are allowed: how far the key is behind the query's own place."""
    left, right = window
    allowed = torch.ones_like(distance, dtype=torch.bool)
    if left >= 0:
        allowed = allowed & (distance >= -left)
    if right >= 0:
        allowed = allowed & (distance <= right)
    return allowed & (distance <= 0) if causal else allowed


def turned(x: Any, angles: tuple[Any, Any], positions: Any, *, interleaved: bool) -> Any:
    """Rows of heads, turned by the angles of their positions, and rounded."""
    cos, sin = (table[positions.to(table.device)][:, None].float() for table in angles)
    pairs, found = cos.shape[-1], x.float().clone()
    one, two = slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)
    if not interleaved:
        one, two = slice(pairs), slice(pairs, 2 * pairs)
    first, second = found[..., one].clone(), found[..., two].clone()
    found[..., one], found[..., two] = first * cos - second * sin, first * sin + second * cos
    return found.to(x.dtype)


def distances(len_q: int, len_kv: int, device: str = "cuda") -> Any:
    """(queries, keys): the last query is at the place of the last key."""
    return torch.arange(len_kv, device=device) - torch.arange(len_q, device=device)[:, None] - (len_kv - len_q)
