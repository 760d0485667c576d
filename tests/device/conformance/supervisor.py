"""Workers, watched: one kernel that fails or hangs costs its own answer and no other."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_HUNG = "nothing happened"
#: Of one kernel, before the rest of its cases are left out.
_MOST_HANGS = 2
_MOST_ERRORS = 8
_HERE = Path(__file__).resolve().parents[1]


@dataclass
class Answers:
    """What became of a family."""

    device: dict[str, Any] = field(default_factory=dict)
    cases: dict[str, Any] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)


def ask(names: list[str], cubins: Path, patience: float) -> Answers:
    """Run the cases in workers, one after the other; each gets on within ``patience`` seconds or is ended."""
    answers = Answers()
    remaining = list(names)
    while remaining:
        before = len(remaining)
        culprit, why = _run_worker(remaining, cubins, patience, answers)
        if culprit:
            answers.errors.setdefault(culprit, why)
        _give_up_kernels(remaining, answers)
        remaining = [n for n in remaining if n not in answers.cases and n not in answers.errors]
        if len(remaining) == before:
            # Not one kernel was started: another attempt would end the same way.
            answers.errors.update(dict.fromkeys(remaining, why))
            break
    return answers


def _give_up_kernels(names: list[str], answers: Answers) -> None:
    """Cases of a kernel that keeps failing are not asked: each failure costs a new worker, and hanging more."""
    for kernel in {_kernel(name) for name in names}:
        errors = [why for name, why in answers.errors.items() if _kernel(name) == kernel]
        if sum(why.startswith(_HUNG) for why in errors) >= _MOST_HANGS or len(errors) >= _MOST_ERRORS:
            rest = [n for n in names if _kernel(n) == kernel and n not in answers.cases]
            for name in rest:
                answers.errors.setdefault(name, f"not asked, since {kernel} failed {len(errors)} times")


def _kernel(name: str) -> str:
    return name.split("/")[0]


def _run_worker(names: list[str], cubins: Path, patience: float, answers: Answers) -> tuple[str, str]:
    """Until the worker ends: the case that it ended in, if any, and why."""
    with (cubins / f"stderr-{threading.get_ident()}.txt").open("w+") as errors:
        worker = subprocess.Popen(
            [sys.executable, "-m", "conformance.worker", str(cubins)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            cwd=_HERE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join([str(_HERE), *filter(None, sys.path)])},
        )
        assert worker.stdin is not None
        try:
            worker.stdin.write(json.dumps(names))
            worker.stdin.close()
        except BrokenPipeError:
            pass
        current, why = _follow(worker, patience, answers)
        errors.seek(0)
        tail = errors.read()[-1500:].strip()
        return current, why or f"the worker ended with status {worker.returncode}: {tail}"


def _follow(worker: subprocess.Popen[str], patience: float, answers: Answers) -> tuple[str, str]:
    lines: queue.Queue[str | None] = queue.Queue()
    threading.Thread(target=_read, args=(worker, lines), daemon=True).start()
    current = ""
    try:
        # The first line takes longer: Python and CUDA start.
        line = lines.get(timeout=patience + 30)
        while line is not None:
            current = _note(json.loads(line), current, answers)
            line = lines.get(timeout=patience)
        worker.wait(timeout=patience)
    except (queue.Empty, subprocess.TimeoutExpired):
        worker.kill()
        with suppress(subprocess.TimeoutExpired):
            worker.wait(timeout=20)
        return current, f"{_HUNG} for {patience:g} s"
    return current, ""


def _note(message: dict[str, Any], current: str, answers: Answers) -> str:
    """Keep what a worker says; returns the case that it is at."""
    if "start" in message:
        return str(message["start"])
    if "device" in message:
        answers.device = message["device"]
        return current
    kind, key = (answers.cases, "answer") if "answer" in message else (answers.errors, "error")
    kind[message["name"]] = message[key]
    return ""


def _read(worker: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
    assert worker.stdout is not None
    for line in worker.stdout:
        lines.put(line)
    lines.put(None)
