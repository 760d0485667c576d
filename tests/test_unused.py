"""Nothing is defined that nothing uses: names of the package, and device functions of the headers.

What only tests use counts as unused. Public names are those that the documentation mentions.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from flashgen.render.amalgamation.declarations import Declaration, parse

ROOT = Path(__file__).parents[1]
INCLUDE = ROOT / "templates/include"
WORD = re.compile(r"[A-Za-z_]\w*")
#: Names in strings: of attributes, C++, or lazy imports, but no sentences.
LISTED = re.compile(r"\S+(?: as \S+)?")
#: Functions that a library finds by their decorator.
REGISTERED = re.compile(r"command|callback|register")
#: One instruction per function, each with a recorded answer of a GPU, or kernels that the emulator's tests run.
INSTRUCTIONS = ("ptx", "emu")


def text_of(*patterns: str) -> str:
    return "\n".join(path.read_text("utf-8") for pattern in patterns for path in sorted(ROOT.glob(pattern)))


def modules() -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted((ROOT / "flashgen").rglob("*.py")):
        yield path, ast.parse(path.read_text("utf-8"))


def definitions(body: list[ast.stmt], own_classes: set[str]) -> Iterator[tuple[str, ast.stmt]]:
    """The names that statements define, and those of the methods that no library calls."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            if not any(REGISTERED.search(ast.unparse(d)) for d in node.decorator_list):
                yield node.name, node
            if isinstance(node, ast.ClassDef) and {ast.unparse(base) for base in node.bases} <= own_classes:
                yield from ((n, d) for n, d in definitions(node.body, own_classes) if isinstance(d, ast.FunctionDef))
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [name for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)]
            yield from ((name.id, node) for name in names)


def references(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """The names that a module mentions, and where; strings too, as lazy imports have them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute):
            yield node.attr, node.lineno
        elif isinstance(node, ast.alias) and node.name == node.asname:
            yield node.name, node.lineno
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and LISTED.fullmatch(node.value):
            yield from ((word, node.lineno) for word in WORD.findall(node.value))


def test_every_name_of_the_package_is_used() -> None:
    trees = dict(modules())
    classes = {node.name for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    used: dict[str, list[tuple[Path, int]]] = {}
    for path, tree in trees.items():
        for name, line in references(tree):
            used.setdefault(name, []).append((path, line))
    in_templates = set(re.findall(r"(?<=\w\.)\w+", text_of("templates/kernels/**/*.j2")))
    public = set(WORD.findall(text_of("docs/**/*.md", "README.md", "pyproject.toml")))
    unused = [
        f"{path.relative_to(ROOT)}:{node.lineno} {name}"
        for path, tree in trees.items()
        for name, node in definitions(tree.body, classes | {"NamedTuple", "Protocol"})
        if not name.startswith("__") and name not in in_templates | public
        # What a definition says of itself is no use.
        if all(at == path and node.lineno <= line <= (node.end_lineno or 0) for at, line in used.get(name, ()))
    ]
    assert unused == []


def flat(declarations: list[Declaration] | tuple[Declaration, ...]) -> Iterator[Declaration]:
    for one in declarations:
        yield one
        yield from flat(one.members)


def test_every_device_function_is_reached() -> None:
    """From templates, from the functions that expressions are printed as, and from the emulator."""
    paths = sorted(INCLUDE.rglob("*.*h"))
    waiting = [(path, one) for path in paths for one in flat(parse(path.read_text("utf-8").split("\n")))]
    conditions = "\n".join(re.findall(r"(?m)^ *#(?:el)?if.*", text_of("templates/include/**/*.*h")))
    sources = conditions + text_of(
        "templates/kernels/**/*.j2", "flashgen/emulator/**/*.h", "flashgen/emulator/**/*.cpp"
    )
    words = set(WORD.findall(re.sub(r"//.*", "", sources)))
    words |= {word for _, tree in modules() for word, _ in references(tree)}
    # Functions are reached by their calls.
    words |= {f"{word}(" for word in words}
    instructions = set(WORD.findall(text_of("tests/device/**/*.cu", "tests/device/**/*.py", "tests/emulator/**/*.py")))
    while True:
        reached = [(path, one) for path, one in waiting if one.name in words or not one.name]
        if not reached:
            break
        words.update(word for _, one in reached for word in one.words)
        prefixes = tuple(prefix for _, one in reached for prefix in one.pasted)
        words.update(one.name for _, one in waiting if prefixes and one.name.startswith(prefixes))
        done = {id(one) for _, one in reached}
        waiting = [(path, one) for path, one in waiting if id(one) not in done]
    unreached = [
        f"{path.relative_to(INCLUDE)}:{one.first + 1} {one.name}"
        for path, one in waiting
        if not (path.parent.name in INSTRUCTIONS and one.name.removesuffix("(") in instructions)
    ]
    assert unreached == []
