"""The README's promises, as far as they can be run here."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from flashgen.plan import plan
from flashgen.recent import Recent
from flashgen.render import render
from flashgen.spec import AttentionSpec, causal

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)


def test_the_race_is_reported_as_it_is_printed(flashgen: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a change of line numbers, UPDATE_DOCS=1 writes the report into the README; read the diff."""
    (shown,) = (block for block in blocks("console") if block.startswith("$ flashgen check"))
    command, _, report = shown.partition("\n")
    source = render(plan(AttentionSpec(64, mask=causal()), None, "sm_80").kernel("forward"))
    before, barrier, after = source.text.partition("Lines 14 and 15")
    assert "block_sync();" in after
    (tmp_path / f"{source.name}.cu").write_text(before + barrier + after.replace("block_sync();", "", 1))
    monkeypatch.setenv("FLASHGEN_OVERRIDE_DIR", str(tmp_path))
    monkeypatch.setattr("flashgen.api._kernels", Recent(2))
    result = flashgen(*shlex.split(command.removeprefix("$ flashgen ")))
    assert result.code == 1
    printed = result.err[result.err.index("\nrace: ") + 1 :]
    if os.environ.get("UPDATE_DOCS") == "1":
        (ROOT / "README.md").write_text(README.replace(shown, f"{command}\n{printed}"), encoding="utf-8")
    else:
        assert printed == report
    assert len(printed[: printed.index("To see it again")].splitlines()) <= 10


def test_the_shell_commands_are_the_two_that_ci_runs() -> None:
    assert [block.strip() for block in blocks("sh")] == [
        "pip install . && flashgen build --head-dim 128 --causal",
        "pip install '.[test]' && pytest",
    ]


def test_the_python_example_for_any_computer_runs_and_is_accurate(
    capsys: pytest.CaptureFixture[str],
) -> None:
    (example,) = (block for block in blocks("python") if 'target="emulator"' in block)
    exec(compile(example, "README.md", "exec"), {})
    error = float(capsys.readouterr().out.removeprefix("largest error:"))
    assert 0 < error < 5e-3


@pytest.mark.gpu
@pytest.mark.torch
def test_the_python_example_for_a_gpu_runs() -> None:
    (example,) = (block for block in blocks("python") if 'device="cuda"' in block)
    names: dict[str, object] = {}
    exec(compile(example, "README.md", "exec"), names)
    assert {"out", "lse", "dq", "dk", "dv"} <= names.keys()


def test_every_link_leads_somewhere() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert len(links) >= 5
    for link in links:
        assert (ROOT / link).exists(), link
