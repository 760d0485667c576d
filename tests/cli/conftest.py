"""A command line that runs in this process, on a machine without GPUs, with a compiler that costs nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from flashgen.cli.main import run
from flashgen.compile import Binary, Resources


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str


Run = Callable[..., Result]


@pytest.fixture
def flashgen(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*arguments: str) -> Result:
        capsys.readouterr()
        code = run(list(arguments))
        said = capsys.readouterr()
        return Result(code, said.out, said.err)

    return call


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "cache"
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(root))
    return root


@pytest.fixture
def machine(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The GPUs of a pretended machine; tests put some in. Compiling is pretended too."""
    gpus: list[Any] = []
    for module in ("build", "explain", "show"):
        monkeypatch.setattr(f"flashgen.cli.commands.{module}.find_gpus", lambda: tuple(gpus))
    monkeypatch.setattr("flashgen.compile.compile_source", pretend_to_compile)
    monkeypatch.setattr("flashgen.compile.compiler_build_id", lambda: "pretended")
    return gpus


def pretend_to_compile(source: Any) -> Binary:
    image = b"cubin of " + source.name.encode()
    return Binary(source.name, source.plan.arch.name, image, Resources(40, 0, 0, 0), 0.25, "")
