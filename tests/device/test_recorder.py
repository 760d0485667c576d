"""``record.py``, over a libcuda whose kernels do nothing: one of them fails, one hangs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conformance.cases import CASES
from conformance.digest import digest
from conformance.records import decode

from flashgen.compile import compiler_build_id

HERE = Path(__file__).parent


class Recorded:
    """What a run of the recorder left behind."""

    def __init__(self, only: str, libcuda: Path, out: Path, patience: str = "2") -> None:
        # Kept on disk, and so the recorder need not ask NVRTC, which would talk to this libcuda.
        compiler_build_id()
        command = [sys.executable, HERE / "record.py", "--out", out, "--only", only, "--patience", patience]
        self.done = subprocess.run(
            [str(part) for part in (*command, "--processes", "2")],
            env=os.environ | {"LD_LIBRARY_PATH": str(libcuda)},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        files = {path.stem: json.loads(path.read_text()) for path in out.glob("*.json")}
        self.files: dict[str, Any] = files
        self.cases: dict[str, Any] = {name: case for file in files.values() for name, case in file["cases"].items()}


@pytest.fixture(scope="module")
def libcuda(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = next((c for c in ("c++", "g++", "clang++") if shutil.which(c)), None)
    assert compiler, "a C++ compiler is needed, as for the emulator"
    directory = tmp_path_factory.mktemp("libcuda")
    source = HERE / "libcuda.cpp"
    command = [compiler, "-std=c++17", "-shared", "-fPIC", "-o", directory / "libcuda.so.1", source, "-ldl"]
    subprocess.run(command, check=True)
    return directory


@pytest.fixture(scope="module")
def recorded(libcuda: Path, tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    # In the names of cases of a kernel that works, of the one that fails and of the one that hangs.
    return Recorded("warp", libcuda, tmp_path_factory.mktemp("out"))


def test_a_kernel_that_fails_or_hangs_costs_only_its_own_answer(recorded: Recorded) -> None:
    wanted = {name for name in CASES if "warp" in name}
    assert {"vote/warp", "sync/warp"} < wanted
    lost = {name for name in wanted if name.startswith(("vote/", "sync/"))}
    assert set(recorded.cases) == wanted - lost
    assert recorded.done.returncode == 1
    assert "FAILED vote/warp: nothing happened for 2 s" in recorded.done.stdout
    assert "FAILED sync/warp: DriverError: cuLaunchKernelEx failed: LAUNCH_FAILED: in words" in recorded.done.stdout


def test_an_answer_is_kept_with_what_it_answers(recorded: Recorded, libcuda: Path, tmp_path: Path) -> None:
    run = Recorded("shuffle/", libcuda, tmp_path)
    assert run.done.returncode == 0, run.done.stdout + run.done.stderr
    name = "shuffle/xor-every-mask"
    assert run.cases[name]["digest"] == digest(CASES[name])
    # Nothing was computed: the outputs are what they were.
    assert (decode(run.cases[name]["outputs"])["out"] == CASES[name].outputs["out"]).all()
    device = run.files["warp"]["device"]
    assert (device["name"], device["arch"], device["driver"]) == ("Paper GPU", "sm_90a", 13000)
    assert "Cuda compilation tools" in device["compiler"]


def test_a_kernel_that_keeps_hanging_is_given_up(libcuda: Path, tmp_path: Path) -> None:
    run = Recorded("vote/", libcuda, tmp_path, patience="1")
    assert run.cases == {}
    assert run.done.stdout.count("nothing happened for 1 s") == 2
    assert run.done.stdout.count("not asked, since vote failed 2 times") == 2
