from __future__ import annotations

import dataclasses
import json
import struct

import pytest

from flashgen.cache import entry
from flashgen.cache.entry import DamagedEntryError, decode, encode

KEY = "5a" * 32


def is_refused(data: bytes) -> bool:
    try:
        decode(KEY, data)
    except DamagedEntryError:
        return True
    return False


def test_a_binary_survives_the_round_trip(make_binary):
    binary = make_binary(3, 10_000)
    assert decode(KEY, encode(KEY, binary, "build")) == binary


@pytest.mark.parametrize("kind", ["cubin", "sources", "library"])
def test_an_entry_says_what_its_image_is(make_binary, kind):
    binary = dataclasses.replace(make_binary(), kind=kind)
    assert decode(KEY, encode(KEY, binary, "build")).kind == kind


def test_an_empty_image_survives_the_round_trip(make_binary):
    assert decode(KEY, encode(KEY, make_binary(size=0), "build")).image == b""


def test_every_flipped_bit_is_noticed(make_binary):
    data = encode(KEY, make_binary(size=700), "build")
    mutants = 0
    for position in range(len(data)):
        for bit in range(8):
            mutant = bytearray(data)
            mutant[position] ^= 1 << bit
            assert is_refused(bytes(mutant)), f"bit {bit} of byte {position}"
            mutants += 1
    assert mutants > 8_000


def test_every_truncation_and_extension_is_noticed(make_binary):
    data = encode(KEY, make_binary(), "build")
    for length in range(len(data)):
        assert is_refused(data[:length])
        # What a file system shows after a crash: the right length, zeros from some point on.
        assert is_refused(data[:length] + bytes(len(data) - length)) or not any(data[length:])
    assert is_refused(data + b"\0")
    assert is_refused(data + data)


def test_every_swap_of_neighbouring_blocks_is_noticed(make_binary):
    data = encode(KEY, make_binary(size=4096), "build")
    for start in range(0, len(data) - 1024, 512):
        swapped = data[:start] + data[start + 512 : start + 1024] + data[start : start + 512] + data[start + 1024 :]
        assert swapped == data or is_refused(swapped)


def test_an_entry_of_another_key_is_refused(make_binary):
    data = encode("77" * 32, make_binary(), "build")
    with pytest.raises(DamagedEntryError, match="belongs to the key 7777"):
        decode(KEY, data)


@pytest.mark.parametrize(
    "meta",
    [b"", b"\xff", b"[]", b"{}", b'{"name": 3}', b"nul", b"[" * 100_000],
    ids=["nothing", "not text", "list", "empty", "wrong type", "cut", "deep"],
)
def test_a_well_signed_entry_with_a_senseless_description_is_refused(meta):
    head = struct.pack(">8sIIQ32s", entry.MAGIC, entry.SCHEMA, len(meta), 3, bytes.fromhex(KEY))
    data = head + entry._checksum(head, meta + b"abc") + meta + b"abc"
    assert entry.verify(KEY, data) == len(meta)
    assert is_refused(data)


def test_the_description_is_plain_json(make_binary):
    data = encode(KEY, make_binary(2), "CL-1")
    start, stop = entry.meta_span(data)
    meta = json.loads(data[start:stop])
    assert (meta["name"], meta["arch"], meta["registers"], meta["build_id"]) == (
        "forward_2",
        "sm_80",
        130,
        "CL-1",
    )
    assert meta["created"] > 1.6e9


def test_another_layout_is_refused_by_its_number(make_binary):
    data = bytearray(encode(KEY, make_binary(), "build"))
    data[8:12] = struct.pack(">I", entry.SCHEMA + 1)
    with pytest.raises(DamagedEntryError, match="layout is number"):
        decode(KEY, bytes(data))


def test_a_moved_border_between_description_and_image_is_noticed(make_binary):
    # A blank at the image's front would be harmless at the end of the JSON, and the kernel a byte short.
    binary = dataclasses.replace(make_binary(), image=b" " + make_binary().image)
    data = encode(KEY, binary, "build")
    meta_bytes, image_bytes = struct.unpack_from(">IQ", data, 12)
    moved = data[:12] + struct.pack(">IQ", meta_bytes + 1, image_bytes - 1) + data[24:]
    assert decode(KEY, data) == binary
    assert is_refused(moved)
