"""Bytes of a spec file to plain values: JSON and TOML, of a size and depth that any file may have."""

from __future__ import annotations

import os
import re
import stat
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flashgen.common.show import show, show_path
from flashgen.errors import SpecError

#: A spec takes about 300 bytes.
MOST_BYTES = 2**20
#: Parts of a dotted TOML key: parsers take time that grows with their square.
MOST_PARTS = 16
JSON_REMEDY = 'write an object such as {"head_dim": 64}'
# A string without its closing quotes ends with its line, or with the text: then every match succeeds at its first try,
# and a search takes time in proportion to the text.
_PART = r"""(?:[\w-]+|"(?:[^"\\\n]|\\[^\n])*"?|'[^'\n]*'?)"""
#: What a text consists of, as far as it matters: strings of several lines, comments, and dotted keys. Strings of one
#: line and numbers look like keys of few parts.
_TOKEN = re.compile(
    r"""(?s:\"{3}(?:\\.|.)*?(?:\"{3}|\Z)|'{3}.*?(?:'{3}|\Z))|\#[^\n]*"""
    rf"""|(?P<key>{_PART}(?:[ \t]*\.[ \t]*{_PART})*)"""
)


def read_text(path: Path) -> str:
    """The text of a regular file of at most ``MOST_BYTES``; SpecError for anything else."""
    try:
        data = _read(path)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise SpecError(f"{show_path(path)} cannot be read ({reason}); name a TOML or JSON spec file") from None
    if len(data) > MOST_BYTES:
        raise SpecError(f"{path} has more than {MOST_BYTES} bytes; a spec file is much smaller")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise SpecError(f"{path} is not UTF-8 text ({error.reason}); save it as UTF-8") from None


def parse_json(text: str | bytes) -> dict[str, Any]:
    """The object in a JSON text."""
    import json

    _check_size(text)
    try:
        values = json.loads(text, object_pairs_hook=_object, parse_constant=_refuse)
    except SpecError:
        raise
    except (ValueError, RecursionError) as error:
        raise SpecError(f"the text is not JSON ({error}); {JSON_REMEDY}") from None
    if not isinstance(values, dict):
        raise SpecError(f"the text holds {show(values)}; {JSON_REMEDY}")
    return values


def parse_toml(text: str) -> dict[str, Any]:
    """The top table of a TOML text."""
    import msgspec

    _check_size(text)
    for token in _TOKEN.finditer(text):
        key = token["key"]
        if key is not None and len(re.findall(_PART, key)) > MOST_PARTS:
            raise SpecError(f"the key {key[:60]}... has more than {MOST_PARTS} parts; specs have keys of at most 3")
    try:
        return dict(msgspec.toml.decode(text))
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise SpecError(f"the text is not TOML ({error}); write lines such as head_dim = 64") from None


def _read(path: Path) -> bytes:
    """At most one byte more than ``MOST_BYTES``."""
    # Opening a FIFO waits for a writer by default.
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("it is not a regular file")
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(MOST_BYTES + 1)
    finally:
        os.close(descriptor)


def _check_size(text: str | bytes) -> None:
    if len(text) > MOST_BYTES:
        raise SpecError(f"the text has more than {MOST_BYTES} characters; a spec is much smaller")


def _object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        twice = next(name for name, count in counts.items() if count > 1)
        raise SpecError(f"the key {show(twice)} is given twice in one JSON object; keep one of them")
    return values


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not a JSON number")
