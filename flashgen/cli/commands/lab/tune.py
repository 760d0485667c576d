"""``flashgen tune``: the fastest schedule of a spec on this machine's GPU, kept for later builds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Option

from flashgen.cli.exits import UsageError
from flashgen.cli.gpu.arrays import Gpu, find_gpus
from flashgen.cli.option_names import arguments_are_options
from flashgen.cli.options import with_kernel_options
from flashgen.cli.output import talk
from flashgen.cli.request import Request
from flashgen.common.show import show
from flashgen.errors import NoGpuError

TUNE = "Tune"
_SECONDS = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


@with_kernel_options
def tune(
    request: Request,
    lengths: Annotated[
        str, Option("--lengths", help="Sequence lengths; default 1k,4k.", metavar="LIST", rich_help_panel=TUNE)
    ] = "1k,4k",
    budget: Annotated[
        str, Option("--budget", help="How long to search; default 60s.", metavar="TIME", rich_help_panel=TUNE)
    ] = "60s",
    batch: Annotated[
        int | None, Option("--batch", help="Batch size; default --tokens / length.", rich_help_panel=TUNE)
    ] = None,
    heads: Annotated[
        int | None, Option("--heads", help="Heads; default 2048 / head dimension.", rich_help_panel=TUNE)
    ] = None,
    tokens: Annotated[int, Option("--tokens", help="Tokens in a batch; default 16384.", rich_help_panel=TUNE)] = 16384,
    forget: Annotated[
        bool, Option("--forget", help="Remove the tuned schedule of this spec, and search none.", rich_help_panel=TUNE)
    ] = False,
    json: Annotated[
        Path | None, Option("--json", help="Write all trials to this file.", metavar="FILE", rich_help_panel=TUNE)
    ] = None,
) -> None:
    """Find the fastest schedule on this GPU. Later builds for this GPU use it."""
    from flashgen import tuned
    from flashgen.lab.bench.grid import cases, parse_lengths
    from flashgen.lab.tune.tuning import check_budget, check_spec, problems_of, tune_on

    if request.schedule is not None or request.archs:
        raise UsageError(
            "tune finds a schedule for this machine's GPU; leave out --arch and the options that set a schedule"
        )
    with arguments_are_options():
        wanted = parse_lengths(lengths)
        cases(wanted, (request.spec.head_dim,), batch=batch, heads=heads, tokens=tokens)
        check_spec(request.spec)
        seconds = check_budget(_seconds(budget))
    if request.spec.tensors:
        names = ", ".join(request.spec.tensors)
        raise UsageError(f"a command line has no values for {names}; tune from Python: flashgen.tune(spec, q, k, v)")
    gpu = _gpu()
    if forget:
        found = tuned.forget(request.spec, gpu.name)
        talk.print_text(f"{'forgotten' if found else 'nothing was tuned'}: {request.spec.describe()}, {gpu.name}")
        return
    from flashgen.lab.timing.device import GpuDevice

    device = GpuDevice(gpu)
    with talk.working(f"tuning on {gpu.name}") as update:
        problems = problems_of(request.spec, wanted, device, tokens=tokens, batch=batch, heads=heads)
        tuning = tune_on(gpu, device, request.spec, problems, seconds, update)
    talk.print_text(str(tuning))
    if json is not None:
        from flashgen.lab.bench.timings import write_json

        write_json(tuning.as_dict(), json)


def _gpu() -> Gpu:
    gpus = find_gpus()
    if not gpus:
        raise NoGpuError(
            "there is no GPU here to tune on; run flashgen tune where the kernels will run, with the same spec"
        )
    return gpus[0]


def _seconds(text: str) -> float:
    number = text.rstrip("abcdefghijklmnopqrstuvwxyz")
    unit = _SECONDS.get(text[len(number) :])
    try:
        if unit is None:
            raise ValueError
        return float(number) * unit
    except ValueError:
        raise UsageError(f"--budget {show(text)} is not a duration; write one such as 60s or 5m") from None
