"""Every script of examples/ runs to its end as a user starts it, and is as short as its readers were promised."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = {path.stem: path for path in sorted((ROOT / "examples").glob("*.py"))}
#: What the last line of each begins with.
LAST_LINE = {
    "build_ahead": "forward_d64_fp16_causal_sm89.cubin: ",
    "chat": "same replies: ",
    "eight_bit_chat": "same tokens: ",
    "first_kernel": "dv ",
    "kv_cache": "sequence 1: largest error ",
    "own_mask": "largest error ",
    "own_score": "gradient of the slopes: ",
    "train_small_model": "slopes of the first layer: ",
}


def run(name: str, *arguments: str) -> str:
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, str(EXAMPLES[name]), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith(LAST_LINE[name]), done.stdout
    return done.stdout


def test_every_example_is_run_by_a_test() -> None:
    assert EXAMPLES.keys() == LAST_LINE.keys()


@pytest.mark.parametrize("name", sorted(LAST_LINE.keys() - {"chat", "eight_bit_chat", "train_small_model"}))
def test_an_example_runs_without_a_gpu_and_without_torch(name: str) -> None:
    run(name)


@pytest.mark.torch
def test_a_small_model_learns_on_the_emulator() -> None:
    losses = [float(line.split()[3]) for line in run("train_small_model").splitlines() if line.startswith("step")]
    assert losses[-1] < losses[0] / 2


@pytest.mark.torch
def test_chats_are_answered_as_by_torchs_attention() -> None:
    pytest.importorskip("transformers", minversion="5.20")
    lines = run("chat").splitlines()
    assert [line.split()[0] for line in lines[:-1]] == ["sdpa:", "fgen:"]
    assert lines[-1] == "same replies: 6 of 6"


@pytest.mark.torch
def test_pages_of_eight_bits_change_few_tokens() -> None:
    pytest.importorskip("transformers", minversion="5.20")
    lines = run("eight_bit_chat").splitlines()
    assert [line.split(",")[0] for line in lines[:-1]] == ["transformers", "flashgen"]
    same, count = (int(word) for word in lines[-1].split() if word.isdigit())
    assert count == 24
    assert same >= 20


@pytest.mark.gpu
@pytest.mark.torch
@pytest.mark.parametrize("name", sorted(LAST_LINE.keys() - {"build_ahead"}))
def test_an_example_runs_on_a_gpu(name: str) -> None:
    if name.endswith("chat"):
        pytest.importorskip("transformers", minversion="5.20")
    run(name, "--target", "gpu")


@pytest.mark.parametrize("name", sorted(LAST_LINE))
def test_an_example_is_short_and_says_what_it_shows_and_how_to_run_it(name: str) -> None:
    text = EXAMPLES[name].read_text(encoding="utf-8")
    assert len(text.splitlines()) < 100
    docstring = text.split('"""')[1]
    assert f"python examples/{name}.py" in docstring
