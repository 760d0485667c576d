"""One cache entry as bytes: a checksummed header, a little JSON, the image. Decoding one runs no code."""

from __future__ import annotations

import hashlib
import json
import struct
import time
from typing import TYPE_CHECKING, Any

from flashgen.cache.key import SCHEMA

if TYPE_CHECKING:
    from flashgen.compile.binary import Binary

MAGIC = b"flashgen"
#: Magic, schema, bytes of JSON, bytes of image, key, and the sha256 of all other bytes of the file.
_HEADER = struct.Struct(">8sIIQ32s32s")
_UNSIGNED_HEADER_BYTES = _HEADER.size - 32
#: A corrupt length must not make us read a terabyte of holes; real entries are below a few MiB.
LARGEST_ENTRY = 1 << 28
_LONGEST_LOG = 1 << 16


class DamagedEntryError(Exception):
    """The bytes are not a whole entry for the key; the message is the reason. Never leaves the cache."""


def encode(key: str, binary: Binary, build_id: str) -> bytes:
    """The bytes of the file that holds ``binary`` under ``key``."""
    meta = {
        "kind": binary.kind,
        "name": binary.name,
        "arch": binary.arch,
        "registers": binary.resources.registers,
        "spill_bytes": binary.resources.spill_bytes,
        "stack_bytes": binary.resources.stack_bytes,
        "static_smem_bytes": binary.resources.static_smem_bytes,
        "compile_seconds": binary.compile_seconds,
        "log": binary.log[:_LONGEST_LOG],
        "build_id": build_id,
        "created": time.time(),
    }
    packed_meta = json.dumps(meta, sort_keys=True).encode()
    image = bytes(binary.image)
    header = _HEADER.pack(MAGIC, SCHEMA, len(packed_meta), len(image), bytes.fromhex(key), bytes(32))
    header = header[:_UNSIGNED_HEADER_BYTES]
    return b"".join((header, _checksum(header, packed_meta + image), packed_meta, image))


def decode(key: str, data: bytes) -> Binary:
    """The binary in ``data``, after every byte has been verified."""
    from flashgen.compile.binary import DEFAULT_KIND, Binary, Resources

    meta_bytes = verify(key, data)
    start = _HEADER.size
    meta = read_meta(data[start : start + meta_bytes])
    try:
        return Binary(
            name=_typed(meta, "name", str),
            arch=_typed(meta, "arch", str),
            image=data[start + meta_bytes :],
            resources=Resources(
                registers=_typed(meta, "registers", int),
                spill_bytes=_typed(meta, "spill_bytes", int),
                stack_bytes=_typed(meta, "stack_bytes", int),
                static_smem_bytes=_typed(meta, "static_smem_bytes", int),
            ),
            compile_seconds=float(_typed(meta, "compile_seconds", (int, float))),
            log=_typed(meta, "log", str),
            # Entries of earlier versions name no kind.
            kind=_typed({"kind": DEFAULT_KIND, **meta}, "kind", str),
        )
    except (KeyError, TypeError) as error:
        raise DamagedEntryError(f"its description is incomplete ({error})") from None


def verify(key: str, data: bytes) -> int:
    """Check every byte of ``data`` against its header; the number of bytes of JSON after the header."""
    # Cut short: a crash, a full disk or a copy that was interrupted.
    if len(data) < _HEADER.size:
        raise DamagedEntryError(f"it has {len(data)} bytes, fewer than a header")
    magic, schema, meta_bytes, image_bytes, owner, checksum = _HEADER.unpack_from(data)
    if magic != MAGIC:
        raise DamagedEntryError("it does not start like a cache entry")
    if schema != SCHEMA:
        raise DamagedEntryError(f"its layout is number {schema}, and this version reads {SCHEMA}")
    if _HEADER.size + meta_bytes + image_bytes != len(data):
        raise DamagedEntryError(f"it has {len(data)} bytes, and its header says otherwise")
    # A whole entry under another's name (renamed, restored or swapped files) holds the wrong kernel.
    if owner.hex() != key:
        raise DamagedEntryError(f"it belongs to the key {owner.hex()}")
    # A flipped bit in the cubin would become wrong numbers or a driver error far from here.
    if checksum != _checksum(data[:_UNSIGNED_HEADER_BYTES], memoryview(data)[_HEADER.size :]):
        raise DamagedEntryError("its checksum does not match")
    return int(meta_bytes)


def meta_span(header: bytes) -> tuple[int, int]:
    """Where the JSON lies in a file that starts with ``header``, unverified: for statistics only."""
    if len(header) < _HEADER.size or not header.startswith(MAGIC):
        raise DamagedEntryError("it does not start like a cache entry")
    return _HEADER.size, _HEADER.size + min(_HEADER.unpack_from(header)[2], 1 << 20)


def read_meta(data: bytes) -> dict[str, Any]:
    """The entry's JSON object."""
    try:
        meta = json.loads(data)
    except (ValueError, RecursionError):
        raise DamagedEntryError("its description is not JSON") from None
    if not isinstance(meta, dict):
        raise DamagedEntryError("its description is not a JSON object")
    return meta


def _checksum(header: bytes, payload: bytes | memoryview) -> bytes:
    digest = hashlib.sha256(header, usedforsecurity=False)
    digest.update(payload)
    return digest.digest()


def _typed(meta: dict[str, Any], name: str, kind: type | tuple[type, ...]) -> Any:
    value = meta[name]
    if not isinstance(value, kind):
        raise TypeError(f"{name}={value!r}")
    return value
