from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flashgen.errors import CompileError


def findings(flashgen: Any) -> dict[str, dict[str, str]]:
    value = json.loads(flashgen("doctor", "--json").out)
    assert value["schema"] == 1
    return {finding["subject"]: finding for finding in value["findings"]}


def test_a_working_machine_has_nothing_broken(flashgen: Any) -> None:
    result = flashgen("doctor")
    assert result.code == 0, result.out
    assert "broken" not in result.out
    for subject in ("python", "nvrtc", "driver", "gpus", "cache", "c++", "disassembler", "torch"):
        assert any(line.startswith(subject) for line in result.out.splitlines()), subject


def test_a_missing_compiler_is_broken_with_its_remedy(flashgen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> str:
        raise CompileError("libnvrtc.so.13 was not found")

    monkeypatch.setattr("flashgen.compile.compiler_build_id", missing)
    result = flashgen("doctor")
    assert result.code == 1
    assert "libnvrtc.so.13 was not found" in result.out
    assert "pip install 'nvidia-cuda-nvrtc" in result.out


def test_a_cache_open_to_others_is_broken(flashgen: Any, own_cache: Path) -> None:
    own_cache.mkdir()
    own_cache.chmod(0o777)
    assert flashgen("doctor").code == 1
    assert findings(flashgen)["cache"]["status"] == "broken"


def test_a_cache_that_is_not_there_yet_is_fine_and_stays_not_there(flashgen: Any, own_cache: Path) -> None:
    finding = findings(flashgen)["cache"]
    assert finding["status"] == "ok"
    assert str(own_cache) in finding["detail"]
    assert not (own_cache / "entries").exists()


def test_a_missing_cxx_costs_verification_only(flashgen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHGEN_CXX", "no-such-compiler")
    finding = findings(flashgen)["c++"]
    assert finding["status"] == "missing"
    assert "no-such-compiler" in finding["detail"]
    assert finding["remedy"]
    assert flashgen("doctor").code == 0


def test_a_setting_that_cannot_be_read_is_broken(flashgen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHGEN_LOCK_TIMEOUT", "soon")
    finding = findings(flashgen)["settings"]
    assert finding["status"] == "broken"
    assert "FLASHGEN_LOCK_TIMEOUT='soon'" in finding["detail"]


def test_a_check_that_dies_is_a_finding_and_the_others_go_on(flashgen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def die() -> None:
        raise ZeroDivisionError("unforeseen")

    monkeypatch.setitem(__import__("flashgen.cli.commands.checkup", fromlist=["CHECKS"]).CHECKS, "gpus", die)
    found = findings(flashgen)
    assert found["gpus"]["detail"] == "ZeroDivisionError: unforeseen"
    assert found["python"]["status"] == "ok"


def test_the_doctor_does_not_import_torch() -> None:
    code = "import sys; from flashgen.cli.main import run; run(['doctor']); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
