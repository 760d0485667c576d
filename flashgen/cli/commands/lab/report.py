"""``flashgen report``: the page of a spec, with plots of what was measured."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Option

from flashgen.cli.commands.explain import drawn
from flashgen.cli.gpu.arrays import archs_to_build, find_gpus
from flashgen.cli.options import with_kernel_options
from flashgen.cli.output.page import write_page
from flashgen.cli.request import Request

REPORT = "Report"


@with_kernel_options
def report(
    request: Request,
    out: Annotated[
        Path,
        Option("--out", "-o", help="The page to write; default report.html.", metavar="FILE", rich_help_panel=REPORT),
    ] = Path("report.html"),
    bench: Annotated[
        Path | None,
        Option("--bench", help="Plot the timings of a bench.", metavar="FILE.json", rich_help_panel=REPORT),
    ] = None,
    roofline: Annotated[
        Path | None,
        Option("--roofline", help="Plot a roofline.", metavar="FILE.json", rich_help_panel=REPORT),
    ] = None,
    len_q: Annotated[
        int | None, Option("--len-q", help="Queries; default --len-kv, else 1024.", rich_help_panel=REPORT)
    ] = None,
    len_kv: Annotated[int | None, Option("--len-kv", help="Keys; default --len-q.", rich_help_panel=REPORT)] = None,
) -> None:
    """Write one page on a spec: tile map, plan, memory, estimator, and plots of measurements."""
    from flashgen.explanation import DEFAULT_LENGTH, explain
    from flashgen.lab import html_page, read_bench, read_roofline

    timings = None if bench is None else read_bench(bench)
    ceilings = None if roofline is None else read_roofline(roofline)
    queries = len_q if len_q is not None else len_kv if len_kv is not None else DEFAULT_LENGTH
    keys = queries if len_kv is None else len_kv
    found = explain(
        request.spec,
        queries,
        keys,
        captured=drawn(request.spec, queries, keys, 0, 0),
        arch=archs_to_build(request.archs, find_gpus() if not request.archs else (), request.spec)[0],
        schedule=request.schedule,
    )
    write_page(out, html_page(found, bench=timings, roofline=ceilings))
