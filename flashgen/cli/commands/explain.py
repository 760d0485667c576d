"""``flashgen explain``: the tile map of a mask, drawn."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from flashgen.cli.commands.builder import check_decode, plan_all
from flashgen.cli.exits import UsageError
from flashgen.cli.gpu.arrays import archs_to_build, find_gpus
from flashgen.cli.options import with_kernel_options
from flashgen.cli.output import talk
from flashgen.cli.output.page import write_page
from flashgen.cli.request import Request, decode_lengths

if TYPE_CHECKING:
    from flashgen.spec import AttentionSpec

VIEW = "View"
LONGEST_DRAWN = 2**17


@with_kernel_options
def explain(
    request: Request,
    len_q: Annotated[
        int | None, Option("--len-q", help="Queries; default --len-kv, else 1024.", rich_help_panel=VIEW)
    ] = None,
    len_kv: Annotated[int | None, Option("--len-kv", help="Keys; default --len-q.", rich_help_panel=VIEW)] = None,
    batch: Annotated[int, Option("--batch", help="Which sequence; default 0.", rich_help_panel=VIEW)] = 0,
    head: Annotated[int, Option("--head", help="Which query head; default 0.", rich_help_panel=VIEW)] = 0,
    html: Annotated[
        Path | None,
        Option("--html", help="Write a page of HTML instead of text.", metavar="FILE", rich_help_panel=VIEW),
    ] = None,
    json: Annotated[bool, Option("--json", help="Print one JSON object on stdout.", rich_help_panel=VIEW)] = False,
) -> None:
    """Draw which tiles of the score matrix a mask skips, and say what the rest costs."""
    from flashgen.explanation import DEFAULT_LENGTH, explain

    arch = archs_to_build(request.archs, find_gpus() if not request.archs else (), request.spec)[0]
    check_decode(request, plan_all(request.spec, request.schedule, [arch]))
    queries, keys = decode_lengths(request, len_q, len_kv, DEFAULT_LENGTH)
    found = explain(
        request.spec,
        queries,
        keys,
        batch=batch,
        head=head,
        captured=drawn(request.spec, queries, keys, batch, head),
        width=talk.stdout().width,
        arch=arch,
        schedule=request.schedule,
        decode=request.decode,
    )
    if html is not None:
        write_page(html, found.html())
    if json:
        talk.print_json({"schema": 1, **found.as_dict()})
    elif html is None:
        talk.print_text(str(found))


def drawn(spec: AttentionSpec, len_q: int, len_kv: int, batch: int, head: int) -> dict[str, Any]:
    """Values for the tensors that the mask captured: a command line has none. Integers ascend, as packed ids do."""
    alone = replace(spec, score=None)
    if not alone.tensors:
        return {}
    import numpy as np

    from flashgen.verify import Case
    from flashgen.verify.cases.captured import with_values

    if max(len_q, len_kv, batch, head) > LONGEST_DRAWN:
        raise UsageError(f"tensors are drawn for up to {LONGEST_DRAWN} queries and keys; give shorter lengths")
    talk.say(f"values drawn at random, integers in ascending order: {', '.join(alone.tensors)}")
    drawn = with_values(alone, Case("explain", len_q, len_kv, batch=batch + 1, heads=head + 1, heads_kv=1))
    return {name: np.sort(t) if t.ndim and t.dtype.kind in "iu" else t for name, t in drawn.tensors.items()}
