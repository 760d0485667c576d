"""Public names that load on first use: a package costs only what is taken from it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_names(
    package: str, homes: Mapping[str, tuple[str, ...]], modules: tuple[str, ...] = (), *, rest: str | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """A package's ``__getattr__`` and ``__dir__``: names by the module that defines them, and submodules.

    ``"abs_ as abs"`` gives a name another one here. ``rest`` is the module of the names in the package's ``__all__``
    that are not listed. ``dir`` lists ``__all__``, and so only public names.
    """
    parts = [(home, name.partition(" as ")) for home, names in homes.items() for name in names]
    home_of = {new or old: (home, old) for home, (old, _, new) in parts}

    def find(name: str) -> Any:
        if name in modules:
            return import_module(f"{package}.{name}")
        if name in home_of:
            home, defined = home_of[name]
        elif rest is not None and name in vars(sys.modules[package])["__all__"]:
            home, defined = rest, name
        else:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(home), defined)
        # Kept, so that the next look goes past this function.
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted(vars(sys.modules[package])["__all__"])

    return find, names
