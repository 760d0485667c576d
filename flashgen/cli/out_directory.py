"""``--out``: a directory that can be written, found out before anything is compiled for it."""

from __future__ import annotations

import tempfile
from pathlib import Path

from flashgen.cli.exits import UsageError
from flashgen.common.show import show_path


def output_directory(text: str) -> Path:
    """The directory, made if it is missing; UsageError if no file can be written there."""
    if not text.strip():
        raise UsageError(f"--out {text!r} names no directory; write --out . for this one, or leave --out out")
    directory = Path(text).absolute()
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Asking for permissions is no substitute: a full or read-only disk has them too.
        with tempfile.TemporaryFile(dir=directory) as probe:
            probe.write(b"x")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"--out {show_path(text)} cannot be written ({reason}); name a directory that can") from None
    return directory
