"""The README's promises, as far as they can be run here."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)


def shell(script: str, directory: Path) -> subprocess.CompletedProcess[str]:
    """Runs a script as a user types it: in a directory of its own, with the installed ``flashgen``."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FLASHGEN_OVERRIDE")}
    environment["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), environment["PATH"]))
    command = ["bash", "-c", f"set -euo pipefail\n{script}"]
    return subprocess.run(
        command, cwd=directory, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )


def test_the_race_demonstration_works_as_typed(tmp_path: Path) -> None:
    """After a change of line numbers, UPDATE_DOCS=1 writes the report into the README; read the diff."""
    (script,) = blocks("bash")
    (report,) = (block for block in blocks("text") if block.startswith("race: "))
    result = shell(script, tmp_path)
    assert result.returncode == 1, result.stderr
    printed = result.stderr[result.stderr.index("\nrace: ") + 1 :]
    if os.environ.get("UPDATE_DOCS") == "1":
        (ROOT / "README.md").write_text(README.replace(report, printed), encoding="utf-8")
    else:
        assert printed == report
    assert len(printed[: printed.index("To see it again")].splitlines()) <= 10
    *setup, check = script.strip().splitlines()
    assert check.startswith("flashgen check")
    again = printed[printed.index("To see it again:") :].splitlines()[1].strip()
    repeated = shell("\n".join((setup[-1], again)), tmp_path)
    assert (repeated.returncode, report.splitlines()[0] in repeated.stderr) == (1, True), repeated.stderr


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


def test_the_python_example_for_a_gpu_is_one_error_without_a_gpu() -> None:
    (example,) = (block for block in blocks("python") if 'device="cuda"' in block)
    code = example.replace("import torch\n", "")
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.count("Traceback")) == (1, 1), done.stderr
    assert done.stderr.splitlines()[-1].startswith("flashgen.errors.NoGpuError: ")


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
