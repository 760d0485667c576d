"""The two streams: data goes to stdout, everything said to a person while working goes to stderr."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import IO, TYPE_CHECKING, Any

from flashgen.cli.output.table import columns

if TYPE_CHECKING:
    from rich.console import Console

#: Wide enough that nothing wraps when a stream is a file or a pipe.
PIPED_WIDTH = 240


def stdout() -> Console:
    """The console for data."""
    return _console(sys.stdout)


def stderr() -> Console:
    """The console for talk."""
    return _console(sys.stderr)


def _console(stream: IO[str]) -> Console:
    from rich.console import Console

    # Color only on a terminal and without NO_COLOR: rich sees to both.
    width = None if stream.isatty() else PIPED_WIDTH
    return Console(file=stream, width=width, highlight=False, markup=False, emoji=False)


def say(message: str, style: str | None = None) -> None:
    """Say something on stderr."""
    stderr().print(message, style=style, soft_wrap=True)


def warn(message: str) -> None:
    """Say on stderr that something is not as expected, and that work goes on."""
    say(f"warning: {message}", "yellow")


def fail(message: str) -> None:
    """Say on stderr why the command ends."""
    say(f"error: {message}", "red")


@contextmanager
def working(message: str) -> Iterator[Callable[[str], None]]:
    """Show that work goes on: on a terminal a spinner, whose text the result sets; else one line."""
    console = stderr()
    if console.is_terminal:
        with console.status(message) as status:
            yield lambda text: status.update(text)
    else:
        say(f"{message} ...")
        yield lambda text: None


@contextmanager
def progress(message: str, total: int) -> Iterator[Callable[[int, str], None]]:
    """Show how far work is: on a terminal a bar, moved by the result (how many are done, a message); else one line."""
    console = stderr()
    if not console.is_terminal:
        say(f"{message} ...")
        yield lambda done, text: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(message, total=total)
        yield lambda done, text: bar.update(task, completed=done, description=text)


def print_text(text: str) -> None:
    """Put plain text on stdout exactly as it is."""
    sys.stdout.write(text if text.endswith("\n") else text + "\n")


def print_rows(rows: Sequence[Sequence[str]], indent: int = 0, styles: Mapping[str, str] | None = None) -> None:
    """Put a table on stdout; ``styles`` colors the lines that hold a word."""
    console = stdout()
    for line in columns(rows, indent):
        words = set(line.split())
        style = next((style for word, style in (styles or {}).items() if word in words), None)
        console.print(line, style=style, soft_wrap=True)


def print_json(value: Mapping[str, Any]) -> None:
    """Put one JSON object on stdout."""
    print_text(json.dumps(value, indent=2, allow_nan=False))


def drop_stdout() -> None:
    """Throw away what could not be written, and all that follows: Python would fail on it again as it ends."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def hear_logs() -> None:
    """Say on stderr what flashgen's modules log, such as a cache directory that cannot be written."""
    logger = logging.getLogger("flashgen")
    if not any(isinstance(handler, _Talker) for handler in logger.handlers):
        logger.addHandler(_Talker())
        logger.setLevel(logging.INFO)
        logger.propagate = False


class _Talker(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        (warn if record.levelno >= logging.WARNING else say)(record.getMessage())
