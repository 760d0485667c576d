"""The tables of docs/reference/cli.md are those of the command line: every option and every variable.

UPDATE_DOCS=1 writes them; read the diff.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import typer

from flashgen import settings
from flashgen.cli.main import DEBUG, app
from tests.docs.marked_tables import marked_tables, table

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "cli.md"
#: The commands that take the options which describe a kernel.
OF_A_KERNEL = tuple(f"flashgen {name}" for name in ("build", "check", "show", "explain", "report", "tune"))


def commands(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    yield name, command
    for word, below in getattr(command, "commands", {}).items():
        yield from commands(below, f"{name} {word}")


def rows(command: Any) -> list[str]:
    return [row(option) for option in command.params if not option.hidden]


def row(option: Any) -> str:
    meaning = " ".join(option.help.replace("\\[", "[").split()).replace("|", "\\|")
    return f"| {spelled(option)} | {meaning} |"


def spelled(option: Any) -> str:
    if option.is_flag:
        value = ""
    elif option.metavar:
        value = " " + option.metavar
    elif isinstance(option.default, Enum):
        value = " " + "|".join(member.value for member in type(option.default))
    else:
        value = " N"
    return ", ".join(f"`{name}{value}`" for name in option.opts).replace("|", "\\|")


def tables() -> dict[str, str]:
    """What each table of the page has to be, by the name in its mark."""
    found = {name: rows(command) for name, command in commands(typer.main.get_command(app), "flashgen")}
    first = found[OF_A_KERNEL[0]]
    shared = [line for line in first if all(line in found[name] for name in OF_A_KERNEL)]
    own = {name: [line for line in lines if line not in shared] for name, lines in found.items()}
    filled = {name: lines for name, lines in own.items() if lines} | {"a kernel": shared}
    variables = [
        f"| `{v.name}` | {v.default.replace('not set', '')} | {v.meaning} |"
        for v in (*settings.VARIABLES.values(), DEBUG)
    ]
    return {name: table(["option", "meaning"], lines) for name, lines in filled.items()} | {
        "variables": table(["variable", "default", "meaning"], variables)
    }


def test_every_option_and_variable_is_in_its_table() -> None:
    assert marked_tables(PAGE, tables) == tables()


def test_every_command_has_a_heading() -> None:
    page = PAGE.read_text(encoding="utf-8")
    headings = "\n".join(re.findall(r"^## (.*)$", page, flags=re.MULTILINE))
    for name, command in commands(typer.main.get_command(app), "flashgen"):
        if not hasattr(command, "commands"):
            assert re.search(rf"^{name}$", headings, flags=re.MULTILINE), name


def test_every_option_has_a_meaning() -> None:
    for name, command in commands(typer.main.get_command(app), "flashgen"):
        assert all(option.help for option in command.params), name
