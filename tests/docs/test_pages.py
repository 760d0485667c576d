"""Every block of Python and of shell commands in the pages runs, and prints what stands below it.

After a change of what they print, UPDATE_DOCS=1 writes it into the pages; read the diff.
"""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.docs.pages import PAGES, ROOT, SHOWN, Block, blocks
from tests.drawn import some

#: Torch of these pages: older versions lack functions that they show.
OLDEST_TORCH = (2, 11)
#: Pages whose commands compile much: DRAWN_CASES=ci runs them.
SLOW = ("overrides", "build-ahead", "find-a-race")


def is_run(block: Block, *, gpu: bool = False) -> bool:
    return block.is_code and not block.is_left_out and (gpu or not block.needs_gpu)


def uses_torch(page: Path) -> bool:
    return any(block.is_python and "torch" in block.text for block in blocks(page) if is_run(block))


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def parameters() -> list[Any]:
    return [
        pytest.param(page, id=name(page), marks=[pytest.mark.torch] if uses_torch(page) else [])
        for page in some(PAGES, *(page for page in PAGES if page.stem not in SLOW))
        if any(is_run(block) for block in blocks(page))
    ]


def gpu_parameters() -> list[Any]:
    marks = [pytest.mark.gpu, pytest.mark.torch]
    wanted = [page for page in PAGES if uses_torch(page) or any(block.needs_gpu for block in blocks(page))]
    return [pytest.param(page, id=name(page), marks=marks) for page in wanted]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_block_is_run_shown_or_marked(page: Path) -> None:
    for block in blocks(page):
        where = f"{name(page)}:{block.line}"
        assert block.is_code or block.kind in SHOWN, f"{where}: {block.kind!r} is neither run nor shown"
        assert block.has_known_mark, f"{where}: the mark {block.mark!r} is not one of tests/docs/pages.py"
        assert block.is_python or not block.needs_gpu, f"{where}: only Python runs on a GPU; write 'not run: ...'"


@pytest.mark.parametrize("page", parameters())
def test_the_blocks_run_and_print_what_the_page_shows(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.ExitStack() as stack:
        if uses_torch(page):
            skip_old_torch()
            import flashgen as fg

            # The emulator stands in for the GPU.
            stack.enter_context(fg.torch.emulate_cpu())
        run_page(page, tmp_path, monkeypatch, {'"cuda"': '"cpu"'}, gpu=False)


@pytest.mark.parametrize("page", gpu_parameters())
def test_the_blocks_run_on_a_gpu(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    skip_old_torch()
    run_page(page, tmp_path, monkeypatch, {}, gpu=True)


def skip_old_torch() -> None:
    torch = pytest.importorskip("torch")
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < OLDEST_TORCH:
        pytest.skip(f"torch {torch.__version__} is older than 2.11")


def run_page(page: Path, directory: Path, monkeypatch: Any, replaced: dict[str, str], *, gpu: bool) -> None:
    """Run a page's blocks in order: Python with one namespace, and shell commands in one directory."""
    monkeypatch.chdir(directory)
    # torch.compile imports the module that a function names.
    module = ModuleType(f"page_{page.stem.replace('-', '_')}")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    names = vars(module)
    printed: list[tuple[Block, str]] = []
    for block in (b for b in blocks(page) if is_run(b, gpu=gpu)):
        said = run_python(block, page, names, replaced) if block.is_python else run_shell(block, page, directory)
        if block.prints:
            printed.append((block.prints, said if block.is_python else shown_part(said, block.prints.text)))
    if os.environ.get("UPDATE_DOCS") == "1":
        return write(page, printed)
    for shown, said in printed:
        assert said.rstrip() == shown.text.rstrip(), f"{name(page)}:{shown.line}"


def run_python(block: Block, page: Path, names: dict[str, Any], replaced: dict[str, str]) -> str:
    code = block.text
    for old, new in replaced.items():
        code = code.replace(old, new)
    # Lines of a traceback are those of the page.
    code = "\n" * block.line + code
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(code, name(page), "exec"), names)
    return out.getvalue()


def run_shell(block: Block, page: Path, directory: Path) -> str:
    """What commands print, typed in a directory of their own with the installed ``flashgen``."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("FLASHGEN_OVERRIDE")}
    environment["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), environment["PATH"]))
    done = subprocess.run(
        ["bash", "-c", f"set -euo pipefail\n{block.script}"],
        cwd=directory,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == block.exit_code, f"{name(page)}:{block.line}\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr


def shown_part(said: str, shown: str) -> str:
    """What commands print from the line on that begins with the first word shown; before it there may be progress."""
    word = shown.split(maxsplit=1)[0]
    lines = said.splitlines(keepends=True)
    first = next((number for number, line in enumerate(lines) if line.startswith(word)), 0)
    return "".join(lines[first:])


def write(page: Path, printed: list[tuple[Block, str]]) -> None:
    text = page.read_text(encoding="utf-8")
    for shown, said in reversed(printed):
        text = text[: shown.begin] + said.rstrip() + "\n" + text[shown.end :]
    page.write_text(text, encoding="utf-8")
