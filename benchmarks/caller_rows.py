"""The calls that ``callers.py`` times: packed sequences, dropout, prompts in pages and other head dims."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Problem:
    """One line of the table."""

    kind: str
    direction: str
    head_dim: int
    head_dim_v: int
    heads: int
    kv_heads: int
    #: Queries and keys of each sequence; the last key is that of the last query.
    queries: tuple[int, ...]
    keys: tuple[int, ...]
    causal: bool = True
    dropout: float = 0.0
    page: int = 0

    @property
    def flops(self) -> float:
        """Floating-point operations of the pairs that count."""
        pairs = 0.0
        for q, k in zip(self.queries, self.keys, strict=True):
            pairs += q * k - (q * q / 2 if self.causal else 0)
        forward = 2.0 * pairs * (self.head_dim + self.head_dim_v) * self.heads
        return forward * (2.5 if self.direction == "backward" else 1.0)

    def __str__(self) -> str:
        dims = str(self.head_dim) if self.head_dim == self.head_dim_v else f"{self.head_dim}/{self.head_dim_v}"
        words = [self.kind, self.direction, f"D={dims}", f"heads {self.heads}/{self.kv_heads}"]
        words.append("causal" if self.causal else "full")
        words.append(f"{len(self.queries)} x {round(sum(self.queries) / len(self.queries))}")
        if self.queries != self.keys:
            words.append(f"over {round(sum(self.keys) / len(self.keys))} keys")
        return ", ".join([*words, *([f"pages of {self.page}"] if self.page else [])])


def documents(tokens: int, average: int) -> tuple[int, ...]:
    """Lengths of documents, log-normal around an average, that fill so many tokens."""
    draw = np.random.default_rng(average)
    lengths: list[int] = []
    while sum(lengths) < tokens:
        drawn = max(16, int(draw.lognormal(np.log(average) - 0.5, 1.0)))
        lengths.append(min(drawn, tokens - sum(lengths)))
    return tuple(lengths)


def packed() -> Iterator[Problem]:
    """Documents of log-normal lengths, packed."""
    for direction in ("forward", "backward"):
        for dim, heads, kv_heads in (
            (64, 32, 32),
            (64, 32, 8),
            (64, 32, 4),
            (128, 16, 16),
            (128, 32, 8),
            (128, 32, 4),
            (256, 16, 16),
            (256, 16, 4),
            (256, 16, 2),
        ):
            for tokens, average in ((16384, 300), (32768, 600), (32768, 2500), (65536, 4000)):
                lengths = documents(tokens, average)
                yield Problem("packed", direction, dim, dim, heads, kv_heads, lengths, lengths)


def equal() -> Iterator[Problem]:
    """Packed sequences that are equally long, beside the same as a batch."""
    for direction in ("forward", "backward"):
        for dim, heads, kv_heads in ((64, 32, 8), (128, 16, 16), (256, 16, 4)):
            for length in (512, 2048, 8192):
                lengths = (length,) * (16384 // length)
                yield Problem("equal", direction, dim, dim, heads, kv_heads, lengths, lengths)


def dropped() -> Iterator[Problem]:
    """One pair in ten dropped."""
    for direction in ("forward", "backward"):
        for dim in (64, 128):
            for causal in (False, True):
                for length in (1024, 2048, 4096, 8192):
                    lengths = (length,) * (16384 // length)
                    heads = 2048 // dim
                    yield Problem("dropout", direction, dim, dim, heads, heads, lengths, lengths, causal, 0.1)


def paged() -> Iterator[Problem]:
    """New queries over keys in pages, fresh and in chunks."""
    for dim, heads, kv_heads in ((64, 32, 8), (128, 32, 8), (128, 64, 8)):
        for page in (16, 64, 256):
            for batch, new, keys in ((8, 2048, 2048), (4, 1024, 16384), (16, 512, 4096)):
                yield Problem("paged", "forward", dim, dim, heads, kv_heads, (new,) * batch, (keys,) * batch, page=page)


def other_dims() -> Iterator[Problem]:
    """Head dims besides 64, 128 and 256."""
    for direction in ("forward", "backward"):
        for dim, dim_v in ((80, 80), (96, 96), (112, 112), (192, 128)):
            for causal in (False, True):
                for length in (1024, 4096, 16384):
                    lengths = (length,) * (16384 // length)
                    yield Problem("dims", direction, dim, dim_v, 16, 16, lengths, lengths, causal)


KINDS: dict[str, Callable[[], Iterator[Problem]]] = {
    "packed": packed,
    "equal": equal,
    "dropout": dropped,
    "paged": paged,
    "dims": other_dims,
}
