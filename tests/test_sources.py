"""Rendered texts in the cache: found again, and never served after anything they depend on has changed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import flashgen as fg
from flashgen import sources
from flashgen.cache import default_cache
from flashgen.emulator.build import kernel_library
from flashgen.plan import plan
from flashgen.render import paths, render, templates_dir
from flashgen.spec.text.files import spec_from_json

ROOT = Path(__file__).parents[1]
BAND = fg.AttentionSpec(16, dtype="fp16", mask=fg.window(4, 4))
IDS = np.zeros((1, 4), np.int32)
PLAN = plan(fg.AttentionSpec(16, dtype="fp16"), None, "sm_80")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def templates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the templates that a test may edit."""
    copy = tmp_path / "templates"
    shutil.copytree(templates_dir(), copy)
    monkeypatch.setattr(paths, "templates_dir", lambda: copy)
    monkeypatch.setattr(sources, "templates_dir", lambda: copy)
    return copy


def in_another_process() -> None:
    """Forget what this process keeps in memory."""
    default_cache()._memory.clear()


def forbid_rendering(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "render", lambda plan: pytest.fail(f"{plan.name} was rendered again"))


def test_texts_are_rendered_once_and_then_found(monkeypatch: pytest.MonkeyPatch) -> None:
    first = sources.sources_of(PLAN)
    assert {role: s.text for role, s in first.items()} == {k.role: render(k).text for k in PLAN.kernels}
    in_another_process()
    forbid_rendering(monkeypatch)
    assert sources.sources_of(PLAN) == first


def test_texts_are_not_listed_as_the_work_of_a_compiler() -> None:
    sources.sources_of(PLAN)
    info = default_cache().info()
    assert (info.entries, info.compilers) == (1, ())


@pytest.mark.parametrize("file", ["kernels/forward.cu.j2", "include/flashgen/ptx/math.cuh"])
def test_an_edited_template_or_header_shows_at_once(templates: Path, file: str) -> None:
    before = sources.sources_of(PLAN)["forward"].text
    path = templates / file
    path.write_text(path.read_text() + "\n// edited\n")
    assert "// edited" not in before
    assert "// edited" in sources.sources_of(PLAN)["forward"].text


def test_an_edit_counts_that_keeps_the_size_and_the_time(templates: Path) -> None:
    path = templates / "kernels" / "forward.cu.j2"
    status, text = path.stat(), path.read_text()
    path.write_text("// one\n" + text)
    os.utime(path, ns=(0, 0))
    one = sources.rendering_digest()
    path.write_text("// two\n" + text)
    os.utime(path, ns=(0, 0))
    assert sources.rendering_digest() != one
    path.write_text(text)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    path.rename(path.with_name("renamed"))
    assert sources.rendering_digest() != one


def test_what_editors_leave_beside_a_template_does_no_harm(templates: Path) -> None:
    (templates / "kernels" / ".#forward.cu.j2").symlink_to("user@host.1234")
    assert set(sources.sources_of(PLAN)) == {"forward", "prepare", "main", "finish"}


@pytest.mark.parametrize("part", ["render/summary.py", "plan/forward.py", "spec/command.py", "spec/files.py"])
def test_a_process_with_other_code_finds_nothing_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    ours = sources.rendering_digest()
    package = tmp_path / "flashgen"
    shutil.copytree(Path(fg.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(sources, "_PACKAGE", str(package))
    assert sources._code_digest.__wrapped__() == sources._code_digest()
    with (package / part).open("a") as file:
        file.write("# edited\n")
    assert f"{sources._templates_digest()} {sources._code_digest.__wrapped__()}" != ours


def test_nothing_is_kept_when_templates_or_code_change_meanwhile(
    templates: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def render_and_edit(kernel):
        with (templates / "kernels" / "common.j2").open("a") as file:
            file.write("{# edited #}\n")
        return render(kernel)

    expected = {k.role: render(k).text for k in PLAN.kernels}
    with monkeypatch.context() as patch:
        patch.setattr(sources, "render", render_and_edit)
        assert {role: s.text for role, s in sources.sources_of(PLAN).items()} == expected
        patch.setattr(sources, "render", render)
        # The code on disk is not the code that runs.
        patch.setattr(sources._code_digest, "__wrapped__", lambda: "another")
        assert {role: s.text for role, s in sources.sources_of(PLAN).items()} == expected
    assert default_cache().info().entries == 0


def test_the_digest_covers_all_code_that_rendering_imports() -> None:
    code = """
import sys
from pathlib import Path
import flashgen as fg
from flashgen.plan import plan
from flashgen.render import render_afresh
for kernel in plan(fg.AttentionSpec(16, dtype="fp16", mask=fg.window(4, 4)), None, "sm_80").kernels:
    render_afresh(kernel)
package = Path(fg.__file__).parent
for name, module in list(sys.modules.items()):
    if name.startswith("flashgen."):
        print(Path(module.__file__).relative_to(package).parts[0])
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    files = set(done.stdout.splitlines())
    assert {"plan", "render", "spec"} <= files, done.stderr
    assert files - set(sources.RENDERING_CODE) == {"errors.py", "settings.py"}


def windowed(width: int, cap: float) -> fg.AttentionSpec:
    mask = fg.window(width, 3) & fg.document(np.zeros((1, 4), np.int32))
    return fg.AttentionSpec(16, dtype="fp16", mask=mask, score=lambda s, b, h, q, k: fg.tanh(s / cap) * cap)


@pytest.mark.parametrize(
    "specs", [(windowed(512, 30.0), windowed(513, 31.5)), (BAND, replace(BAND, mask=fg.window(8, 9)))]
)
def test_widths_and_captured_numbers_compile_nothing_anew(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch, specs: tuple[fg.AttentionSpec, ...]
) -> None:
    compiled: list[str] = []

    def compile_source(source: fg.render.KernelSource) -> fg.compile.Binary:
        compiled.append(source.name)
        return fg.compile.Binary(source.name, "sm_80", b"cubin", fg.compile.Resources(0, 0, 0, 0), 0.1, "")

    monkeypatch.setattr("flashgen.compile.compile_source", compile_source)
    monkeypatch.setattr("flashgen.emulator.build._build_kernel", pretend_to_build(compiled))
    # Nothing runs, so nothing has to be linked against.
    monkeypatch.setattr("flashgen.emulator.build._build_runtime", lambda *arguments: arguments[-1].touch())
    first, second = (fg.build(spec, arch="sm_80") for spec in specs)
    assert first is not second
    assert len(compiled) == len(first.source)
    for spec in specs:
        for source in sources.sources_of(plan(spec, None, "sm_80")).values():
            kernel_library(source.name, source.text)
    assert len(compiled) == 2 * len(first.source)
    # The comment at the top still tells the truth, as a fresh rendering does.
    assert second.source == {kernel.role: render(kernel).text for kernel in second.plan.kernels}
    assert spec_from_json(second.source["forward"].split("// spec     ")[1].split("\n")[0]) == specs[1]


def pretend_to_build(built: list[str]) -> Callable[..., None]:
    def build(tools: object, flags: object, libraries: object, name: str, source: str, output: Path) -> None:
        built.append(name)
        output.touch()

    return build


def test_what_is_part_of_the_code_is_compiled() -> None:
    open_right, narrow = fg.window(3, None), fg.window(3, 0)
    for masks in ((open_right, narrow), (fg.document(IDS) & fg.causal(), fg.document(IDS) & fg.window(None, 1))):
        first, second = (sources.sources_of(plan(replace(BAND, mask=mask), None, "sm_80"))["forward"] for mask in masks)
        assert first.code != second.code
