"""Writing a page of HTML where the user said."""

from __future__ import annotations

from pathlib import Path

from flashgen.cli.exits import UsageError
from flashgen.cli.output import talk
from flashgen.common.show import show_path


def write_page(path: Path, page: str) -> None:
    """Write the page and say where it is."""
    try:
        path.write_bytes(page.encode("utf-8"))
    except OSError as error:
        reason = error.strerror or str(error)
        message = f"{show_path(path)} cannot be written ({reason}); name a file in a directory that exists"
        raise UsageError(message) from None
    talk.say(f"wrote {show_path(path)}")
