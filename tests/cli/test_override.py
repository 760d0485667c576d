"""FLASHGEN_OVERRIDE_DIR: a directory that replaces no kernel is an error of a command, and a warning in Python."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import flashgen as fg
from flashgen.common.recent import Recent
from flashgen.plan import plan
from flashgen.plan.fallbacks import fallbacks
from flashgen.render import render_afresh
from flashgen.render.override import overridden, unused_overrides

SPEC = fg.AttentionSpec(64, mask=fg.causal())
OPTIONS = ("--head-dim", "64", "--causal")


@pytest.fixture
def overrides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory, empty."""
    directory = tmp_path / "edited"
    directory.mkdir()
    monkeypatch.setenv("FLASHGEN_OVERRIDE_DIR", str(directory))
    monkeypatch.setattr("flashgen.api._kernels", Recent(2))
    return directory


def put(directory: Path, arch: str) -> None:
    """Puts a commented forward kernel for ``arch`` into the directory."""
    source = render_afresh(plan(SPEC, None, arch).kernel("forward"))
    (directory / f"{source.name}.cu").write_text(source.text + "// edited\n")


@pytest.mark.parametrize("command", [("build", "--no-verify"), ("check",), ("show",)])
def test_a_command_that_uses_none_of_the_files_says_which_names_it_looked_for(
    flashgen: Any, machine: list[Any], overrides: Path, command: tuple[str, ...]
) -> None:
    result = flashgen(*command, *OPTIONS, "--arch", "sm_80")
    assert (result.code, result.out) == (2, "")
    assert f"FLASHGEN_OVERRIDE_DIR='{overrides}' replaces no kernel" in result.err
    assert "looked for forward_d64_causal_sm80.cu, backward_prepare_d64_causal_sm80.cu, " in result.err
    assert "the directory holds no .cu file" in result.err
    put(overrides, "sm_86")
    result = flashgen(*command, *OPTIONS, "--arch", "sm_80")
    assert result.code == 2
    assert "the directory holds forward_d64_causal_sm86.cu; name a file after one of these kernels" in result.err


def test_a_command_for_several_architectures_needs_one_file(flashgen: Any, machine: list[Any], overrides: Path) -> None:
    put(overrides, "sm_80")
    result = flashgen("build", "--no-verify", *OPTIONS, "--arch", "sm_80", "--arch", "sm_86")
    assert result.code == 0
    assert "forward_d64_causal_sm80: source taken from" in result.err


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_kernels_for_arrays_that_are_aligned_to_less_have_files_of_their_own(overrides: Path, arch: str) -> None:
    spec = fg.AttentionSpec(64, varlen=arch == "sm_80")
    aligned, narrow = plan(spec, None, arch).kernels, plan(spec, None, arch, access_bytes=8).kernels
    for kernel in aligned:
        (overrides / f"{kernel.name}.cu").write_text("// edited\n")
    assert [overridden(kernel) for kernel in narrow] == [None] * len(narrow)
    by_role = {kernel.role: kernel.name for kernel in narrow}
    assert by_role["main"] == f"backward_main_d64{'_varlen' if spec.varlen else ''}_align8_{arch.replace('_', '')}"
    (overrides / f"{by_role['main']}.cu").write_text("// of its own\n")
    assert [kernel.role for kernel in narrow if overridden(kernel) is not None] == ["main"]


def test_an_override_of_a_fallback_is_looked_for_and_replaces_no_other_kernel(overrides: Path) -> None:
    attention = plan(SPEC, None, "sm_90a")
    *_, last = fallbacks(attention)
    (overrides / f"{last.kernel('forward').name}.cu").write_text("// edited\n")
    assert unused_overrides([attention]) is not None
    assert unused_overrides([attention], fallbacks(attention)) is None
    assert overridden(attention.kernel("forward")) is None
    assert overridden(last.kernel("forward")) is not None


def test_files_beside_the_one_that_is_used_are_left_alone(flashgen: Any, machine: list[Any], overrides: Path) -> None:
    put(overrides, "sm_80")
    put(overrides, "sm_86")
    result = flashgen("show", *OPTIONS, "--arch", "sm_80", "--what", "source")
    assert result.code == 0
    assert result.out.endswith("// edited\n")
    assert flashgen("show", *OPTIONS, "--arch", "sm_80", "--what", "source", "--kernel", "main").code == 0


@pytest.mark.parametrize("target", ["gpu", "emulator"])
def test_build_in_python_warns(
    overrides: Path, machine: list[Any], target: Any, recwarn: pytest.WarningsRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.warns(UserWarning, match=r"looked for forward_d64_causal_sm80\.cu"):
        fg.build(SPEC, arch="sm_80", target=target)
    recwarn.clear()
    put(overrides, "sm_80")
    monkeypatch.setattr("flashgen.api._kernels", Recent(2))
    assert fg.build(SPEC, arch="sm_80", target=target).source["forward"].endswith("// edited\n")
    assert not recwarn.list
