"""``flashgen check`` on kernels that are right, and on some with a bug planted through the override directory."""

from __future__ import annotations

import io
import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashgen.cli.gpu.arrays import Gpu
from flashgen.cli.output import talk
from flashgen.launch.variant import Variant
from flashgen.plan import plan
from flashgen.plan.model.plans import AttentionPlan
from flashgen.render import KernelSource, render
from flashgen.spec import AttentionSpec, causal

SPEC = AttentionSpec(16, dtype="fp16", mask=causal(), direction="forward")
OPTIONS = ("--head-dim", "16", "--dtype", "fp16", "--causal", "--forward-only", "--arch", "sm_80")
COMMAND = "flashgen check --head-dim 16 --dtype fp16 --causal --forward-only --arch sm_80"
Plant = Callable[[str, str, str], None]
Replace = Callable[[str, str], None]


@pytest.fixture
def plant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plant:
    """Overrides the forward kernel by one with ``new`` in the place of the first ``old`` after ``anchor``."""

    def plant_(anchor: str, old: str, new: str) -> None:
        source = render(plan(SPEC, None, "sm_80").kernel("forward"))
        place = source.text.index(old, source.text.index(anchor))
        text = source.text[:place] + new + source.text[place + len(old) :]
        (tmp_path / f"{source.name}.cu").write_text(text, encoding="utf-8")
        monkeypatch.setenv("FLASHGEN_OVERRIDE_DIR", str(tmp_path))

    return plant_


@pytest.fixture
def replace_in_all(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Replaces ``old`` by ``new`` in every kernel that has it, whatever the alignment of the arrays it is for."""

    def replace_(old: str, new: str) -> None:
        def sources_of(plan: AttentionPlan, meanwhile: Any = None) -> dict[Any, KernelSource]:
            return {kernel.role: KernelSource(kernel, render(kernel).text.replace(old, new)) for kernel in plan.kernels}

        monkeypatch.setattr("flashgen.pipeline.sources_of", sources_of)

    return replace_


def command_of(said: str) -> list[str]:
    """The words of the command that a failure names."""
    line = said[said.index("To see it again:") :].splitlines()[1].strip()
    assert line.startswith(COMMAND + " --case")
    return shlex.split(line)


def test_a_kernel_without_bugs_passes_with_a_line_for_each_output(flashgen: Any) -> None:
    result = flashgen("check", *OPTIONS, "--cases", "6", "--schedules", "2")
    assert result.code == 0, result.err
    assert result.out.startswith("ok: sm_80: 6 cases, 18 runs (6 sequential, 6 random, 6 priority), worst ratio ")
    _, heads, *rows = (re.split("  +", line) for line in result.out.splitlines())
    assert heads == ["output", "arch", "largest error", "bound", "ratio", "worst ratio", "slope", heads[-1]]
    assert [row[:2] for row in rows] == [["o", "sm_80"], ["lse", "sm_80"]]
    for row in rows:
        assert 0 <= float(row[2]) <= float(row[3])
        assert 0 <= float(row[4]) <= float(row[5]) <= 1
        assert re.match(r"[01]\.\d{5}, noise \d", row[6])
        assert row[7].startswith("Sq=")
    assert "checking sm_80 on the emulator" in result.err


def test_json_is_one_object_on_stdout(flashgen: Any) -> None:
    result = flashgen("check", *OPTIONS, "--cases", "3", "--race", "--seed", "5", "--json")
    value = json.loads(result.out)
    assert result.code == 0, result.err
    assert list(value) == [
        "schema",
        "spec",
        "archs",
        "seed",
        "race",
        "cases",
        "runs",
        "worst",
        "outputs",
        "ok",
        "interrupted",
        "failure",
    ]
    assert (value["schema"], value["archs"], value["seed"], value["race"]) == (2, ["sm_80"], 5, True)
    assert (value["cases"], value["runs"]) == (3, {"sequential": 3})
    assert list(value["worst"]) == ["output", "arch", "error", "bound", "ratio", "case"]
    assert value["worst"]["ratio"] == max(output["worst_ratio"] for output in value["outputs"]) <= 1
    assert [(output["output"], output["arch"]) for output in value["outputs"]] == [("o", "sm_80"), ("lse", "sm_80")]
    assert (value["ok"], value["interrupted"], value["failure"]) == (True, False, None)


def test_a_race_ends_with_the_smallest_case_as_a_command_that_repeats_it(flashgen: Any, plant: Plant) -> None:
    plant("Line 7:", "block_sync();", "")
    result = flashgen("check", *OPTIONS, "--race", "--seed", "1")
    assert result.code == 1
    assert result.out.startswith("FAILED: sm_80: ")
    assert "race: a ldmatrix of" in result.err
    assert "race=True" in result.err
    assert "forward_d16_fp16_causal_sm80.cu:" in result.err
    program, *words = command_of(result.err)
    assert program == "flashgen"
    assert words[-1] == "Sq=1 Sk=1 race"
    again = flashgen(*words)
    assert again.code == 1
    assert again.err[again.err.index("error: ") :] == result.err[result.err.index("error: ") :]


def test_a_failure_is_an_object_too(flashgen: Any, plant: Plant) -> None:
    plant("Line 7:", "block_sync();", "")
    result = flashgen("check", *OPTIONS, "--race", "--seed", "1", "--json")
    assert result.code == 1
    failure = json.loads(result.out)["failure"]
    assert list(failure) == ["arch", "kind", "text", "case", "command"]
    assert (failure["arch"], failure["kind"], failure["case"]) == ("sm_80", "race", "Sq=1 Sk=1 race")
    assert failure["command"] == f"{COMMAND} --case 'Sq=1 Sk=1 race'"
    assert failure["text"] in result.err


def test_a_wrong_result_is_found_without_a_finding_and_shrinks(flashgen: Any, plant: Plant) -> None:
    plant("bool allows(", "k - q <= upper", "k - q <= upper + 1")
    result = flashgen("check", *OPTIONS, "--seed", "1")
    assert result.code == 1
    assert "inaccurate on sm_80 on the emulator" in result.err
    assert "FAILED: o of drawn" in result.err
    words = command_of(result.err)
    assert words[-1] == "Sq=2 Sk=1"  # the first query attends to nothing, but for the bug
    assert flashgen(*words[1:]).code == 1


NORMALIZER = "return softmax.normalizer(m, h)"


def test_a_systematic_error_that_every_bound_allows_is_found(flashgen: Any, replace_in_all: Replace) -> None:
    replace_in_all(NORMALIZER, f"{NORMALIZER} * 1.002f")
    result = flashgen("check", *OPTIONS)
    assert result.code == 1
    assert result.out.startswith("FAILED: sm_80: 100 cases, 100 runs (100 sequential), worst ratio 0.")
    assert "systematic on sm_80 on the emulator" in result.err
    assert "FAILED: o has a systematic error: the slope of the results on the oracle is 1.00" in result.err
    words = command_of(result.err)
    assert words[-4:] == ["--cases", "100", "--seed", "0"]
    again = flashgen(*words[1:])
    assert again.code == 1
    assert again.err[again.err.index("error: ") :] == result.err[result.err.index("error: ") :]


def test_a_systematic_error_of_one_pass_is_an_object_too(flashgen: Any, replace_in_all: Replace) -> None:
    scale = "dk_scale[2] = {p.scale * kept, p.scale * kept}"
    replace_in_all(scale, scale.replace("p.scale", "1.03f * p.scale"))
    result = flashgen("check", "--head-dim", "64", "--causal", "--arch", "sm_90a", "--cases", "30", "--json")
    assert result.code == 1
    value = json.loads(result.out)
    failure = value["failure"]
    assert (value["ok"], failure["arch"], failure["kind"]) == (False, "sm_90a", "systematic")
    assert failure["text"].startswith("FAILED: dk has a systematic error")
    assert failure["command"].endswith(" --arch sm_90a --cases 30 --seed 0")
    slopes = {output["output"]: output["slope"] for output in value["outputs"]}
    # Arrays that are not aligned are for other kernels, which are right.
    assert 1.015 < slopes.pop("dk") < 1.031
    assert all(slope == pytest.approx(1, abs=1e-3) for slope in slopes.values())


def test_a_case_that_shows_a_systematic_error_by_itself_is_named(flashgen: Any, replace_in_all: Replace) -> None:
    replace_in_all(NORMALIZER, f"{NORMALIZER} * 1.01f")
    options = ("--head-dim", "64", "--causal", "--forward-only", "--arch", "sm_80")
    result = flashgen("check", *options, "--json")
    failure = json.loads(result.out)["failure"]
    assert failure["kind"] == "systematic"
    command = "flashgen check --head-dim 64 --dtype bf16 --causal --forward-only --arch sm_80"
    assert failure["command"] == f"{command} --cases 100 --seed 0"
    assert f"One case shows it by itself:\n  {command} --case '{failure['case']}'\n" in result.err
    alone = flashgen("check", *options, "--case", failure["case"])
    assert alone.code == 1
    assert "FAILED: o has a systematic error" in alone.err
    assert alone.err.endswith(f"To see it again:\n  {command} --case '{failure['case']}'\n")


def test_a_stray_store_is_found_in_the_first_order(flashgen: Any, plant: Plant) -> None:
    plant("for_each_row(softmax,", "if (first_q + warp_row + row < p.len_q)", "")
    result = flashgen("check", *OPTIONS, "--seed", "1")
    assert result.code == 1
    assert "global memory out of bounds: a store to address" in result.err
    assert "past the end of 'lse'" in result.err
    assert re.search(r"\n  by block 0, warp \d+, lane \d+ \(thread \d+\)\n", result.err)


def test_the_case_alone_is_run_and_not_made_smaller(flashgen: Any, plant: Plant) -> None:
    plant("Line 7:", "block_sync();", "")
    result = flashgen("check", *OPTIONS, "--case", "Sq=40 Sk=50 schedule=random:3 race")
    assert result.code == 1
    assert result.out.startswith("FAILED: sm_80: 1 cases, 1 runs (1 random; every access watched)")
    assert command_of(result.err)[-1] == "Sq=40 Sk=50 schedule=random:3 race"
    assert "schedule='random', seed=3, race=True" in result.err


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (("--case", "Sq=1"), "names no Sk"),
        (("--case", "Sq=1 Sk=1", "--race", "--cases", "3"), "--cases, --race cannot go with --case"),
        (("--cases", "0"), "--cases=0 is out of range"),
        (("--schedules", "-1"), "--schedules=-1 is out of range"),
        (("--seed", "-1"), "--seed=-1 is out of range"),
        (("--target", "gpu", "--race"), "--race and --schedules are for the emulator"),
        (("--target", "moon"), "moon"),
        (("--head-dim-v", "0"), "--head-dim-v 0"),
    ],
)
def test_what_cannot_be_asked_for_ends_with_2(flashgen: Any, options: tuple[str, ...], complaint: str) -> None:
    result = flashgen("check", *OPTIONS, *options)
    assert (result.code, result.out) == (2, "")
    assert complaint in result.err


def test_a_target_that_is_not_there_ends_with_3(flashgen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashgen.cli.commands.check.find_gpus", lambda: ())
    result = flashgen("check", *OPTIONS, "--target", "gpu")
    assert (result.code, result.out) == (3, "")
    assert "no GPU here runs sm_80" in result.err


def test_without_a_compiler_it_says_what_to_install(flashgen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHGEN_CXX", "no-such-compiler")
    result = flashgen("check", *OPTIONS)
    assert (result.code, result.out) == (4, "")
    assert "no-such-compiler" in result.err


def interrupt_after(monkeypatch: pytest.MonkeyPatch, runs: int) -> None:
    from flashgen.cli.commands import checking

    real, left = checking.run_case, [runs]

    def run_case(*arguments: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(checking, "run_case", run_case)


def test_ctrl_c_ends_with_a_summary(flashgen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt_after(monkeypatch, 4)
    result = flashgen("check", *OPTIONS)
    assert result.code == 130
    assert result.out.startswith("interrupted: sm_80: 4 cases, 4 runs (4 sequential)")
    assert "Traceback" not in result.err


def test_ctrl_c_while_a_case_is_made_smaller_still_reports_it(
    flashgen: Any, plant: Plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant("Line 7:", "block_sync();", "")
    interrupt_after(monkeypatch, 3)
    result = flashgen("check", *OPTIONS, "--race", "--seed", "1")
    assert result.code == 1
    assert "the case may not be the smallest" in result.err
    assert flashgen(*command_of(result.err)[1:]).code == 130


def test_a_kernel_that_spins_is_a_livelock(flashgen: Any, plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHGEN_SPIN_LIMIT", "0.1")
    plant("Line 7:", "block_sync();", "for (volatile int i = 0;; i = 1) {}")
    result = flashgen("check", *OPTIONS, "--seed", "1")
    assert result.code == 1
    assert "livelock on sm_80 on the emulator" in result.err
    # The source is edited, so its own line is named.
    assert re.search(r"^  at \S*forward_d16_fp16_causal_sm80\.cu:\d+$", result.err, flags=re.M)
    assert command_of(result.err)[-1] == "Sq=1 Sk=1"


def test_a_gpu_gets_the_arrays_as_they_are_laid_out(flashgen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a GPU made of nothing: what is asked of it, and that its results are judged."""
    from flashgen import oracle

    monkeypatch.setattr("flashgen.cli.commands.check.find_gpus", lambda: (Gpu(0, "Pretended", 80, 2**36),))
    monkeypatch.setattr("flashgen.pipeline.variant", lambda plan, target: Variant(plan, {"target": target}))
    seen: list[tuple[int, ...]] = []

    def runner(kernel: Any, gpu: Gpu) -> Any:
        assert kernel._variant.kernels == {"target": "gpu"}

        def run(q: Any, k: Any, v: Any, do: Any, scale: float) -> Any:
            seen.append(k.strides)
            o, lse = oracle.forward(SPEC, q, k, v, scale=scale)
            return o, np.zeros_like(lse)

        return run

    monkeypatch.setattr("flashgen.cli.commands.checking.runner", runner)
    result = flashgen("check", *OPTIONS, "--target", "gpu", "--case", "Sq=3 Sk=4 k=reversed")
    assert result.code == 1
    assert seen == [(128, -32, 32, 2)]
    assert "FAILED: lse of drawn" in result.err
    assert "--target gpu --case 'Sq=3 Sk=4 k=reversed'" in result.err


def test_a_terminal_sees_a_bar_and_stdout_nothing_of_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stderr", terminal)
    with talk.progress("checking", 7) as update:
        update(3, "checking sm_80")
    assert "checking sm_80" in terminal.getvalue()
    assert "3/7" in terminal.getvalue()
    assert capsys.readouterr().out == ""


@pytest.mark.gpu
def test_drawn_cases_pass_on_the_gpu(flashgen: Any) -> None:
    result = flashgen("check", "--head-dim", "64", "--causal", "--target", "gpu", "--cases", "40")
    assert result.code == 0, result.err
    assert " 40 cases, 40 runs" in result.out
