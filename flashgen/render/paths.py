"""Where the templates and headers lie: inside the wheel, or at the top of a checkout."""

from __future__ import annotations

from pathlib import Path

from flashgen.errors import FlashgenError
from flashgen.render.source import Origin


def templates_dir() -> Path:
    """The directory that holds ``kernels/`` and ``include/``."""
    package = Path(__file__).resolve().parent.parent
    for candidate in (package / "_templates", package.parent / "templates"):
        if (candidate / "kernels").is_dir():
            return candidate
    raise FlashgenError(f"no templates beside {package}; the installation is incomplete, reinstall flashgen")


def include_dir() -> Path:
    """The directory to give a C++ compiler as ``-I``."""
    return templates_dir() / "include"


def path_of(file: str) -> Path:
    """The file that an ``Origin`` names: templates by their place, headers as ``#include`` spells them."""
    root = templates_dir()
    return root / file if file.startswith("kernels/") else root / "include" / file


def line_at(origin: Origin) -> str | None:
    """The text of a template or header line, None when there is no such line."""
    try:
        lines = path_of(origin.file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return None
    return lines[origin.line - 1] if 1 <= origin.line <= len(lines) else None


def quoted(origin: Origin) -> str:
    """``   12 | the line``, or nothing when the line cannot be read."""
    text = line_at(origin)
    return "" if text is None else f"{origin.line:>5} | {text}"
