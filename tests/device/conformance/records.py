"""What a GPU answered: one JSON file per family, one line per case."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from conformance.case import Array, Case
from conformance.digest import digest

RECORD = Path(__file__).resolve().parents[1] / "record"


class Entry(NamedTuple):
    """The answer to one case."""

    digest: str
    outputs: dict[str, Array]


def encode(outputs: Mapping[str, Array]) -> dict[str, list[Any]]:
    """Arrays as ``[dtype, shape, text]``."""
    return {name: [value.dtype.str, list(value.shape), _pack(value)] for name, value in outputs.items()}


def decode(outputs: Mapping[str, list[Any]]) -> dict[str, Array]:
    """The arrays of ``encode``."""
    return {name: _unpack(*value) for name, value in outputs.items()}


def _pack(value: Array) -> str:
    # All first bytes of the elements, then all second ones: alike bytes side by side compress well.
    planes = np.ascontiguousarray(value).view(np.uint8).reshape(-1, value.itemsize).T
    return base64.b85encode(zlib.compress(planes.tobytes(), 9)).decode()


def _unpack(dtype: str, shape: list[int], text: str) -> Array:
    planes = np.frombuffer(zlib.decompress(base64.b85decode(text)), np.uint8).reshape(np.dtype(dtype).itemsize, -1)
    return np.ascontiguousarray(planes.T).reshape(-1).view(dtype).reshape(shape)


def save(path: Path, device: Mapping[str, Any], cases: Mapping[str, Any]) -> None:
    """Write a family's file; ``cases`` hold digests and encoded outputs."""
    lines = [f"    {json.dumps(name)}: {json.dumps(case)}" for name, case in cases.items()]
    text = f'{{\n  "device": {json.dumps(device)},\n  "cases": {{\n' + ",\n".join(lines) + "\n  }\n}\n"
    path.write_text(text, encoding="utf-8")


def recorded(family: str, directory: Path = RECORD) -> dict[str, Entry]:
    """The answers of a family by case; empty where none were recorded."""
    path = directory / f"{family}.json"
    if not path.is_file():
        return {}
    cases = json.loads(path.read_text(encoding="utf-8"))["cases"]
    return {name: Entry(case["digest"], decode(case["outputs"])) for name, case in cases.items()}


def shortcomings(cases: Iterable[Case], entries: Mapping[str, Entry]) -> dict[str, list[str]]:
    """What is wrong with the answers of a family: names of cases by what ails them."""
    digests = {case.name: digest(case) for case in cases}
    return {
        "not recorded": [name for name in digests if name not in entries],
        "changed since": [name for name in digests if name in entries and entries[name].digest != digests[name]],
        "gone": [name for name in entries if name not in digests],
    }
