"""Kernels that depend on no plan: plain CUDA C++ over flashgen's headers, amalgamated like any other."""

from __future__ import annotations

from flashgen.render import paths
from flashgen.render.amalgamation.amalgamate import amalgamate
from flashgen.render.amalgamation.prune import prune
from flashgen.render.source import Origin


def render_plain(file: str) -> str:
    """The self-contained text of a file such as ``kernels/lab/copy.cu`` under the templates directory."""
    text = paths.path_of(file).read_text(encoding="utf-8")
    lines = [(line, Origin(file, number)) for number, line in enumerate(text.splitlines(), start=1)]
    return "".join(f"{line}\n" for line, _ in prune(amalgamate(lines)))
