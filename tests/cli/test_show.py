from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flashgen.cli.gpu.arrays import Gpu

CAPTURED = (
    *("--score", "s + bias[h, q, k] * f[k]", "--captured", "bias=float32[3]", "--captured", "f=float32[1]"),
    *("--mask", "ids[b, q] == ids[b, k]", "--captured", "ids=int32[2]"),
)
ON_SM80 = ("--head-dim", "64", "--causal", "--arch", "sm_80")


def test_the_plans_of_all_kernels_are_what_is_shown_first(flashgen: Any, machine: list[Any]) -> None:
    result = flashgen("show", *ON_SM80)
    assert result.code == 0
    assert result.err == ""
    for name in ("forward", "backward_prepare", "backward_main", "backward_finish"):
        assert f"{name}_d64_causal_sm80:" in result.out
    assert "tile_q" in result.out


def test_one_kernels_plan_on_request(flashgen: Any, machine: list[Any]) -> None:
    result = flashgen("show", *ON_SM80, "--kernel", "finish")
    assert result.out.startswith("backward_finish_d64_causal_sm80:")
    assert "forward_d64_causal_sm80:" not in result.out


def test_the_kernels_of_standard_attention_say_which_step_they_take(flashgen: Any, machine: list[Any]) -> None:
    result = flashgen("show", *ON_SM80, "--algorithm", "standard")
    text = " ".join(result.out.split())
    for step in (
        "first: S = scale * Q K^T of all pairs",
        "second: P = softmax(S)",
        "last: O = P V",
        "dK = scale * dS^T Q",
    ):
        assert step in text
    assert "one block for every query row of every query head" in text
    assert "--algorithm standard --arch sm_80" in text


def test_the_source_is_the_rendered_text_and_nothing_else(flashgen: Any, machine: list[Any]) -> None:
    from flashgen.plan import plan
    from flashgen.render import render
    from flashgen.spec import AttentionSpec, causal

    result = flashgen("show", *ON_SM80, "--what", "source", "--kernel", "main")
    expected = render(plan(AttentionSpec(64, mask=causal()), None, "sm_80").kernel("main")).text
    assert result.out == (expected if expected.endswith("\n") else expected + "\n")


def test_ptx_is_for_the_arch_that_is_named(flashgen: Any) -> None:
    arguments = ("--head-dim", "16", "--forward-only", "--arch", "sm_86", "--what", "ptx")
    result = flashgen("show", *arguments)
    assert ".target sm_86" in result.out
    assert ".visible .entry forward_d16_sm86" in result.out


def test_sass_comes_from_the_disassembler(flashgen: Any, machine: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashgen.compile.find_disassembler", lambda: Path("nvdisasm"))
    monkeypatch.setattr("flashgen.compile.disassemble", lambda image: f"sass of {image.decode()}")
    result = flashgen("show", *ON_SM80, "--what", "sass")
    assert result.out == "sass of cubin of forward_d64_causal_sm80\n"


def test_without_a_disassembler_the_remedy_is_named(
    flashgen: Any, machine: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flashgen.compile.disassemble", lambda image: None)
    result = flashgen("show", *ON_SM80, "--what", "sass")
    assert (result.code, result.out) == (5, "")
    assert "pip install nvidia-cuda-nvdisasm" in result.err
    monkeypatch.setattr("flashgen.compile.find_disassembler", lambda: None)
    result = flashgen("show", "--head-dim", "96", "--arch", "sm_80", "--what", "sass")
    assert (result.code, result.out) == (5, "")
    assert "pip install nvidia-cuda-nvdisasm" in result.err
    assert "compiling" not in result.err


def test_a_kernel_that_is_not_part_of_the_plan_is_a_usage_error(flashgen: Any, machine: list[Any]) -> None:
    result = flashgen("show", *ON_SM80, "--forward-only", "--kernel", "main")
    assert result.code == 2
    assert "its kernels are forward (forward_d64_causal_sm80)" in result.err


def test_several_archs_are_a_usage_error(flashgen: Any, machine: list[Any]) -> None:
    result = flashgen("show", *ON_SM80, "--arch", "sm_90")
    assert result.code == 2
    assert "one --arch" in result.err


def test_no_arch_means_the_gpu_or_else_sm_80(flashgen: Any, machine: list[Any]) -> None:
    shown = ("show", "--head-dim", "64", "--kernel", "forward")
    assert flashgen(*shown).out.startswith("forward_d64_sm80:")
    machine.append(Gpu(0, "A GPU", 120, 2**34))
    assert flashgen(*shown).out.startswith("forward_d64_sm120:")


@pytest.mark.parametrize(
    "options",
    [
        ("--head-dim", "64", "--causal", "--deterministic"),
        ("--head-dim", "64", "--cache", "paged", "--forward-only"),
        ("--head-dim", "64", *CAPTURED),
    ],
    ids=["deterministic", "cache", "captured"],
)
def test_every_kernel_that_build_prints_can_be_shown(
    flashgen: Any, machine: list[Any], options: tuple[str, ...]
) -> None:
    built = json.loads(flashgen("build", *options, "--no-verify", "--json").out)["kernels"]
    printed = flashgen("build", *options, "--arch", "sm_80", "--no-verify").out
    assert {kernel["arch"] for kernel in built} == {"sm_80", "sm_90a"}
    for kernel in built:
        shown = flashgen("show", *options, "--kernel", kernel["name"])
        assert shown.code == 0, shown.err
        assert shown.out.startswith(f"{kernel['name']}:")
    table = printed[printed.index("registers") : printed.index("files")].splitlines()[1:]
    roles = [line.split()[0] for line in table if line.strip()]
    assert len(roles) == len(built) - sum(kernel["arch"] == "sm_90a" for kernel in built)
    for role, kernel in zip(roles, built, strict=False):
        assert flashgen("show", *options, "--kernel", role).out.startswith(f"{kernel['name']}:")
    assert flashgen("show", *options, "--what", "source", "--kernel", f"{built[0]['name']}.cu").code == 0


ON_SM90A = ("--head-dim", "128", "--causal", "--arch", "sm_90a", "--forward-only")


@pytest.mark.parametrize("what", ["plan", "source"])
def test_a_fallback_of_the_plan_can_be_shown(flashgen: Any, machine: list[Any], what: str) -> None:
    from flashgen.pipeline import candidates
    from flashgen.plan import plan
    from flashgen.render import render
    from flashgen.render.summary import summary
    from flashgen.spec import AttentionSpec, causal

    spec = AttentionSpec(128, mask=causal(), direction="forward")
    plans = [each.kernel("forward") for each in candidates(plan(spec, None, "sm_90a"))]
    assert [each.algorithm for each in plans] == ["FlashAttention-3", "FlashAttention-3", "FlashAttention-2"]
    for number, kernel in enumerate(plans):
        result = flashgen("show", *ON_SM90A, "--what", what, "--fallback", str(number))
        expected = "\n".join(summary(kernel)) if what == "plan" else render(kernel).text
        assert (result.out.rstrip("\n"), result.err) == (expected.rstrip("\n"), "")
    first = flashgen("show", *ON_SM90A, "--what", what)
    assert first.out == flashgen("show", *ON_SM90A, "--what", what, "--fallback", "0").out
    assert "--fallback 1 to 2 show them" in first.err


@pytest.mark.parametrize(("options", "number"), [(ON_SM90A, "3"), (ON_SM90A, "-1"), (ON_SM80, "1")])
def test_a_fallback_that_does_not_exist_is_a_usage_error(
    flashgen: Any, machine: list[Any], options: tuple[str, ...], number: str
) -> None:
    result = flashgen("show", *options, "--fallback", number)
    assert (result.code, result.out) == (2, "")
    assert f"--fallback {number} is not there" in result.err


def test_machine_code_is_of_the_kernel_that_build_would_take(
    flashgen: Any, machine: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from flashgen.cli.commands import show
    from flashgen.errors import SpillError

    def sass(kernel: Any) -> str:
        if kernel.algorithm == "FlashAttention-3":
            raise SpillError("64 bytes per thread leave the registers for local memory")
        return f"sass of {kernel.algorithm}"

    monkeypatch.setattr("flashgen.compile.find_disassembler", lambda: Path("nvdisasm"))
    monkeypatch.setattr(show, "_sass", sass)
    result = flashgen("show", *ON_SM90A, "--what", "sass")
    assert result.out == "sass of FlashAttention-2\n"
    assert result.err.count("has too few registers here") == 2
    assert flashgen("show", *ON_SM90A, "--what", "sass", "--fallback", "1").code == 4
