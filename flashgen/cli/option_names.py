"""Errors of Python's API in the words of the command line: ``head_dim=300`` becomes ``--head-dim 300``."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager

from flashgen.cli.exits import UsageError
from flashgen.errors import ArgumentError

_VALUE = r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|\([-\d, ]*\)|[-+.\w<>]*[-+\w>]"""
#: Options that a spec file takes the place of, and options that go with one too.
_SPEC_FIELDS = (
    *("head_dim_v", "head_dim", "out_dtype", "dtype", "mask.where", "mask", "score", "sink", "cache_dtype", "cache"),
    "scale_block",
)
_OTHER_FIELDS = (
    *("tile_q", "tile_kv", "stages", "warps", "consumers", "algorithm", "softmax", "registers", "arch"),
    *("len_q", "len_kv", "batch", "heads", "heads_kv", "head", "sram"),
)
#: Texts that need more than a mechanical renaming. The first match wins.
_SPEC_WORDS = (
    (r"direction='forward'", "--forward-only"),
    (r"\b(deterministic|dropout|varlen)=True", r"--\1"),
    (r"\bpage_scales=True", "--page-scales"),
    (r"\bqv=True", "--qv"),
    (r"'contiguous', 'paged' or None", "contiguous or paged"),
    (r"None \(or -1\)", "-1"),
    (r"window (left|right)=", lambda match: f"--window {match[1].upper()}="),
    (r"(?<![\w.])align=", "--window ALIGN="),
    (r"(?m)^(mask)\.where: ", r"--\1: "),
    (r"(?m)^(score|sink): ", r"--\1: "),
    (r"captured\.(\w+) is used by neither mask, score nor sink", r"--captured \1 is used in no text"),
    (r"mask='causal'", "--causal"),
    (r"mask=\{left = (\d+), right = (\d+)\}", r"--window \1,\2"),
    (r" and captured\.(?=\w+=)", " --captured "),
    (r"captured\.(?=\w)", "--captured "),
    (r'write captured = \{cap = 30\.0, ids = "int32\[2\]"\}', "write --captured cap=30.0 --captured 'ids=int32[2]'"),
)
_OTHER_WORDS = (
    (r"\bwarps=WarpPartition\(kind='split_([qk])'[^)]*\)", r"--warp-partition split-\1"),
    (r"WarpPartition\('specialized', consumers=(\d+)\)", r"--consumers \1"),
    (r"WarpPartition\('(?:split_[qk])', (\d+)\)", r"--warps \1"),
    (r"\bwarp count=", "warps="),
    (r"\bwarp partition (?=consumers=)", ""),
    (r"\b(?:warp partition |warps\.)?kind='(\w+)'", lambda match: f"--warp-partition {match[1].replace('_', '-')}"),
    (r"'split_([qk])'", r"split-\1"),
    (r"(such as|use) \((\d+), (\d+)\)", r"\1 \2,\3"),
    (r"leave (algorithm|softmax|registers) out", r"leave --\1 out"),
    (r"(?<![\w-])tile_(q|kv)(?![\w=])", r"--tile-\1"),
    (r"give a larger tile=\([^)]*\), or shorter lengths", "give a shorter --len-q or --len-kv"),
    (r"tile (queries|keys)=", lambda match: f"tile_{'q' if match[1] == 'queries' else 'kv'}="),
)


def in_options(message: str, spec_file: str | None = None) -> str:
    """The message for a person who typed options, and with ``spec_file`` some in that file.

    Fields of a spec file keep their names.
    """
    return "\n".join(
        line if spec_file is not None and line.startswith(f"{spec_file}: ") else _reworded(line, spec_file is not None)
        for line in message.split("\n")
    )


def _reworded(line: str, spec_is_in_file: bool) -> str:
    for pattern, words in (*_OTHER_WORDS, *(() if spec_is_in_file else _SPEC_WORDS)):
        line = re.sub(pattern, words, line)
    names = _OTHER_FIELDS if spec_is_in_file else (*_SPEC_FIELDS, *_OTHER_FIELDS)
    fields = "|".join(map(re.escape, names))
    return re.sub(rf"(?<![\w.-])(backward )?({fields})=({_VALUE})", _option, line)


def _option(match: re.Match[str]) -> str:
    backward, name, value = match.groups()
    name = name.removesuffix(".where").replace("_", "-")
    return f"--{'backward-' if backward else ''}{name} {_typed(value)}"


def _typed(value: str) -> str:
    """A value as one types it, from its ``repr``."""
    if value[0] == "(":
        return ",".join(number.strip() for number in value[1:-1].split(",") if number.strip())
    if value[0] not in "'\"":
        return value
    inside = value[1:-1]
    return value if "\\" in inside else shlex.quote(inside)


@contextmanager
def arguments_are_options() -> Iterator[None]:
    """Around calls whose arguments are options of the same name: an error about ``head_dims=`` names --head-dims."""
    try:
        yield
    except ArgumentError as error:
        raise UsageError(re.sub(r"^(\w+)=", lambda m: f"--{m[1].replace('_', '-')} ", str(error))) from None
