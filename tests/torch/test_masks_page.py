"""The page on masks does what it says: its blocks run in order, and print what stands below them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.torch

PAGE = Path(__file__).parents[2] / "docs" / "masks.md"


def test_the_blocks_run_and_print_what_the_page_shows(emulated: Any, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"^```(python|text)\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert [kind for kind, _ in blocks].count("python") == 7
    scope: dict[str, Any] = {}
    said = ""
    for number, (kind, text) in enumerate(blocks):
        if kind == "text":
            assert said.rstrip() == text.rstrip()
            continue
        capsys.readouterr()
        # The emulator stands in for the GPU.
        code = text.replace('device = "cuda"', 'device = "cpu"')
        exec(compile(code, f"masks.md, block {number}", "exec"), scope)
        said = capsys.readouterr().out
    assert scope["weight"].grad.abs().sum() > 0
