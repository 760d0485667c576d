"""Public names that load on first use: a package costs only what is taken from it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any


def lazy_names(
    package: str, homes: Mapping[str, tuple[str, ...]], modules: tuple[str, ...] = (), *, rest: str | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """A package's ``__getattr__`` and ``__dir__``: names by the module that defines them, and submodules.

    ``rest`` is the module of the names in the package's ``__all__`` that are not listed. ``dir`` lists ``__all__``, and
    so only public names.
    """
    home_of = {name: home for home, names in homes.items() for name in names}

    def find(name: str) -> Any:
        if name in modules:
            return import_module(f"{package}.{name}")
        if name in home_of:
            home = home_of[name]
        elif rest is not None and name in vars(sys.modules[package])["__all__"]:
            home = rest
        else:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(home), name)
        # Kept, so that the next look goes past this function.
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted(vars(sys.modules[package])["__all__"])

    return find, names


#: ``ast.PyCF_ONLY_AST``; importing ``ast`` would take longer than all else here.
_ONLY_TREE = 0x400


def listed_names(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """A package's ``__getattr__``, ``__dir__`` and ``__all__`` from the ``.pyi`` beside its file.

    Each statement there is ``from module import name as name``, where type checkers see the name as well.
    """
    listed = Path(file).with_suffix(".pyi")
    tree: Any = compile(listed.read_bytes(), str(listed), "exec", _ONLY_TREE)
    homes: dict[str, tuple[str, ...]] = {}
    for statement in tree.body:
        if hasattr(statement, "module"):  # all but the docstring
            homes[statement.module] = (*homes.get(statement.module, ()), *(alias.name for alias in statement.names))
    public = sorted(name for names in homes.values() for name in names)
    modules = homes.pop(package, ())
    return *lazy_names(package, homes, modules), public
