"""The error of FP8 attention on the CPU, by the oracle: the tables of docs/explanation/fp8.md.

    python benchmarks/fp8_error.py lengths head-dims outliers parts

Data are those of FlashAttention-3's paper: N(0, 1), and in one element of a thousand N(0, size^2) besides. Errors are
root mean squares over all elements of O, against attention in float64 to the same bf16 tensors.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import ml_dtypes
import numpy as np

from flashgen.oracle import dequantized_rows, quantized_rows, rotation

Array = Any
HEADS, QUERIES = 8, 1024
#: Rows that share a scale; 0: those of all heads.
SCALES = {"tensor": 0, "head": 1 << 30, "block 128": 128, "block 64": 64}
LENGTHS, DIMS, SIZES = (1024, 2048, 4096, 8192, 16384), (64, 128, 256), (0, 1, 3, 10, 30, 100)


def drawn(random: np.random.Generator, rows: int, dim: int, size: float) -> Array:
    """One head of Q, K or V."""
    x = random.standard_normal((rows, dim))
    x += size * random.standard_normal((rows, dim)) * (random.random((rows, dim)) < 1e-3)
    return x.astype(ml_dtypes.bfloat16)


def rounded(x: Array, block: int, rotate: bool, largest: float) -> Array:
    """What the e4m3 codes of a head stand for, turned back; ``largest`` is that of all heads."""
    turned = x.astype(np.float32) @ rotation(x.shape[1]).astype(np.float32) if rotate else x.astype(np.float32)
    if block == 0:
        scale = np.float32(largest / 448)
        found = _e4m3(turned / scale).astype(np.float64) * scale
    elif block > len(x):
        # One block for the whole head.
        found = _of_blocks(x, len(x), rotate)
    else:
        found = _of_blocks(x, block, rotate)
    return found @ rotation(x.shape[1]).T if rotate else found


def _of_blocks(x: Array, block: int, rotate: bool) -> Array:
    codes, scales = quantized_rows(x[None, :, None], block, rotate=rotate)
    return dequantized_rows(codes, scales, block)[0, :, 0]


def attention(q: Array, k: Array, v: Array, *, rounds_p: bool) -> Array:
    """O of one head, with P in e4m3 relative to 2^8 at the largest logit of a row, if it is rounded."""
    parts = []
    for first in range(0, len(q), 256):
        logits = q[first : first + 256] @ k.T / np.sqrt(q.shape[1])
        weights = np.exp(logits - logits.max(1, keepdims=True))
        p = _e4m3(256 * weights).astype(np.float64) / 256 if rounds_p else weights
        parts.append(p @ v / weights.sum(1, keepdims=True))
    return np.concatenate(parts)


def _e4m3(x: Array) -> Array:
    return x.astype(np.float32).astype(ml_dtypes.float8_e4m3fn)


class Heads:
    """Q, K and V of some heads, and their O in float64."""

    def __init__(self, length: int, dim: int, size: float) -> None:
        random = np.random.default_rng(0)
        self.heads = [tuple(drawn(random, length, dim, size) for _ in "qkv") for _ in range(HEADS)]
        self.exact = [self._attend(head, head, rounds_p=False) for head in self.heads]
        spread = rotation(dim).astype(np.float32)
        self.largest = {
            rotate: [self._largest(i, spread if rotate and i < 2 else None) for i in range(3)]
            for rotate in (False, True)
        }

    @property
    def size_of_o(self) -> float:
        """The root mean square of O."""
        return _rms(self.exact)

    def error(self, block: int, rotate: bool, parts: str = "qkvp") -> float:
        """The error of O where the named ones of Q, K, V and P are rounded."""
        errors = []
        for head, exact in zip(self.heads, self.exact, strict=True):
            made = tuple(
                rounded(x, block, rotate and name != "v", largest) if name in parts else x
                for name, x, largest in zip("qkv", head, self.largest[rotate], strict=True)
            )
            errors.append(self._attend(made, head, rounds_p="p" in parts) - exact)
        return _rms(errors)

    @staticmethod
    def _attend(head: Any, like: Any, *, rounds_p: bool) -> Array:
        q, k, v = (x.astype(np.float64) for x in head)
        return attention(q[:QUERIES], k, v, rounds_p=rounds_p)

    def _largest(self, which: int, spread: Array | None) -> float:
        heads = (head[which].astype(np.float32) for head in self.heads)
        return max(float(np.abs(x if spread is None else x @ spread).max()) for x in heads)


def _rms(parts: Iterable[Array]) -> float:
    return float(np.sqrt(np.mean([np.mean(np.square(x)) for x in parts])))


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _errors(label: str, rows: Iterable[tuple[str, Heads]]) -> Iterator[str]:
    names = [f"{name}{turned}" for turned in ("", ", rotated") for name in SCALES]
    yield _row([label, "O", *names])
    yield _row(["---:"] * (len(names) + 2))
    for name, heads in rows:
        found = [heads.error(block, rotate) for rotate in (False, True) for block in SCALES.values()]
        yield _row([name, f"{heads.size_of_o:.2e}", *(f"{error:.2e}" for error in found)])


def _parts() -> Iterator[str]:
    names = {"Q and K": "qk", "V": "v", "P": "p", "all": "qkvp"}
    yield _row(["D", "rotated", *names])
    yield _row(["---:", "---", *["---:"] * len(names)])
    for dim in DIMS:
        heads = Heads(4096, dim, 10)
        for rotate in (False, True):
            errors = (f"{heads.error(128, rotate, parts):.2e}" for parts in names.values())
            yield _row([str(dim), "yes" if rotate else "no", *errors])


TABLES: dict[str, Callable[[], Iterator[str]]] = {
    "lengths": lambda: _errors("S", ((str(n), Heads(n, 128, 10)) for n in LENGTHS)),
    "head-dims": lambda: _errors("D", ((str(dim), Heads(4096, dim, 10)) for dim in DIMS)),
    "outliers": lambda: _errors("size", ((str(size), Heads(4096, 128, size)) for size in SIZES)),
    "parts": _parts,
}


def main() -> None:
    """Print the tables that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", help=f"which of {', '.join(TABLES)}; default: all")
    for name in parser.parse_args().tables or TABLES:
        print(f"\n{name}\n")
        for line in TABLES[name]():
            print(line, flush=True)


if __name__ == "__main__":
    main()
