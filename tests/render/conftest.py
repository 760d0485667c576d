"""A templates directory of the test's own, and a plan that is rendered with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from flashgen.plan import plan
from flashgen.plan.model.plans import KernelPlan
from flashgen.render import paths
from flashgen.spec import AttentionSpec

Write = Callable[..., None]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("FLASHGEN_OVERRIDE_DIR", raising=False)


@pytest.fixture
def tiny() -> KernelPlan:
    """A plan whose template is ``tiny.cu.j2``."""
    forward = plan(AttentionSpec(64, direction="forward"), None, "sm_80").kernel("forward")
    return replace(forward, name="tiny", template="tiny.cu.j2")


@pytest.fixture
def templates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Writes files of a templates directory that stands in for the real one: ``templates(path=text)``."""
    macros = {name: (paths.templates_dir() / "kernels" / name).read_text() for name in ("common.j2", "expressions.j2")}
    root = tmp_path / "templates"
    for directory in ("kernels", "include/flashgen"):
        (root / directory).mkdir(parents=True)
    for name, text in macros.items():
        (root / "kernels" / name).write_text(text)
    monkeypatch.setattr(paths, "templates_dir", lambda: root)

    def write(kernel: str, **headers: str) -> None:
        (root / "kernels" / "tiny.cu.j2").write_text(kernel)
        for name, text in headers.items():
            (root / "include" / "flashgen" / f"{name}.cuh").write_text(text)

    return write
