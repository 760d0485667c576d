"""What README.md and the page on races promise beyond what their blocks print."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import flashgen as fg
from tests.docs.pages import ROOT, Block, blocks

README = ROOT / "README.md"


def the_block(page: Path, text: str) -> Block:
    (found,) = (block for block in blocks(page) if text in block.text)
    return found


def test_the_race_report_is_short_and_its_command_repeats_the_case(tmp_path: Path) -> None:
    block = the_block(ROOT / "docs" / "how-to" / "find-a-race.md", "flashgen check")
    assert block.prints
    report, again = block.prints.text.split("To see it again:")
    assert len(report.splitlines()) <= 10
    *setup, check = block.script.splitlines()
    assert check.startswith("flashgen check")
    environment = os.environ | {"PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))}
    script = "\n".join(("set -euo pipefail", *setup, again.strip()))
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, report.splitlines()[0] in done.stderr) == (1, True), done.stderr


def test_the_shell_commands_are_the_two_that_ci_runs() -> None:
    assert [block.text.strip() for block in blocks(README) if block.kind == "sh"] == [
        "pip install . && flashgen build --head-dim 128 --causal",
        "pip install '.[test]' && pytest",
    ]


def test_the_example_for_a_gpu_is_one_error_without_a_gpu() -> None:
    code = the_block(README, 'device="cuda"').text.replace("import torch\n", "")
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.count("Traceback")) == (1, 1), done.stderr
    assert done.stderr.splitlines()[-1].startswith("flashgen.errors.NoGpuError: ")


@pytest.mark.torch
def test_the_section_on_torch_names_what_exists() -> None:
    (section,) = re.findall(r"^## PyTorch\n\n(.*?)\n\n", README.read_text(encoding="utf-8"), flags=re.M | re.S)
    names = re.findall(r"\bfg\.([\w.]+)", section)
    assert len(names) >= 4
    for name in names:
        if name == "integrations.transformers.register":
            continue  # tests/integrations call it, where transformers is installed
        found: Any = fg
        for part in name.split("."):
            found = getattr(found, part)
        assert callable(found), name


def test_readme_is_two_screens() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 115
