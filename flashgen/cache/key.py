"""The cache key: a digest of everything that can change a cubin, and of nothing else."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from flashgen.errors import CacheError

if TYPE_CHECKING:
    from flashgen.render import KernelSource

#: Version of the key fields and of the entry layout; raise it when either changes.
SCHEMA = 1
_DIGITS = frozenset("0123456789abcdef")


def cache_key(source: KernelSource, build_id: str, options: Sequence[str], *, output: str = "cubin") -> str:
    """The key (64 hex digits) of ``source`` compiled by the compiler ``build_id`` with ``options``.

    The architecture enters as its full name, since sm_90 and sm_90a give different cubins, and the options
    keep their order. The comment at the top of the source stays out: it names widths and captured numbers,
    which are arguments of a call. Paths, the driver version and the GPU's name stay out: no cubin depends on them.
    """
    return _digest(str(SCHEMA), source.code, build_id, source.plan.arch.name, output, *options)


@lru_cache(maxsize=64)
def _digest(*fields: str) -> str:
    # Not for security, and said so: hashlib refuses some digests on FIPS machines otherwise.
    digest = hashlib.sha256(usedforsecurity=False)
    for field in fields:
        data = field.encode()
        # The length goes first: joined by a separator, ("a", "b-c") and ("a-b", "c") could meet in one key.
        digest.update(len(data).to_bytes(8, "big"))
        digest.update(data)
    return digest.hexdigest()


def check_key(key: str) -> str:
    """``key`` itself, if it is one; keys become file names, and ``../x`` must never be one."""
    if len(key) != 64 or not _DIGITS.issuperset(key):
        raise CacheError(f"key={key!r} is not a cache key; pass the 64 hex digits that cache_key() returns")
    return key
