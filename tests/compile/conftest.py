"""Plans with a small kernel text of the test's own, rendered and compiled like any other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from flashgen.plan import plan
from flashgen.plan.model.plans import Constant, KernelPlan
from flashgen.render import KernelSource, paths, render
from flashgen.spec import AttentionSpec

Source = Callable[..., KernelSource]


@pytest.fixture(autouse=True)
def own_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLASHGEN_OVERRIDE_DIR", raising=False)
    monkeypatch.delenv("FLASHGEN_DUMP_DIR", raising=False)


@pytest.fixture
def tiny() -> KernelPlan:
    """A plan called ``tiny`` whose template is ``tiny.cu.j2``."""
    forward = plan(AttentionSpec(64, dtype="fp16", direction="forward"), None, "sm_80").kernel("forward")
    config = (Constant("tile_q", 64, "rows"), Constant("stages", 2))
    return replace(forward, name="tiny", template="tiny.cu.j2", threads=128, config_type="Config", config=config)


@pytest.fixture
def source(tiny: KernelPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Source:
    """Renders a kernel template, beside the real headers and macros."""
    real, root = paths.templates_dir(), tmp_path / "templates"
    (root / "kernels").mkdir(parents=True)
    (root / "include").symlink_to(real / "include")
    for macros in ("common.j2", "expressions.j2"):
        (root / "kernels" / macros).symlink_to(real / "kernels" / macros)
    monkeypatch.setattr(paths, "templates_dir", lambda: root)

    def make(template: str, **changes: object) -> KernelSource:
        (root / "kernels" / "tiny.cu.j2").write_text(template)
        return render(replace(tiny, **changes))  # type: ignore[arg-type]

    return make
