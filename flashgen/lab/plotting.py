"""matplotlib, which the extra ``lab`` installs, on first use."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from flashgen.errors import FlashgenError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def require_matplotlib() -> None:
    """A FlashgenError if plots cannot be drawn, before anything is measured for them."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise FlashgenError(
            "plots need matplotlib, which is not installed; install it by: pip install 'flashgen[lab]'"
        ) from None


def figure(width: float, height: float) -> Figure:
    """An empty figure, in inches."""
    require_matplotlib()
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def save(made: Figure, path: Path) -> Path:
    """Writes a figure; the suffix says in which format."""
    path.parent.mkdir(parents=True, exist_ok=True)
    made.savefig(path)
    return path
