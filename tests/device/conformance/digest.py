"""What an answer depends on, as one number: a record that another case or instruction gave is out of date.

It covers the kernel's file, the case, and the functions of ``flashgen/ptx`` that the kernel reaches: neither
comments nor functions that it does not use, so that headers may grow without a GPU at hand.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from conformance.case import Case
from conformance.source import entry, kernel_text
from flashgen.render.paths import include_dir

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
_MACRO = re.compile(r"#\s*define\s+(\w+)(?:[^\\\n]|\\\n|\\.)*")
_DIRECTIVE = re.compile(r"^\s*#[^\n]*$", re.M)
_NAMESPACE = re.compile(r"(?:inline\s+)?namespace\s+[\w:]*\s*$")
_WORD = re.compile(r"[A-Za-z_]\w*")


def digest(case: Case) -> str:
    """SHA-256, in hex, of all that decides the answer."""
    sha = hashlib.sha256()
    launch = (case.grid, case.threads, case.smem_bytes, case.cluster, case.cooperative, case.launches)
    text = plain(kernel_text(case.kernel) + entry(case.kernel, [case.variant]))
    for part in (case.name, launch, *reached(text)):
        _add(sha, repr(part).encode())
    for kind in (case.inputs, case.outputs):
        for name, value in kind.items():
            _add(sha, name.encode())
            _add_value(sha, value)
    return sha.hexdigest()


def _add_value(sha: Any, value: Any) -> None:
    if isinstance(value, np.ndarray):
        _add(sha, f"{value.dtype.str} {value.shape}".encode())
        _add(sha, np.ascontiguousarray(value).tobytes())
    else:
        _add(sha, repr(value).encode())


def _add(sha: Any, data: bytes) -> None:
    sha.update(len(data).to_bytes(8, "big"))
    sha.update(data)


def plain(text: str) -> str:
    """C++ without comments, and with one space for each run of white space."""
    return " ".join(_COMMENT.sub(" ", text).split())


def reached(text: str) -> list[str]:
    """``text``, then every definition of the PTX headers that it names, or that those name."""
    found: dict[str, None] = {text: None}
    names: set[str] = set()
    todo = [text]
    while todo:
        for name in sorted(set(_WORD.findall(todo.pop())) - names):
            names.add(name)
            new = [d for d in _definitions().get(name, ()) if d not in found]
            found.update(dict.fromkeys(new))
            todo += new
    return [text, *sorted(found.keys() - {text})]


@functools.cache
def _definitions() -> dict[str, list[str]]:
    """Every function, type, constant and macro of the PTX headers, by name; overloads side by side."""
    by_name: dict[str, list[str]] = {}
    for header in sorted((include_dir() / "flashgen" / "ptx").glob("*.cuh")):
        text = _COMMENT.sub(" ", header.read_text(encoding="utf-8"))
        for macro in _MACRO.finditer(text):
            by_name.setdefault(macro[1], []).append(plain(macro[0]))
        for definition in _statements(_DIRECTIVE.sub("", _MACRO.sub("", text))):
            by_name.setdefault(_defined_name(definition), []).append(plain(definition))
    return by_name


def _statements(text: str) -> Iterator[str]:
    """What stands at namespace scope: each definition up to its closing brace or semicolon."""
    depth, start = 0, 0
    for match in re.finditer(r'"(?:[^"\\]|\\.)*"|[{};]', text):
        mark, end = match[0], match.end()
        if mark == "{":
            if depth == 0 and _NAMESPACE.search(text[start : match.start()]):
                start = end
            else:
                depth += 1
        elif mark == "}" and depth == 0:
            start = end  # the end of a namespace
        elif mark == "}":
            depth -= 1
            if depth == 0 and text[end : end + 1] != ";":
                yield text[start:end]
                start = end
        elif mark == ";" and depth == 0:
            yield text[start:end]
            start = end


def _defined_name(definition: str) -> str:
    """The last word before the parameters, the value or the body."""
    head = definition.split("{")[0]
    while (inner := re.sub(r"\([^()]*\)|\[[^\[\]]*\]|<[^<>]*>", " ", head)) != head:
        head = inner
    head = re.split(r"[=;]", head)[0]
    if re.search(r"\b(struct|class|union|enum)\b", head):
        head = head.split(":")[0]
    words = _WORD.findall(head)
    return words[-1] if words else ""
