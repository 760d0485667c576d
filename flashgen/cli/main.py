"""The ``flashgen`` command: its subcommands, and how errors become messages and exit codes."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from flashgen import settings
from flashgen.cli import talk
from flashgen.cli.build import build
from flashgen.cli.cache import app as cache_app
from flashgen.cli.cache import list_kernels
from flashgen.cli.check import check
from flashgen.cli.doctor import doctor
from flashgen.cli.exits import Exit, exit_code
from flashgen.cli.explain import explain
from flashgen.cli.show import show
from flashgen.errors import FlashgenError

DEBUG = settings.Variable("FLASHGEN_DEBUG", "0", "1 shows the traceback of an error")

app = typer.Typer(
    name="flashgen",
    help="Attention kernels from a short spec: CUDA C++ to read, a cubin, and a check against the oracle.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 ok, 1 a check failed, 2 usage or spec, 3 no GPU, 4 compile error.",
)
app.command("build")(build)
app.command("check")(check)
app.command("show")(show)
app.command("explain")(explain)
app.command("list")(list_kernels)
app.add_typer(cache_app, name="cache")
app.command("doctor")(doctor)


def _print_version(wanted: bool) -> None:
    if wanted:
        from flashgen import __version__

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
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run a command line; the exit code."""
    talk.hear_logs()
    try:
        app(arguments, prog_name="flashgen")
    except SystemExit as leave:
        return leave.code if isinstance(leave.code, int) else Exit.OK
    except FlashgenError as error:
        if DEBUG.value == "1":
            raise
        talk.fail(str(error))
        return exit_code(error)
    except KeyboardInterrupt:
        talk.fail("interrupted")
        return Exit.INTERRUPTED
    return Exit.OK
