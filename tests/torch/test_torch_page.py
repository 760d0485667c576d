"""docs/torch.md and the README's section on torch: what they show runs, and prints what they say."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

ROOT = Path(__file__).resolve().parents[2]


def test_the_blocks_run_and_print_what_the_page_shows(emulated: Any, capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "torch.md").read_text(encoding="utf-8")
    if not hasattr(torch.nn.attention, "restore_flash_attention_impl"):
        pytest.skip("this torch cannot take an SDPA implementation back")
    code = "\n".join(re.findall(r"^```python\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL))
    exec(compile(code.replace('device = "cuda"', 'device = "cpu"'), "torch.md", "exec"), {})
    shown = "".join(re.findall(r"^```text\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL))
    assert capsys.readouterr().out == shown


def test_the_readmes_section_is_five_lines_of_names_that_exist() -> None:
    import flashgen as fg

    pytest.importorskip("transformers", reason="transformers is not installed (pip install '.[transformers]')")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (section,) = re.findall(r"^## PyTorch\n\n(.*?)\n\n", readme, flags=re.MULTILINE | re.DOTALL)
    assert len(section.splitlines()) == 5
    for name in re.findall(r"\bfg\.([\w.]+)", section):
        found: Any = fg
        for part in name.split("."):
            found = getattr(found, part)
        assert callable(found), name
