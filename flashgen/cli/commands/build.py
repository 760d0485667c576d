"""``flashgen build``: from a spec to verified kernels."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from typer import Exit as Leave
from typer import Option

from flashgen.cli.commands.builder import build_all, check_decode, plan_all, write_files, write_manifest
from flashgen.cli.exits import Exit
from flashgen.cli.gpu.arrays import archs_to_build, find_gpus, gpu_to_build_for
from flashgen.cli.options import with_kernel_options
from flashgen.cli.out_directory import output_directory
from flashgen.cli.output import talk
from flashgen.cli.output.report import as_json, print_report
from flashgen.cli.request import Request

OUTPUT = "Output"


@with_kernel_options
def build(
    request: Request,
    out: Annotated[
        str | None,
        Option("--out", metavar="DIR", help="Put source, cubin and manifest here.", rich_help_panel=OUTPUT),
    ] = None,
    no_verify: Annotated[
        bool, Option("--no-verify", help="Do not check against the oracle.", rich_help_panel=OUTPUT)
    ] = False,
    json: Annotated[bool, Option("--json", help="Print one JSON object on stdout.", rich_help_panel=OUTPUT)] = False,
) -> None:
    """Plan, render, compile and verify a kernel, forward and backward."""
    from flashgen.cache import default_cache
    from flashgen.cli.gpu.verification import run_cases, verify_all

    directory = None if out is None else output_directory(out)
    gpus = find_gpus()
    archs = archs_to_build(request.archs, gpus, request.spec)
    plans = plan_all(request.spec, request.schedule, archs, gpu_to_build_for(request.archs, gpus))
    check_decode(request, plans)
    built = build_all(plans)
    files = write_files(built, directory, default_cache().root)
    # Registers may have had a fallback take a plan's place.
    checks = (partial(run_cases, decode=True),) if request.decode else ()
    verification = None if no_verify else verify_all([attention.plan for attention in built], gpus, *checks)
    result = as_json(request.spec, built, files, verification)
    write_manifest(files, result)
    if json:
        talk.print_json(result)
    else:
        print_report(request.spec, built, files, verification, asked=not no_verify)
    if verification is not None and not verification.ok:
        talk.fail("\n".join(["verification failed", *verification.failures]))
        raise Leave(Exit.CHECK_FAILED)
