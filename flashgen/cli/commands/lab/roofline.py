"""``flashgen roofline``: what this machine's GPU can do at most, and how near to that the kernels come."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Option

from flashgen.cli.commands.lab.bench import parse_algorithms
from flashgen.cli.option_names import arguments_are_options
from flashgen.cli.output import talk

WHAT = "Kernels"
OUTPUT = "Output"


def roofline(
    algorithms: Annotated[
        str | None,
        Option(
            "--algorithms",
            help="flashgen's algorithms, as in bench; default all.",
            metavar="LIST",
            rich_help_panel=WHAT,
        ),
    ] = None,
    lengths: Annotated[
        str, Option("--lengths", help="Sequence lengths; default 4k.", metavar="LIST", rich_help_panel=WHAT)
    ] = "4k",
    head_dims: Annotated[
        str, Option("--head-dims", help="Head dimensions; default 64,128.", metavar="LIST", rich_help_panel=WHAT)
    ] = "64,128",
    dtype: Annotated[
        str, Option("--dtype", help="bf16, fp16 or fp32; default bf16.", metavar="NAME", rich_help_panel=WHAT)
    ] = "bf16",
    masks: Annotated[
        str, Option("--masks", help="full, causal, or both; default full.", metavar="LIST", rich_help_panel=WHAT)
    ] = "full",
    backward: Annotated[
        bool, Option("--backward", help="Measure the backward pass, too.", rich_help_panel=WHAT)
    ] = False,
    json: Annotated[
        Path | None,
        Option("--json", help="Write all measurements to this file.", metavar="FILE", rich_help_panel=OUTPUT),
    ] = None,
    plot: Annotated[
        Path | None,
        Option("--plot", help="Draw a plot into this file (.svg, .png).", metavar="FILE", rich_help_panel=OUTPUT),
    ] = None,
) -> None:
    """Measure this GPU's ceilings, and say which one binds each of flashgen's kernels."""
    from flashgen.lab.bench.grid import cases, parse_lengths, parse_numbers
    from flashgen.lab.bench.on_gpu import first_gpu
    from flashgen.lab.bench.timings import write_json
    from flashgen.lab.plotting import require_matplotlib
    from flashgen.lab.roofline.measure import measure_roofline

    with arguments_are_options():
        wanted = cases(
            parse_lengths(lengths),
            parse_numbers("head_dims", head_dims),
            dtype=dtype,
            masks=[word.strip() for word in masks.split(",")],
            passes=("forward", "backward") if backward else ("forward",),
        )
        names = parse_algorithms(algorithms)
    if plot is not None:
        require_matplotlib()
    gpu = first_gpu()
    with talk.progress(f"measuring {gpu.name}", len(wanted)) as update:
        measured = measure_roofline(wanted, names, progress=update)
    talk.print_text(str(measured))
    if json is not None:
        write_json(measured.as_dict(), json)
    if plot is not None:
        from flashgen.lab.roofline.plot import draw

        talk.say(f"drawn: {draw(measured, plot)}")
