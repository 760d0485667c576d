"""Modules import down only, wherever the import stands: no circle hides in a function or under TYPE_CHECKING."""

from __future__ import annotations

import ast
from collections import Counter
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).parents[1]
MOST_FILES_OF_A_FOLDER = 15


def modules_of(package: Path) -> dict[str, Path]:
    """The files of a package by module name."""
    files = {".".join(path.relative_to(package.parent).with_suffix("").parts): path for path in package.rglob("*.py")}
    return {name.removesuffix(".__init__"): path for name, path in files.items()}


def imports_of(tree: ast.Module, modules: dict[str, Path]) -> set[str]:
    """The modules among ``modules`` that a file imports, at any place in it."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            assert node.module is not None
            names = (f"{node.module}.{alias.name}" for alias in node.names)
            found.update(name if name in modules else node.module for name in names)
    return found & set(modules)


def circle_in(package: Path) -> list[str]:
    """Modules that import each other in turn, from one of them back to itself; empty if there are none."""
    modules = modules_of(package)
    trees = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in modules.items()}
    try:
        TopologicalSorter({name: imports_of(tree, modules) for name, tree in trees.items()}).prepare()
    except CycleError as error:
        # The sorter lists each module after one that imports it.
        return list(reversed(error.args[1]))
    return []


def test_no_modules_import_each_other() -> None:
    assert " -> ".join(circle_in(ROOT / "flashgen")) == ""


def test_a_circle_is_found_in_functions_and_under_type_checking(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "a.py").write_text("def f():\n    from package import b\n")
    (package / "b.py").write_text("from typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n    import package.c\n")
    (package / "c.py").write_text("import os\n")
    assert circle_in(package) == []
    (package / "c.py").write_text("from package.a import f\n")
    circle = circle_in(package)
    assert circle[0] == circle[-1]
    assert set(pairwise(circle)) == {
        ("package.a", "package.b"),
        ("package.b", "package.c"),
        ("package.c", "package.a"),
    }


def test_a_folder_has_few_files() -> None:
    counts = Counter(path.parent.relative_to(ROOT) for path in (ROOT / "flashgen").rglob("*.py"))
    assert {str(folder): count for folder, count in counts.items() if count > MOST_FILES_OF_A_FOLDER} == {}
