"""``build``: from a spec to a kernel that can be inspected, saved and, where a machine allows, called."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashgen as fg
from flashgen.compile import compile_source
from flashgen.errors import SerialisedError

ROOT = Path(__file__).parents[1]
SPEC = fg.AttentionSpec(32, dtype="fp16", mask=fg.causal())


def run(code: str, **environment: str) -> str:
    env = os.environ | {"PYTHONPATH": str(ROOT)} | environment
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_flashgen_brings_in_nothing_heavy() -> None:
    code = """
import sys, time
start = time.perf_counter()
import flashgen
print(time.perf_counter() - start)
heavy = ("numpy", "torch", "jinja2", "cuda", "ml_dtypes", "typer", "rich")
print([name for name in heavy if name in sys.modules])
"""
    figures = [run(code).splitlines() for _ in range(3)]
    assert {loaded for _, loaded in figures} == {"[]"}
    assert min(float(seconds) for seconds, _ in figures) < 0.2


def test_building_for_a_named_arch_needs_no_numpy_and_no_torch() -> None:
    code = """
import sys, flashgen as fg
fg.build(fg.AttentionSpec(32, dtype="fp16", mask=fg.causal()), arch="sm_80")
print([name for name in ("numpy", "torch") if name in sys.modules])
"""
    assert run(code) == "[]\n"


def test_every_public_name_exists() -> None:
    torch_names = {"torch", "attention", "serving", *(name for name in fg.__all__ if name.startswith("flash_attn_"))}
    for name in set(fg.__all__) - torch_names - {"emulator"}:
        assert getattr(fg, name) is not None
    assert set(fg.__all__) <= set(dir(fg))
    with pytest.raises(AttributeError, match="no_such_name"):
        fg.no_such_name  # noqa: B018


def test_a_kernel_for_a_named_arch_can_be_inspected_anywhere() -> None:
    kernel = fg.build(SPEC, arch="sm_80")
    roles = {k.role for k in kernel.plan.kernels}
    assert set(kernel.source) == set(kernel.report) == set(kernel.binaries) == roles
    assert all(f"{k.name}(" in kernel.source[k.role] for k in kernel.plan.kernels)
    assert all(0 < r.registers <= 255 for r in kernel.report.values())
    assert all(b.image.startswith(b"\x7fELF") for b in kernel.binaries.values())
    assert "head_dim 32, fp16, causal, sm_80" in repr(kernel)


def test_equal_arguments_give_the_same_kernel_in_microseconds() -> None:
    kernel = fg.build(SPEC, arch="sm_80")
    start = time.perf_counter()
    for _ in range(100):
        again = fg.build(fg.AttentionSpec(32, dtype="fp16", mask=fg.causal()), arch="80")
    assert (time.perf_counter() - start) / 100 < 1e-3
    assert again is kernel


def test_threads_that_build_together_get_one_kernel() -> None:
    spec = fg.AttentionSpec(48, dtype="fp16", direction="forward")
    with ThreadPoolExecutor(4) as pool:
        kernels = set(pool.map(lambda _: fg.build(spec, arch="sm_80"), range(8)))
    assert len(kernels) == 1


def test_other_arguments_give_other_kernels() -> None:
    forward = fg.AttentionSpec(32, dtype="fp16", direction="forward")
    kernels = [
        fg.build(forward, arch="sm_80"),
        fg.build(forward, arch="sm_86"),
        fg.build(forward, fg.Schedule(tile_q=64, tile_kv=32), arch="sm_80"),
    ]
    assert len({id(k) for k in kernels}) == 3
    assert (kernels[2].schedule.tile_q, kernels[2].schedule.tile_kv) == (64, 32)


def test_a_fresh_process_gets_the_same_source_without_rendering() -> None:
    code = """
import sys, flashgen as fg
kernel = fg.build(fg.AttentionSpec(32, dtype="fp16", mask=fg.causal()), arch="sm_80")
print("jinja2" in sys.modules)
sys.stdout.write("".join(kernel.source.values()))
"""
    expected = "".join(fg.build(SPEC, arch="sm_80").source.values())
    loaded, _, text = run(code).partition("\n")
    assert (loaded, text) == ("False", expected)


def test_an_override_takes_the_place_of_the_rendered_source(tmp_path: Path) -> None:
    kernel = fg.build(SPEC, arch="sm_80")
    edited = kernel.source["forward"] + "// edited\n"
    (tmp_path / f"{kernel.plan.kernel('forward').name}.cu").write_text(edited)
    code = """
import flashgen as fg
kernel = fg.build(fg.AttentionSpec(32, dtype="fp16", mask=fg.causal()), arch="sm_80")
print(kernel.source["forward"].endswith("// edited\\n"))
"""
    assert run(code, FLASHGEN_OVERRIDE_DIR=str(tmp_path)) == "True\n"


def test_saved_kernels_can_be_launched_from_any_language(tmp_path: Path) -> None:
    kernel = fg.build(SPEC, arch="sm_80")
    assert kernel.save(tmp_path / "deep" / "er") == tmp_path / "deep" / "er"
    manifest = json.loads((tmp_path / "deep" / "er" / "manifest.json").read_text())
    assert (manifest["schema"], manifest["arch"], manifest["spec"]["head_dim"]) == (1, "sm_80", 32)
    for entry in manifest["kernels"]:
        plan = kernel.plan.kernel(entry["role"])
        assert (tmp_path / "deep" / "er" / entry["source"]).read_text() == kernel.source[plan.role]
        assert (tmp_path / "deep" / "er" / entry["cubin"]).read_bytes() == kernel.binaries[plan.role].image
        assert [p["name"] for p in entry["params"]] == list(plan.params.names)
        assert entry["params_bytes"] == plan.params.bytes
        sizes = {"void*": 8, "int64": 8, "int32": 4, "float": 4}
        ends = [p["offset"] + sizes[p["kind"]] for p in entry["params"]]
        assert [p["offset"] for p in entry["params"][1:]] == ends[:-1]


@pytest.mark.parametrize(
    "call",
    [
        "fg.build(spec)",
        "fg.build(spec, arch='sm_80')(*arrays)",
        "fg.build(spec, arch='sm_80').warmup()",
    ],
)
def test_without_a_gpu_only_what_needs_one_is_refused(call: str) -> None:
    code = f"""
import flashgen as fg
spec = fg.AttentionSpec(32, dtype="fp16", mask=fg.causal())

class Array:
    __cuda_array_interface__ = dict(shape=(1, 4, 1, 32), typestr="<f2", data=(4096, False), version=3)

arrays = [Array()] * 3
try:
    {call}
except fg.NoGpuError as error:
    print(error)
"""
    assert "arch='sm_80'" in run(code, CUDA_VISIBLE_DEVICES="")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"spec": 64}, "spec=64 is not an AttentionSpec"),
        ({"schedule": 64}, "schedule=64 is not a Schedule"),
        ({"target": "cpu"}, "target='cpu' is unknown; use 'gpu' or 'emulator'"),
        ({"arch": "sm_12"}, "arch='sm_12' is not known"),
    ],
)
def test_bad_arguments_are_named(arguments: Any, words: str) -> None:
    given = {"spec": SPEC, "arch": "sm_80", **arguments}
    with pytest.raises(fg.FlashgenError) as error:
        fg.build(given.pop("spec"), **given)
    assert words in str(error.value)


def test_warmup_refuses_an_alignment_that_does_not_exist() -> None:
    with pytest.raises(fg.LaunchError, match="access_bytes=3"):
        fg.build(SPEC, target="emulator").warmup(access_bytes=3)


@pytest.mark.parametrize(("dtype", "head_dim", "head_dim_v"), [("fp16", 32, 32), ("bf16", 24, 40), ("fp32", 7, 5)])
def test_the_emulator_runs_both_passes_over_numpy_arrays(dtype: str, head_dim: int, head_dim_v: int) -> None:
    spec = fg.AttentionSpec(head_dim, head_dim_v=head_dim_v, dtype=dtype, mask=fg.causal())
    kernel = fg.build(spec, target="emulator")
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> Any:
        return rng.standard_normal(shape).astype(spec.element.numpy())

    q, k, v = normal(2, 19, 4, head_dim), normal(2, 23, 2, head_dim), normal(2, 23, 2, head_dim_v)
    do = normal(2, 19, 4, head_dim_v)
    o, lse = kernel(q, k, v, scale=0.3)
    results = (o, lse, *kernel.backward(do, q, k, v, o, lse, scale=0.3))
    exact = (*fg.oracle.forward(spec, q, k, v, scale=0.3), *fg.oracle.backward(spec, q, k, v, do, scale=0.3))
    limits = fg.oracle.bounds(spec, q, k, v, do, 0.3)
    for name, result, reference in zip(("o", "lse", "dq", "dk", "dv"), results, exact, strict=True):
        found = fg.oracle.check(result, reference, getattr(limits, name), exact_infinity=name == "lse")
        assert found.ok, (name, found)


def test_the_emulator_takes_views_of_any_stride_and_alignment() -> None:
    spec = fg.AttentionSpec(32, dtype="fp16")
    kernel = fg.build(spec, target="emulator")
    rng = np.random.default_rng(0)
    wide = rng.standard_normal((1, 3, 20, 37)).astype(np.float16)
    q = wide[:, :2, :, 3:35].transpose(0, 2, 1, 3)
    kv = np.broadcast_to(wide[:, :1, ::-1, 1:33].transpose(0, 2, 1, 3), (1, 20, 2, 32))
    o, lse = kernel(q, kv, kv)
    exact, exact_lse = fg.oracle.forward(spec, q, kv, kv)
    assert np.abs(o - exact).max() < 2e-3
    assert np.abs(lse - exact_lse).max() < 1e-5


def test_a_schedule_that_unaligned_views_cannot_have_gives_way_to_one_they_can() -> None:
    spec = fg.AttentionSpec(32, dtype="fp16", direction="forward")
    kernel = fg.build(spec, fg.Schedule(tile_q=64, stages=2), target="emulator")
    flat = np.random.default_rng(0).standard_normal(9 * 2 * 32 + 1).astype(np.float16)
    x = flat[1:].reshape(1, 9, 2, 32)
    o, _ = kernel(x, x, x)
    assert np.abs(o - fg.oracle.forward(spec, x, x, x)[0]).max() < 4e-3


def test_hoppers_kernels_run_on_the_emulator_and_what_they_cannot_take_runs_by_others() -> None:
    spec = fg.AttentionSpec(64, dtype="fp16", mask=fg.causal(), direction="forward")
    schedule = fg.Schedule(tile_kv=112, warps=fg.WarpPartition("specialized", consumers=3))
    kernel = fg.build(spec, schedule, arch="sm_90a", target="emulator")
    assert kernel.plan.kernel("forward").boxes
    flat = np.random.default_rng(0).standard_normal(200 * 3 * 64 + 8).astype(np.float16)
    # NumPy's own arrays may lie anywhere.
    first = -flat.ctypes.data % 16 // 2
    for offset in (first, first + 1):
        x = flat[offset : offset + 200 * 3 * 64].reshape(1, 200, 3, 64)
        for keys in (x[:, :90], x[:, ::-1], x[:, :0]):
            o, lse = kernel(x, keys, keys)
            exact, exact_lse = fg.oracle.forward(spec, x, keys, keys)
            np.testing.assert_allclose(o, exact, atol=4e-3)
            np.testing.assert_allclose(lse, exact_lse, atol=1e-5)


def test_tensor_maps_and_counters_of_saved_kernels_can_be_made_by_hand(tmp_path: Path) -> None:
    spec = fg.AttentionSpec(64, dtype="fp16", direction="forward")
    kernel = fg.build(spec, arch="sm_90a", target="emulator")
    kernel.save(tmp_path)
    (entry,) = json.loads((tmp_path / "manifest.json").read_text())["kernels"]
    plan = kernel.plan.kernel("forward")
    params = {p["name"]: p for p in entry["params"]}
    assert entry["grid"]["persistent"]
    assert entry["grid"]["overlaps_predecessor"]
    assert entry["grid"]["most_blocks_per_multiprocessor"] == plan.min_blocks
    assert entry["counter"] == {"param": "counter", "bytes": 8, "initially": 0, "left_behind": 0}
    assert [(m["tensor"], m["element"], m["swizzle_bytes"]) for m in entry["tensor_maps"]] == [
        (tensor, "fp16", 128) for tensor in "qkvo"
    ]
    for box, described in zip(plan.boxes, entry["tensor_maps"], strict=True):
        assert described["box"] == [box.columns, box.rows, 1, 1]
        assert params[described["param"]]["kind"] == "map"
        assert params[described["param"]]["offset"] % 64 == 0
    assert params["o"]["offset"] == 4 * 128
    assert entry["params_bytes"] % 64 == 0


def short_of_registers(source: Any) -> Any:
    """Compiles for all GPUs only, as if the products of Hopper's kernel found no registers."""
    if source.plan.boxes:
        raise SerialisedError(f"{source.name}: the products wait for each other")
    return compile_source(source)


def test_what_hoppers_products_find_no_registers_for_runs_by_the_kernels_for_all_gpus(monkeypatch: Any) -> None:
    monkeypatch.setattr("flashgen.compile.compile_source", short_of_registers)
    mask = fg.Mask.of(lambda b, h, q, k: q % 37 == k % 41)
    backward = fg.BackwardSchedule(tile_q=64)
    kernel = fg.build(fg.AttentionSpec(64, mask=mask), fg.Schedule(backward=backward), arch="sm_90a")
    assert kernel.plan.kernel("forward").algorithm == "FlashAttention-2"
    assert kernel.schedule.backward.tile_q == 64
    assert kernel.binaries["forward"].image
    with pytest.raises(SerialisedError):
        fg.build(fg.AttentionSpec(64, mask=mask), fg.Schedule(algorithm="fa3"), arch="sm_90a")


def test_fewer_keys_for_a_tile_come_before_another_algorithm(monkeypatch: Any) -> None:
    def short_of_registers_for_wide_tiles(source: Any) -> Any:
        keys = source.plan.constant("tile_kv") if source.plan.role == "forward" else 0
        return (short_of_registers if int(keys) > 64 else compile_source)(source)

    monkeypatch.setattr("flashgen.compile.compile_source", short_of_registers_for_wide_tiles)
    mask = fg.Mask.of(lambda b, h, q, k: q % 41 == k % 43)
    kernel = fg.build(fg.AttentionSpec(64, mask=mask, direction="forward"), arch="sm_90a").plan.kernel("forward")
    assert (kernel.algorithm, kernel.constant("tile_kv")) == ("FlashAttention-3", 64)


def test_equal_specs_with_other_captured_tensors_keep_their_own() -> None:
    q, k, v = (np.random.default_rng(i).standard_normal((1, 20, 2, 16)).astype(np.float16) for i in range(3))
    results = []
    for slopes in (np.zeros(2, np.float32), np.full(2, 3, np.float32)):
        spec = fg.AttentionSpec(16, dtype="fp16", score=fg.alibi(slopes))
        kernel = fg.build(spec, target="emulator")
        assert kernel.spec.tensors["slopes"] is slopes
        out, _ = kernel(q, k, v)
        np.testing.assert_allclose(out, fg.oracle.forward(spec, q, k, v)[0], atol=1e-2)
        results.append(out)
    assert not np.array_equal(*results)


def test_the_emulator_reports_what_the_kernels_take_of_a_gpu() -> None:
    on_gpu, emulated = fg.build(SPEC, arch="sm_80"), fg.build(SPEC, arch="sm_80", target="emulator")
    assert emulated.report == on_gpu.report
    assert emulated.report["forward"].registers > 0
    assert emulated.binaries == {}


@pytest.mark.parametrize("value", [3, 1, 0, None, "yes"])
def test_flags_of_calls_are_bools(value: Any) -> None:
    kernel = fg.build(SPEC, target="emulator")
    x = np.zeros((1, 4, 1, 32), np.float16)
    out, lse = kernel(x, x, x)
    with pytest.raises(fg.ArgumentError, match=r"captured_gradients=.* is not a bool; use True or False"):
        kernel.backward(x, x, x, x, out, lse, captured_gradients=value)
    with pytest.raises(fg.ArgumentError, match=r"captured_gradients=.* is not a bool; use True or False"):
        kernel.warmup(captured_gradients=value)


@pytest.mark.parametrize(
    ("target", "device", "words"),
    [
        ("emulator", 7, "device=7 does not go with the emulator, which has none; leave it out"),
        ("emulator", -1, "device=-1 does not go with the emulator"),
        ("gpu", -1, "device=-1 is no CUDA ordinal; use 0 for the first GPU"),
        ("gpu", True, "device=True is no CUDA ordinal"),
        ("gpu", "cuda:0", "device='cuda:0' is no CUDA ordinal"),
    ],
)
def test_warmup_refuses_a_device_that_cannot_exist(target: Any, device: Any, words: str) -> None:
    with pytest.raises(fg.ArgumentError, match=words):
        fg.build(SPEC, arch="sm_80", target=target).warmup(device)


@pytest.mark.gpu
def test_warmup_refuses_a_gpu_that_is_not_there() -> None:
    with pytest.raises(fg.LaunchError, match="cuda:77 does not exist; this process sees"):
        fg.build(SPEC).warmup(77)
