"""The README's promises, as far as they can be run here."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)


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
