"""What the pages consist of: README.md, CONTRIBUTING.md and docs/, cut into blocks of code.

A comment on the line above a block says how the tests treat it:

- ``<!-- not run: REASON -->``: they leave it out;
- ``<!-- needs a GPU -->``: they run it where there is one;
- ``<!-- exit code: N -->``: its last command ends with N;
- ``<!-- from generated/FILE -->``: its lines are in that file, in this order; a line of dots stands for lines left out.
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    *(path for name in ("README.md", "CONTRIBUTING.md") if (path := ROOT / name).exists()),
    *sorted((ROOT / "docs").rglob("*.md")),
]
PYTHON, SHELL = ("python", "py"), ("console", "sh", "bash", "shell")
#: What is shown and never run.
SHOWN = ("text", "json", "toml", "yaml", "cpp", "cuda", "diff")
_BLOCK = re.compile(
    r"^(?:[ ]*<!-- (?P<mark>[^\n]+) -->\n)?(?P<indent>[ ]*)```(?P<kind>[^\n`]*)\n(?P<text>.*?)^(?P=indent)```[ ]*$",
    flags=re.MULTILINE | re.DOTALL,
)
_NOT_RUN = re.compile(r"not run: \S.*")
_SOURCE = re.compile(r"from (generated/\S+)")
_EXIT_CODE = re.compile(r"exit code: (\d+)")


@dataclass(frozen=True)
class Block:
    """A fenced block; ``begin`` and ``end`` are where its text lies in the page, ``prints`` what follows it."""

    kind: str
    text: str
    mark: str
    line: int
    begin: int
    end: int
    prints: Block | None = None

    @property
    def is_python(self) -> bool:
        return self.kind in PYTHON

    @property
    def is_code(self) -> bool:
        return self.kind in PYTHON + SHELL

    @property
    def needs_gpu(self) -> bool:
        return self.mark == "needs a GPU"

    @property
    def is_left_out(self) -> bool:
        return bool(_NOT_RUN.fullmatch(self.mark))

    @property
    def exit_code(self) -> int:
        found = _EXIT_CODE.fullmatch(self.mark)
        return int(found[1]) if found else 0

    @property
    def source(self) -> str | None:
        """The committed source that the block quotes."""
        found = _SOURCE.fullmatch(self.mark)
        return found[1] if found else None

    @property
    def has_known_mark(self) -> bool:
        known = self.needs_gpu or self.is_left_out or self.source or _EXIT_CODE.fullmatch(self.mark)
        return not self.mark or bool(known)

    @property
    def script(self) -> str:
        """A shell block as a script: the commands behind ``$``, or all of it where it has none."""
        typed = re.findall(r"^\$ ((?:.*\\\n)*.*)$", self.text, flags=re.MULTILINE)
        return "\n".join(typed) or self.text


def blocks(page: Path) -> list[Block]:
    """The blocks of a page; a block of ``text`` that follows code is what that prints, and no block of its own."""
    text = page.read_text(encoding="utf-8")
    found: list[Block] = []
    for m in _BLOCK.finditer(text):
        line = text.count("\n", 0, m.start("text"))
        block = Block(
            m["kind"].strip(), textwrap.dedent(m["text"]), m["mark"] or "", line, m.start("text"), m.end("text")
        )
        before = found[-1] if found else None
        if before and block.kind == "text" and before.is_code and _is_fence(text[before.end : m.start("indent")]):
            found[-1] = Block(**{**vars(before), "prints": block})
        else:
            found.append(block)
    return found


def _is_fence(between: str) -> bool:
    return not between.replace("```", "", 1).strip()
