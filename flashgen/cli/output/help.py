"""What ``--help`` prints of an option, and the length of what a wrong command line prints."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from typer.core import TyperCommand, TyperGroup

from flashgen.errors import LONGEST_MESSAGE, cut

#: A usage error stands in a frame, below the usage itself.
_LONGEST_USAGE_ERROR = LONGEST_MESSAGE // 2


class Command(TyperCommand):
    """A command whose flags show no type, and whose help names defaults in words."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Its options."""
        return _plainly(super().get_params(ctx))


class Group(TyperGroup):
    """A group of commands whose flags show no type, and whose usage errors are short."""

    def make_context(self, *arguments: Any, **options: Any) -> Any:
        """The context of its own options."""
        with _short_usage_errors():
            return super().make_context(*arguments, **options)

    def invoke(self, ctx: Any) -> Any:
        """Find the command, read its options, and run it."""
        with _short_usage_errors():
            return super().invoke(ctx)

    def get_params(self, ctx: Any) -> list[Any]:
        """Its options."""
        return _plainly(super().get_params(ctx))


@contextmanager
def _short_usage_errors() -> Iterator[None]:
    """Cut the message of a usage error, which quotes the words of the command line whole."""
    try:
        yield
    except Exception as error:
        # Some releases of typer have a click of their own, so there is no one class to catch.
        message = getattr(error, "message", None)
        if isinstance(message, str):
            error.message = cut(message, _LONGEST_USAGE_ERROR)  # type: ignore[attr-defined]
        raise


def _plainly(parameters: list[Any]) -> list[Any]:
    for parameter in parameters:
        # The text of an option names its default, for the pages of the documentation too.
        parameter.show_default = False
        if getattr(parameter, "is_flag", False) and parameter.metavar is None:
            # Some releases of typer write <bool>.
            parameter.metavar = ""
    return parameters
