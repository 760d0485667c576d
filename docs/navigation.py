"""Puts every page under docs/ into the site's navigation, in the order of ``extra.order`` in mkdocs.yml."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any


def on_files(files: Any, config: Any) -> None:
    """Write the navigation, as mkdocs calls it with what it found; pages that are not on the list come last."""
    from mkdocs.utils import nest_paths

    order = config.extra["order"]
    place = {name: number for number, name in enumerate(order)}

    def key(uri: str) -> list[tuple[int, str]]:
        path = PurePosixPath(uri)
        # The place of each directory above a page, the outermost first, and then its own.
        above = [str(parent) for parent in reversed(path.parents) if str(parent) != "."]
        return [(place.get(name, len(order)), name) for name in (*above, uri)]

    config.nav = nest_paths(sorted((file.src_uri for file in files.documentation_pages()), key=key))
