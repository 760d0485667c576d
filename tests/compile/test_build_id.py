from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from flashgen.compile import build_id, compiler_build_id, find_nvrtc
from flashgen.compile.locate import loaded_nvrtc
from flashgen.render import templates_dir

ASK = (
    "import sys; from flashgen.compile import compiler_build_id, locate; print(compiler_build_id())\n"
    "print(locate.loaded_nvrtc() is not None, 'cuda.bindings' in sys.modules)"
)


def ask(cache: Path) -> list[str]:
    environment = {**os.environ, "PYTHONPATH": str(templates_dir().parent), "FLASHGEN_CACHE_DIR": str(cache)}
    return subprocess.check_output([sys.executable, "-c", ASK], env=environment, text=True).splitlines()


def test_the_second_process_knows_the_compiler_without_loading_it(tmp_path: Path) -> None:
    cold, warm = ask(tmp_path / "cache"), ask(tmp_path / "cache")
    assert re.fullmatch(r"\S.*; Cuda compilation tools, release \d+\.\d+, V[\d.]+", cold[0])
    assert warm[0] == cold[0]
    assert cold[1] == "True True"
    assert warm[1] == "False False"


def test_another_library_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = tmp_path / "libnvrtc.so.13"
    library.write_text("one")
    answers = iter(["one", "two", "three"])
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(build_id, "find_nvrtc", lambda: library)
    monkeypatch.setattr(build_id, "_ask", lambda: next(answers))

    def fresh() -> str:
        compiler_build_id.cache_clear()
        return compiler_build_id()

    try:
        assert [fresh(), fresh()] == ["one", "one"]
        library.write_text("another size")
        assert [fresh(), fresh()] == ["two", "two"]
        os.utime(library, (1, 1))
        assert [fresh(), fresh()] == ["three", "three"]
    finally:
        compiler_build_id.cache_clear()


def test_the_library_found_is_the_one_that_gets_loaded() -> None:
    found = find_nvrtc()
    compiler_build_id.cache_clear()
    build_id._ask()
    loaded = loaded_nvrtc()
    assert loaded is not None
    assert found is None or found.samefile(loaded)
