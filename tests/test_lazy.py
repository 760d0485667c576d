from __future__ import annotations

import ast
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

import flashgen.cache
import flashgen.compile

ROOT = Path(__file__).parents[1]
PACKAGES = [flashgen.cache, flashgen.compile]


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_every_public_name_is_what_its_module_defines(package) -> None:
    # In a fresh process, and each name first: no import elsewhere may lend it or put a module in its place.
    code = f"""
import importlib, sys, types
for name in {package.__all__!r}:
    for module in [m for m in sys.modules if m.startswith("flashgen")]:
        del sys.modules[module]
    package = importlib.import_module({package.__name__!r})
    assert name in dir(package), name
    value = getattr(package, name)
    assert not isinstance(value, types.ModuleType), name
    assert getattr(sys.modules[value.__module__], name) is value, name
    assert vars(package)[name] is value, name
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_other_names_are_refused(package) -> None:
    with pytest.raises(AttributeError, match=f"'{package.__name__}' has no attribute 'no_such_name'"):
        package.no_such_name  # noqa: B018


def test_public_names_are_those_of_the_file_for_type_checkers() -> None:
    import flashgen

    tree = ast.parse((ROOT / "flashgen" / "__init__.pyi").read_text(encoding="utf-8"))
    statements = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    listed = [(str(node.module), alias.name, alias.asname) for node in statements for alias in node.names]
    # Only this form exports a name to a type checker.
    assert [name for _, name, other in listed if other != name] == []
    assert sorted(name for _, name, _ in listed) == flashgen.__all__ == dir(flashgen)
    for module, name, _ in listed:
        if module != "flashgen" and not module.startswith(("flashgen.torch", "flashgen.compat")):
            assert getattr(flashgen, name) is getattr(importlib.import_module(module), name), name
