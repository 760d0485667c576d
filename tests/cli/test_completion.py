"""Completion in shells: the script that ``flashgen`` prints, and what it answers the script."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.drawn import diagonal

COMMAND = "import sys; from flashgen.cli.main import main; sys.argv[0] = 'flashgen'; main()"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home directory, and in its ``bin`` a ``flashgen``."""
    program = tmp_path / "bin" / "flashgen"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{COMMAND}" "$@"\n')
    program.chmod(0o755)
    return tmp_path


def run(home: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join((str(home / "bin"), os.environ["PATH"]))
    environment = {**os.environ, "HOME": str(home), "PATH": path, "TERM": "dumb", **variables}
    return subprocess.run(arguments, env=environment, capture_output=True, text=True, check=False)


#: What is typed -> what is offered, and what is not.
COMPLETED: dict[str, tuple[set[str], set[str]]] = {
    "flashgen ": ({"build", "check", "show", "explain", "list", "cache", "doctor"}, {"info"}),
    "flashgen bu": ({"build"}, {"check"}),
    "flashgen cache ": ({"info", "verify", "clear"}, {"build"}),
    "flashgen build --head": ({"--head-dim", "--head-dim-v"}, {"--causal"}),
    "flashgen check --head-dim 64 --s": ({"--seed", "--schedules", "--score", "--stages"}, {"--race"}),
    "flashgen show --what ": ({"plan", "source", "ptx", "sass"}, {"build"}),
}


@pytest.mark.parametrize(("typed", "shell"), diagonal(list(COMPLETED), ["bash", "zsh", "fish"]))
def test_commands_options_and_values_are_completed(home: Path, typed: str, shell: str) -> None:
    offered, not_offered = COMPLETED[typed]
    words = typed.split(" ")
    asked = {"COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1), "_TYPER_COMPLETE_ARGS": typed}
    asked |= {"_FLASHGEN_COMPLETE": f"complete_{shell}", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    done = run(home, "flashgen", **asked)
    assert (done.returncode, done.stderr) == (0, "")
    # One a line: for bash alone, for fish with help behind a tab, for zsh quoted.
    lines = done.stdout.replace("_arguments '*: :((", "").replace("))'", "").splitlines()
    found = {line.split("\t")[0].split('":"')[0].strip('"') for line in lines}
    assert offered <= found
    assert not not_offered & found


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
@pytest.mark.parametrize("install", [False, True])
def test_bash_completes_with_the_script_that_is_printed_or_installed(home: Path, install: bool) -> None:
    # With a command behind it, bash stays there to be recognized.
    option = "--install-completion" if install else "--show-completion"
    done = run(home, "bash", "-c", f"flashgen {option}; exit $?")
    assert (done.returncode, done.stderr) == (0, "")
    (home / "script.sh").write_text(done.stdout)
    script = home / (".bash_completions/flashgen.sh" if install else "script.sh")
    if install:
        assert str(script) in (home / ".bashrc").read_text()
    typed = "COMP_WORDS=(flashgen build --caus); COMP_CWORD=2; _flashgen_completion flashgen"
    done = run(home, "bash", "-c", f'source {script}; complete -p flashgen; {typed}; echo "${{COMPREPLY[*]}}"')
    assert done.stdout.splitlines()[0].endswith("-F _flashgen_completion flashgen")
    assert done.stdout.splitlines()[1] == "--causal"


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_complete_with_the_script_too(home: Path, shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    done = run(home, shell, "-c", "flashgen --show-completion; exit $status")
    assert done.returncode == 0
    assert f"complete_{shell}" in done.stdout
