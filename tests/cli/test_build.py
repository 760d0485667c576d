from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from flashgen.cli.gpu.arrays import Gpu
from flashgen.cli.gpu.verification import Verification
from flashgen.cli.output.outputs import OutputOnArch
from flashgen.errors import CompileError, SerialisedError
from flashgen.oracle import Check, Slope
from flashgen.verify import Case, CaseResult, OutputReport


def output(name: str, error: float, slope: float) -> OutputOnArch:
    case = Case("one query", 1, 1)
    result = CaseResult(case, name, Check(error, 5e-3, error <= 5e-3))
    return OutputOnArch(
        "sm_80", OutputReport(name, result, result, Slope(slope, 2e-5, 1.0, 64, 1)), "one query", "one query"
    )


GOOD = Verification("emulator", 22, True, (output("o", 1e-3, 1.00001), output("dq", 2e-3, 0.99998)))
BAD = Verification("emulator", 22, False, (output("dq", 2e-2, 1.0),), ("sm_80: FAILED: dq of one query: error 2e-2",))
KERNEL_KEYS = [
    "name",
    "pass",
    "arch",
    "algorithm",
    "source",
    "cubin",
    "registers",
    "spill_bytes",
    "smem_bytes",
    "compile_seconds",
    "cached",
]


def verified(monkeypatch: pytest.MonkeyPatch, outcome: Verification | None) -> None:
    monkeypatch.setattr("flashgen.cli.gpu.verification.verify_all", lambda plans, gpus: outcome)


def test_json_is_one_object_of_the_documented_shape_and_all_of_stdout(
    flashgen: Any, machine: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    verified(monkeypatch, GOOD)
    result = flashgen("build", "--head-dim", "128", "--causal", "--json")
    assert result.code == 0
    value = json.loads(result.out)
    assert list(value) == ["schema", "spec", "kernels", "verify"]
    assert value["schema"] == 2
    assert value["spec"]["head_dim"] == 128
    assert value["spec"]["mask"] == "causal"
    assert value["verify"] == {
        "target": "emulator",
        "cases": 22,
        "ok": True,
        "worst": {"output": "dq", "arch": "sm_80", "error": 2e-3, "bound": 5e-3, "ratio": 0.4, "case": "one query"},
        "outputs": [
            {
                "output": name,
                "arch": "sm_80",
                "max_error": error,
                "bound": 5e-3,
                "ratio": error / 5e-3,
                "case": "one query",
                "worst_ratio": error / 5e-3,
                "slope": slope,
                "slope_noise": 2e-5,
            }
            for name, error, slope in (("o", 1e-3, 1.00001), ("dq", 2e-3, 0.99998))
        ],
    }
    for kernel in value["kernels"]:
        assert list(kernel) == KERNEL_KEYS
        assert kernel["pass"] in ("forward", "backward")
        assert isinstance(kernel["registers"], int)
        assert kernel["compile_seconds"] == 0.25
        assert kernel["cached"] is False
    assert [k["name"] for k in value["kernels"] if k["pass"] == "forward"] == [
        "forward_d128_causal_sm80",
        "forward_d128_causal_sm90a",
    ]
    assert "compiling forward_d128_causal_sm80" in result.err


def test_source_and_cubin_lie_where_the_report_says(flashgen: Any, machine: list[Any]) -> None:
    result = flashgen("build", "--head-dim", "64", "--arch", "sm_80", "--no-verify", "--json")
    kernels = json.loads(result.out)["kernels"]
    for kernel in kernels:
        assert f"{kernel['name']}(" in Path(kernel["source"]).read_text()
        assert Path(kernel["cubin"]).read_bytes() == b"cubin of " + kernel["name"].encode()


def test_out_receives_source_cubin_and_manifest(
    flashgen: Any, machine: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verified(monkeypatch, GOOD)
    out = tmp_path / "new" / "kernels"
    arguments = ("--head-dim", "64", "--forward-only", "--arch", "sm_86", "--out", str(out), "--json")
    result = flashgen("build", *arguments)
    names = {"forward_d64_sm86.cu", "forward_d64_sm86.cubin", "manifest.json"}
    assert {path.name for path in out.iterdir()} == names
    assert json.loads((out / "manifest.json").read_text()) == json.loads(result.out)


def test_an_out_that_cannot_be_written_is_a_usage_error(flashgen: Any, machine: list[Any], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    out = str(tmp_path / "file" / "below")
    result = flashgen("build", "--head-dim", "64", "--forward-only", "--no-verify", "--out", out)
    assert result.code == 2
    assert f"--out {out} cannot be written" in result.err
    assert result.out == ""
    assert "compiling" not in result.err


@pytest.mark.parametrize("out", ["", " ", "\0"])
def test_an_out_that_names_no_directory_is_refused_before_compiling(
    flashgen: Any, machine: list[Any], out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = flashgen("build", "--head-dim", "64", "--forward-only", "--no-verify", "--out", out)
    assert (result.code, result.out) == (2, "")
    assert "--out" in result.err
    assert "compiling" not in result.err
    assert [path.name for path in tmp_path.iterdir()] in ([], ["cache"])


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs /proc/self, which nobody can write")
def test_an_out_that_exists_and_takes_no_files_is_refused_before_compiling(flashgen: Any, machine: list[Any]) -> None:
    result = flashgen("build", "--head-dim", "64", "--forward-only", "--no-verify", "--out", "/proc/self")
    assert (result.code, result.out) == (2, "")
    assert "--out /proc/self cannot be written" in result.err
    assert "compiling" not in result.err


def test_a_cache_that_cannot_be_written_costs_the_files_but_not_the_build(
    flashgen: Any, machine: list[Any], own_cache: Path
) -> None:
    own_cache.mkdir(mode=0o700)
    (own_cache / "builds").write_text("in the way")
    result = flashgen("build", "--head-dim", "64", "--forward-only", "--arch", "sm_80", "--no-verify", "--json")
    assert result.code == 0
    assert json.loads(result.out)["kernels"][0]["source"] is None
    assert "source and cubin were not written" in result.err


def test_the_second_build_finds_every_kernel_in_the_cache_and_says_nothing_of_compiling(
    flashgen: Any, machine: list[Any]
) -> None:
    arguments = ("build", "--head-dim", "64", "--arch", "sm_80", "--no-verify", "--json")
    flashgen(*arguments)
    again = flashgen(*arguments)
    assert all(kernel["cached"] for kernel in json.loads(again.out)["kernels"])
    assert "compiling" not in again.err


def test_the_gpu_that_is_found_is_what_is_built_for(flashgen: Any, machine: list[Any]) -> None:
    machine.append(Gpu(0, "A GPU", 89, 2**34))
    result = flashgen("build", "--head-dim", "64", "--forward-only", "--no-verify", "--json")
    assert [kernel["arch"] for kernel in json.loads(result.out)["kernels"]] == ["sm_89"]


def test_named_archs_are_what_is_built_for_whatever_the_gpu(flashgen: Any, machine: list[Any]) -> None:
    machine.append(Gpu(0, "A GPU", 89, 2**34))
    arguments = ("--head-dim", "64", "--dtype", "fp16", "--forward-only", "--no-verify", "--json")
    result = flashgen("build", *arguments, "--arch", "sm_75", "--arch", "sm_120")
    assert [kernel["arch"] for kernel in json.loads(result.out)["kernels"]] == ["sm_75", "sm_120"]


def test_the_schedule_asked_for_is_the_schedule_built(flashgen: Any, machine: list[Any]) -> None:
    arguments = ("--head-dim", "64", "--forward-only", "--arch", "sm_80", "--no-verify")
    schedule = ("--tile-q", "64", "--tile-kv", "32", "--stages", "3", "--warps", "2")
    result = flashgen("build", *arguments, *schedule, "--warp-partition", "split-k")
    assert re.search(r"forward +64x32 +3 +2 split_k", result.out)


def test_warps_of_several_kinds_are_shown_with_their_registers(flashgen: Any, machine: list[Any]) -> None:
    words = ("--head-dim", "128", "--forward-only", "--arch", "sm_90a", "--no-verify")
    result = flashgen("build", *words, "--consumers", "2", "--registers", "40,232", "--tile-kv", "64")
    assert re.search(r"forward +128x64 +2 +12 specialized +40, 232 ", result.out)
    assert re.search(r"\n +FlashAttention-3\n", result.out)


def test_kernels_of_standard_attention_have_no_warps_by_query_rows(flashgen: Any, machine: list[Any]) -> None:
    result = flashgen("build", "--head-dim", "64", "--algorithm", "standard", "--arch", "sm_80", "--no-verify")
    rows = {line.split()[0]: line.split() for line in result.out.splitlines() if line.strip()}
    assert rows["scores"][1:4] == ["128x128", "4", "8"]
    assert rows["softmax"][1:5] == ["1", "row", "-", "4"]
    assert rows["forward"][1:4] == ["128x32", "4", "8"]
    assert "split_q" not in result.out


def test_both_passes_tell_their_algorithm(flashgen: Any, machine: list[Any]) -> None:
    result = flashgen("build", "--head-dim", "128", "--arch", "sm_90a", "--no-verify")
    assert re.search(r"\n +FlashAttention-3\n +backward: FlashAttention-3\n", result.out)
    smaller = ("--backward-tile-q", "32")
    result = flashgen("build", "--head-dim", "128", *smaller, "--arch", "sm_90a", "--no-verify")
    assert "backward: FlashAttention-2, not FlashAttention-3: a schedule for the backward pass applies" in " ".join(
        result.out.split()
    )


def test_the_reason_is_given_where_hopper_runs_the_older_algorithm(flashgen: Any, machine: list[Any]) -> None:
    words = ("--head-dim", "128", "--forward-only", "--arch", "sm_90a", "--no-verify", "--algorithm", "fa2")
    result = flashgen("build", *words)
    assert "FlashAttention-2, not FlashAttention-3: its schedule says algorithm='fa2'" in result.out
    (kernel,) = json.loads(flashgen("build", *words, "--json").out)["kernels"]
    assert kernel["algorithm"] == "FlashAttention-2"


def test_an_algorithm_that_cannot_be_is_a_usage_error(flashgen: Any, machine: list[Any]) -> None:
    result = flashgen("build", "--head-dim", "84", "--arch", "sm_90a", "--algorithm", "fa3", "--no-verify")
    assert (result.code, result.out) == (2, "")
    assert "--algorithm fa3 cannot be planned for head_dim 84" in result.err


def test_forward_only_leaves_the_backward_kernels_out(flashgen: Any, machine: list[Any]) -> None:
    result = flashgen("build", "--head-dim", "64", "--forward-only", "--no-verify", "--json")
    assert {kernel["pass"] for kernel in json.loads(result.out)["kernels"]} == {"forward"}


def test_deterministic_builds_the_kernel_without_atomics(flashgen: Any, machine: list[Any]) -> None:
    arguments = ("--head-dim", "64", "--arch", "sm_80", "--no-verify", "--json")
    names = [kernel["name"] for kernel in json.loads(flashgen("build", *arguments, "--deterministic").out)["kernels"]]
    assert any("query" in name for name in names)
    assert not any("finish" in name for name in names)


def test_a_person_reads_spec_plan_resources_files_and_error(
    flashgen: Any, machine: list[Any], own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verified(monkeypatch, GOOD)
    result = flashgen("build", "--head-dim", "128", "--causal", "--arch", "sm_80")
    assert "head_dim 128, bf16, causal" in result.out
    header = next(line for line in result.out.splitlines() if "registers" in line)
    assert header.split() == [
        "kernel",
        "tile",
        "stages",
        "warps",
        "registers",
        "spills",
        "shared",
        "occupancy",
        "compile",
    ]
    forward = next(line for line in result.out.splitlines() if line.split()[0] == "forward")
    assert re.search(r"\d+x\d+ +\d +\d split_q +40 +0 B +\d+\.\d KiB +\d+%, \d+/SM \(.+\) +0\.25 s", forward)
    assert str(own_cache / "builds") in result.out
    assert "forward_d128_causal_sm80.{cu,cubin}" in result.out
    assert "ok on the emulator: 22 cases, worst ratio 0.40: dq of one query on sm_80, error 2.00e-03 of" in result.out
    heads, *rows = result.out[result.out.index("output  arch") :].splitlines()
    assert re.split("  +", heads)[2:] == [
        "largest error",
        "bound",
        "ratio",
        "worst ratio",
        "slope",
        "case of the largest error",
    ]
    assert re.split("  +", rows[0].strip()) == [
        "o",
        "sm_80",
        "1.00e-03",
        "5.00e-03",
        "0.20",
        "0.20",
        "1.00001, noise 2e-05",
        "one query",
    ]
    assert len(rows) == 2


def test_a_failed_verification_is_reported_and_ends_with_1(
    flashgen: Any, machine: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    verified(monkeypatch, BAD)
    result = flashgen("build", "--head-dim", "64", "--forward-only", "--json")
    assert result.code == 1
    assert json.loads(result.out)["verify"]["ok"] is False
    assert "dq of one query" in result.err


def test_without_anything_to_verify_on_verify_is_null(
    flashgen: Any, machine: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flashgen.cli.gpu.verification.missing_emulator", lambda: "no C++ compiler was found")
    result = flashgen("build", "--head-dim", "64", "--forward-only", "--json")
    assert result.code == 0
    assert json.loads(result.out)["verify"] is None
    assert "NOT VERIFIED" in result.err
    assert "no C++ compiler was found" in result.err


def test_a_source_that_does_not_compile_ends_with_4(
    flashgen: Any, machine: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(source: Any) -> None:
        raise CompileError("forward.cu.j2:12 is not C++", "expected a ;")

    monkeypatch.setattr("flashgen.compile.compile_source", refuse)
    result = flashgen("build", "--head-dim", "64")
    assert (result.code, result.out) == (4, "")
    assert "forward.cu.j2:12" in result.err
    assert "Traceback" not in result.err


def test_what_no_kernel_fits_ends_with_2(flashgen: Any, machine: list[Any]) -> None:
    result = flashgen("build", "--head-dim", "64", "--dtype", "bf16", "--arch", "sm_75")
    assert (result.code, result.out) == (2, "")
    assert "bf16" in result.err


def test_the_real_compiler_and_the_emulator_agree_with_the_oracle(
    flashgen: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("flashgen.cli.commands.build.find_gpus", lambda: ())
    arguments = ("--head-dim", "16", "--dtype", "fp16", "--forward-only", "--arch", "sm_80", "--json")
    result = flashgen("build", *arguments, "--out", str(tmp_path))
    assert result.code == 0, result.err
    value = json.loads(result.out)
    assert (tmp_path / "forward_d16_fp16_sm80.cubin").read_bytes().startswith(b"\x7fELF")
    assert value["verify"]["ok"] is True
    assert 0 < value["verify"]["worst"]["ratio"] <= 1
    assert [output["output"] for output in value["verify"]["outputs"]] == ["o", "lse"]
    for output in value["verify"]["outputs"]:
        assert 0 < output["max_error"] <= output["bound"]
        assert 0.999 < output["slope"] < 1.001


@pytest.mark.gpu
def test_a_build_is_verified_on_the_gpu(flashgen: Any) -> None:
    result = flashgen("build", "--head-dim", "64", "--causal", "--json")
    assert result.code == 0, result.err
    value = json.loads(result.out)
    assert value["verify"]["target"] == "gpu"
    assert value["verify"]["ok"] is True


def test_files_of_old_builds_make_room_for_new_ones(
    flashgen: Any, machine: list[Any], own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flashgen.cli.commands.builder.BUILDS_KEPT", 2)
    for age, name in ((300, "oldest"), (200, "older"), (100, "old")):
        path = own_cache / "builds" / name
        path.mkdir(parents=True)
        os.utime(path, (path.stat().st_mtime - age,) * 2)
    result = flashgen("build", "--head-dim", "64", "--forward-only", "--no-verify", "--json")
    written = Path(json.loads(result.out)["kernels"][0]["source"]).parent
    assert {path.name for path in (own_cache / "builds").iterdir()} == {"old", written.name}


def test_what_hoppers_products_find_no_registers_for_is_built_for_all_gpus_and_said(
    flashgen: Any, machine: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    import flashgen.compile as compiling

    compiled = compiling.compile_source

    def short_of_registers(source: Any) -> Any:
        if source.plan.boxes:
            raise SerialisedError(f"{source.name}: the products wait for each other")
        return compiled(source)

    checked: list[Any] = []

    def verify_all(plans: Any, gpus: Any) -> Verification:
        checked.extend(plans)
        return GOOD

    monkeypatch.setattr("flashgen.compile.compile_source", short_of_registers)
    monkeypatch.setattr("flashgen.cli.gpu.verification.verify_all", verify_all)
    result = flashgen("build", "--head-dim", "64", "--arch", "sm_90a", "--forward-only", "--json")
    assert result.code == 0
    assert [plan.kernel("forward").algorithm for plan in checked] == ["FlashAttention-2"]
    assert [kernel["algorithm"] for kernel in json.loads(result.out)["kernels"]] == ["FlashAttention-2"]
    # With the tiles of the plan, and with the fewest keys that are worth planning.
    tried = [line for line in result.err.splitlines() if "too few registers" in line]
    assert [re.search(r"FlashAttention-3 with tiles of (\d+) keys", line)[1] for line in tried] == ["128", "64"]


def test_a_build_with_verification_plans_once_and_compiles_aloud_by_the_path_of_the_library(
    flashgen: Any, machine: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from flashgen import plan, verify

    planned: list[str] = []
    plan_forward = plan.plan_forward

    def counted(spec: Any, schedule: Any, arch: Any, access_bytes: int) -> Any:
        planned.append(arch.name)
        return plan_forward(spec, schedule, arch, access_bytes)

    monkeypatch.setattr(plan, "plan_forward", counted)
    monkeypatch.setattr(verify, "verify", lambda run, spec, **options: verify.Verification("emulator", 1))
    result = flashgen("build", "--head-dim", "16", "--dtype", "fp16", "--arch", "sm_80", "--arch", "sm_75")
    assert result.code == 0, result.err
    assert planned == ["sm_80", "sm_75"]
    said = [line for line in result.err.splitlines() if line.startswith("compiling ")]
    names = ["forward_d16_fp16", *(f"backward_{role}_d16_fp16" for role in ("prepare", "main", "finish"))]
    assert said == [f"compiling {name}_{arch} ..." for arch in ("sm80", "sm75") for name in names]


def test_what_this_build_compiles_is_not_reported_as_cached_whichever_thread_compiles_it(
    flashgen: Any, machine: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 1}, raising=False)
    arguments = ("build", "--head-dim", "16", "--dtype", "fp16", "--arch", "sm_80", "--no-verify", "--json")
    for cached in (False, True):
        kernels = json.loads(flashgen(*arguments).out)["kernels"]
        assert [kernel["cached"] for kernel in kernels] == [cached] * 4
