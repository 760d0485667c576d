"""The ``flashgen`` command: its subcommands, and how errors become messages and exit codes."""

from __future__ import annotations

import os
import sys
from itertools import pairwise
from typing import Annotated

import typer

from flashgen import settings
from flashgen.cli.commands.build import build
from flashgen.cli.commands.cache import app as cache_app
from flashgen.cli.commands.cache import list_kernels
from flashgen.cli.commands.check import check
from flashgen.cli.commands.doctor import doctor
from flashgen.cli.commands.explain import explain
from flashgen.cli.commands.lab.bench import bench
from flashgen.cli.commands.lab.io import io
from flashgen.cli.commands.lab.report import report
from flashgen.cli.commands.lab.roofline import roofline
from flashgen.cli.commands.lab.tune import tune
from flashgen.cli.commands.show import show
from flashgen.cli.exits import Exit, exit_code
from flashgen.cli.option_names import in_options
from flashgen.cli.output import talk
from flashgen.cli.output.help import Command, Group
from flashgen.common.version import __version__
from flashgen.errors import ArgumentError, FlashgenError, PlanError, SpecError

DEBUG = settings.Variable("FLASHGEN_DEBUG", "0", "1 shows the traceback of an error")

app = typer.Typer(
    name="flashgen",
    help="Attention kernels from a short spec: CUDA C++ to read, a cubin, and a check against the oracle.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    cls=Group,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 ok, 1 a check failed, 2 usage or spec, 3 no GPU, 4 compile error, 5 this machine.",
)
app.command("build", cls=Command)(build)
app.command("check", cls=Command)(check)
app.command("show", cls=Command)(show)
app.command("explain", cls=Command)(explain)
app.command("io", cls=Command)(io)
app.command("report", cls=Command)(report)
app.command("bench", cls=Command)(bench)
app.command("roofline", cls=Command)(roofline)
app.command("tune", cls=Command)(tune)
app.command("list", cls=Command)(list_kernels)
app.add_typer(cache_app, name="cache")
app.command("doctor", cls=Command)(doctor)


def _print_version(wanted: bool) -> None:
    if wanted:
        talk.print_text(__version__)
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line of this process and exit."""
    # The oracle's matrices are small: the threads of a BLAS would wait for each other longer than they compute.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run a command line; the exit code."""
    talk.hear_logs()
    try:
        return _run(arguments)
    except FlashgenError as error:
        if DEBUG.value == "1":
            raise
        talk.fail(_message(error, arguments))
        return exit_code(error)
    except KeyboardInterrupt:
        talk.fail("interrupted")
        return Exit.INTERRUPTED
    except BrokenPipeError:
        # The reader has seen enough.
        talk.drop_stdout()
        return Exit.MACHINE
    except OSError as error:
        if DEBUG.value == "1":
            raise
        talk.drop_stdout()
        where = f"{error.filename} cannot be used" if error.filename else "the output cannot be written"
        talk.fail(f"{where} ({error.strerror or error})")
        return Exit.MACHINE


def _run(arguments: list[str]) -> int:
    try:
        app(arguments, prog_name="flashgen")
    except SystemExit as leave:
        code = leave.code if isinstance(leave.code, int) else Exit.OK
    else:
        code = Exit.OK
    # Here, and not as Python ends: what cannot be written is an error like any other.
    sys.stdout.flush()
    return code


def _message(error: FlashgenError, arguments: list[str]) -> str:
    """The error's text, in the words of the options where options caused it."""
    if not isinstance(error, (SpecError, PlanError, ArgumentError)):
        return str(error)
    given = [word.removeprefix("--spec=") for word in arguments if word.startswith("--spec=")]
    given += [after for word, after in pairwise(arguments) if word == "--spec"]
    return in_options(str(error), given[-1] if given else None)
