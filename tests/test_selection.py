"""A selection that leaves no test says so: cases are sampled, so a test that CI runs may not be there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILE = "tests/test_workers.py"


def output(*arguments: str, level: str | None = None) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "DRAWN_"))}
    environment |= {} if level is None else {"DRAWN_CASES": level}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True).stdout


@pytest.mark.parametrize(
    "selection",
    [
        ("-n", "0", FILE, "-k", "no_such_name"),
        ("-n", "0", FILE, "-m", "torch"),
        ("-n", "0", f"{FILE}::test_each_worker_begins_with_another_gpu_and_sees_all[no-such-case]"),
        ("-n", "1", f"{FILE}::test_each_worker_begins_with_another_gpu_and_sees_all[no-such-case]"),
    ],
)
def test_a_selection_that_leaves_no_test_names_how_many_there_were(selection: tuple[str, ...]) -> None:
    assert "0 selected of 4 sampled; DRAWN_CASES=ci draws all\n" in output(*selection)


def test_a_run_that_draws_all_does_not_say_how_to_draw_more() -> None:
    assert "0 selected of 4 sampled; DRAWN_CASES=ci draws no others\n" in output(
        "-n", "0", FILE, "-k", "no_such_name", level="ci"
    )


def test_a_selection_that_leaves_a_test_says_nothing() -> None:
    assert "0 selected" not in output("-n", "0", FILE, "-k", "None-2")
