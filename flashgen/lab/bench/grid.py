"""Cases from lists of lengths, head dims, masks and passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from flashgen.common.checks import is_one_of, is_whole
from flashgen.common.show import show
from flashgen.dtypes import DTYPES
from flashgen.errors import ArgumentError, SpecError
from flashgen.lab.bench.case import Case, Pass
from flashgen.spec.attention import MAX_HEAD_DIM

T = TypeVar("T")
#: Queries of all sequences, and columns of all heads, where a call does not say otherwise.
TOKENS, HIDDEN = 16384, 2048
_MOST = 2**20


def cases(
    lengths: Sequence[int],
    head_dims: Sequence[int],
    *,
    dtype: str = "bf16",
    masks: Sequence[str] = ("full", "causal"),
    passes: Sequence[Pass] = ("forward",),
    batch: int | None = None,
    heads: int | None = None,
    tokens: int = TOKENS,
) -> tuple[Case, ...]:
    """Every combination. Without ``batch`` all cases have about as many tokens, without ``heads`` as many columns."""
    if not is_one_of(dtype, DTYPES):
        raise ArgumentError(f"dtype={show(dtype)} is unknown; use one of {', '.join(DTYPES)}")
    _check("lengths", lengths, lambda n: is_whole(n, 1, _MOST), f"whole numbers from 1 to {_MOST}")
    _check("head_dims", head_dims, lambda n: is_whole(n, 1, MAX_HEAD_DIM), f"whole numbers from 1 to {MAX_HEAD_DIM}")
    _check("masks", masks, lambda m: is_one_of(m, ("full", "causal")), "'full' and 'causal'")
    _check("passes", passes, lambda p: is_one_of(p, ("forward", "backward")), "'forward' and 'backward'")
    for name, number in (("batch", batch), ("heads", heads), ("tokens", tokens)):
        if number is not None and not is_whole(number, 1, _MOST):
            raise ArgumentError(f"{name}={show(number)} is out of range; use a whole number from 1 to {_MOST}")
    return tuple(
        Case(
            pass_,
            dtype,
            head_dim,
            mask == "causal",
            length,
            batch or max(1, tokens // length),
            heads or max(1, HIDDEN // head_dim),
        )
        for head_dim in dict.fromkeys(head_dims)
        for length in dict.fromkeys(lengths)
        for mask in dict.fromkeys(masks)
        for pass_ in dict.fromkeys(passes)
    )


def decode_cases(
    lengths: Sequence[int],
    head_dims: Sequence[int],
    *,
    dtype: str = "bf16",
    new_tokens: int = 1,
    batch: int | None = None,
    heads: int | None = None,
    heads_kv: int | None = None,
    cache_dtype: str | None = None,
    page_size: int = 64,
    page_scales: bool = False,
    window: int | None = None,
    ragged: bool = False,
) -> tuple[Case, ...]:
    """Steps that generate, with so many keys in the cache of each of ``batch`` sequences, by default 64.

    By default there are 32 heads, and a fourth as many of keys. With ``cache_dtype`` flashgen's cache is in 8 bits,
    and with ``page_scales`` each page of it has scales. Each query attends to ``window`` keys before its own position,
    by default to all. With ``ragged`` the caches are full up to even shares of the length.
    """
    heads = 32 if heads is None else heads
    heads_kv = max(1, heads // 4) if heads_kv is None else heads_kv
    for name, number, least, most in (
        ("new_tokens", new_tokens, 1, 63),
        ("heads_kv", heads_kv, 1, _MOST),
        ("page_size", page_size, 1, _MOST),
        ("window", 0 if window is None else window, 0, _MOST),
    ):
        if not is_whole(number, least, most):
            raise ArgumentError(f"{name}={show(number)} is out of range; use a whole number from {least} to {most}")
    batch = 64 if batch is None else batch
    found = cases(lengths, head_dims, dtype=dtype, masks=("causal",), batch=batch, heads=heads)
    if heads % heads_kv:
        raise ArgumentError(f"heads_kv={heads_kv} does not divide the number of heads; use a divisor of {heads}")
    if min(lengths) < new_tokens:
        raise ArgumentError(f"lengths={show(min(lengths))} is less than new_tokens={new_tokens}; use longer ones")
    # The one new token attends to all keys, which libraries without masks can do.
    found = tuple(replace(c, new_tokens=new_tokens, heads_kv=heads_kv, causal=new_tokens > 1) for c in found)
    of_cache: dict[str, Any] = {"cache_dtype": cache_dtype, "page_size": page_size, "page_scales": page_scales}
    made = tuple(replace(case, window=window, ragged=ragged, **of_cache) for case in found)
    for case in made:
        try:
            case.spec_with("paged")
        except SpecError as error:
            raise ArgumentError(str(error)) from None
    return made


def check_cases(cases: object) -> None:
    """An ArgumentError for what is not a list of cases."""
    if not isinstance(cases, list | tuple) or not all(isinstance(case, Case) for case in cases):
        raise ArgumentError(f"cases={show(cases)} is not a list of cases; write flashgen.lab.cases((1024,), (64,))")


def parse_lengths(text: str) -> tuple[int, ...]:
    """Numbers from a list such as ``512,1k,8k``; k is 1024."""
    return tuple(_items("lengths", text, _length, "512,1k,8k"))


def parse_numbers(name: str, text: str) -> tuple[int, ...]:
    """Numbers from a list such as ``64,128``."""
    return tuple(_items(name, text, int, "64,128"))


def _length(word: str) -> int:
    return 1024 * int(word[:-1]) if word[-1:] in ("k", "K") else int(word)


def _items(name: str, text: str, read: Callable[[str], T], example: str) -> Iterator[T]:
    for word in text.split(","):
        try:
            yield read(word.strip())
        except ValueError:
            raise ArgumentError(f"{name}={show(text)} is no list of numbers; write one such as {example}") from None


def _check(name: str, values: object, is_right: Callable[[object], bool], right: str) -> None:
    if not isinstance(values, list | tuple) or not values or not all(map(is_right, values)):
        raise ArgumentError(f"{name}={show(values)} is out of range; use a list of {right}")
