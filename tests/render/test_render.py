from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from flashgen.errors import CompileError
from flashgen.plan import plan
from flashgen.plan.model.plans import Constant, KernelPlan, Param, ParamTable, Role, SmemMap, SmemRegion
from flashgen.render import render, render_afresh, templates_dir
from flashgen.render.summary import summary
from flashgen.spec import AttentionSpec, Schedule, causal, full

Write = Callable[..., None]
MACROS = '{% import "kernels/common.j2" as common %}\n'


def body(plan: KernelPlan) -> str:
    return render_afresh(plan).text


def test_the_config_is_one_designated_initializer(templates: Write, tiny: KernelPlan) -> None:
    templates(MACROS + "{{ common.config(plan) }}\n")
    members = (Constant("tile_q", 128, "rows"), Constant("stages", 2, "slots"), Constant("causal", True))
    assert body(replace(tiny, config_type="Config", config=members)) == (
        "constexpr Config kConfig{\n"
        "    .tile_q = 128,  // rows\n"
        "    .stages = 2,    // slots\n"
        "    .causal = true,\n"
        "};\n"
    )


def test_the_parameter_struct_is_the_table_and_checks_its_own_size(templates: Write, tiny: KernelPlan) -> None:
    templates(MACROS + "{{ common.params(plan) }}\n")
    table = ParamTable(
        (
            Param("q", "void*", "const element_t*", "queries"),
            Param("len_q", "int32", "i32"),
            Param("s", "float", "float"),
        )
    )
    assert body(replace(tiny, params=table)) == (
        "struct Params {\n"
        "  const element_t* q;  // queries\n"
        "  i32 len_q;\n"
        "  float s;\n"
        "};\n"
        'static_assert(sizeof(Params) == 16, "the launcher packs Params into 16 bytes");\n'
    )


def test_parameters_of_one_tensor_share_a_line(templates: Write, tiny: KernelPlan) -> None:
    templates(MACROS + "{{ common.params(plan) }}\n")
    maps = (Param("q_map", "map", "TensorMap", "for TMA"), Param("k_map", "map", "TensorMap"))
    pointers = (Param("q_one", "void*", "float*"), Param("q_two", "void*", "float*"))
    strides = (
        Param("q_row", "int64", "i64", "in elements"),
        Param("q_head", "int64", "i64"),
        Param("k_row", "int64", "i64"),
        Param("k_head", "int64", "i64", "its own note"),
    )
    text = body(replace(tiny, params=ParamTable((*maps, *pointers, *strides))))
    assert text.splitlines()[1:-2] == [
        "  TensorMap q_map, k_map;  // for TMA",
        "  float* q_one;",
        "  float* q_two;",
        "  i64 q_row, q_head;  // in elements",
        "  i64 k_row;",
        "  i64 k_head;  // its own note",
    ]


def test_comments_are_in_one_column_where_there_is_room_and_else_above(templates: Write, tiny: KernelPlan) -> None:
    templates(MACROS + "{{ common.params(plan) }}\n")
    notes = {"a": "short", "long_name_of_a_number": "note", "b": "x" * 96, "c": "x" * 100}
    table = ParamTable(tuple(Param(name, "int32", "i32", note) for name, note in notes.items()))
    assert body(replace(tiny, params=table)).splitlines()[1:-2] == [
        "  i32 a;                      // short",
        "  i32 long_name_of_a_number;  // note",
        f"  i32 b;  // {'x' * 96}",
        f"  // {'x' * 100}",
        "  i32 c;",
    ]


def test_the_shared_memory_map_becomes_offsets(templates: Write, tiny: KernelPlan) -> None:
    templates(MACROS + "{{ common.smem(plan) }}\n")
    smem = SmemMap((SmemRegion("q", 0, 1024, "queries"), SmemRegion("kv_ring", 1024, 4096)))
    assert body(replace(tiny, smem=smem)) == (
        "namespace smem {\n"
        "constexpr u32 kQ = 0;  // queries\n"
        "constexpr u32 kKvRing = 1024;\n"
        "constexpr u32 kBytes = 5120;\n"
        "}  // namespace smem\n"
    )


def test_notes_too_long_for_the_line_go_above_it(templates: Write, tiny: KernelPlan) -> None:
    templates(MACROS + "{{ common.config(plan) }}\n")
    note = "word " * 25 + "end"
    text = body(replace(tiny, config=(Constant("tile_q", 128, note),)))
    assert f"    // {note}\n    .tile_q = 128,\n" in text


def test_the_header_names_spec_command_plan_and_reasons() -> None:
    attention = plan(AttentionSpec(128, mask=causal()), None, "sm_80")
    forward = replace(attention.kernel("forward"), reasons=("because " * 30 + "so", "and because"))
    header = render_afresh(forward).text.split("\n\n")[0]
    assert all(line.startswith("//") and len(line) <= 125 for line in header.split("\n"))
    assert '"head_dim":128' in header
    assert "flashgen build --head-dim 128 --dtype bf16 --causal --arch sm_80" in header
    assert f"{forward.threads} threads" in header
    assert f"{forward.smem.bytes} bytes" in header
    assert "because " * 30 + "so and because" in " ".join(header.replace("//", " ").split())


def test_the_header_tells_what_warpgroups_do_and_which_tiles_blocks_take() -> None:
    def header(spec: AttentionSpec, schedule: Schedule) -> str:
        return " ".join(" ".join(summary(plan(spec, schedule, "sm_90a").kernel("forward"))).split())

    two = header(AttentionSpec(128, mask=causal(), direction="forward"), Schedule(registers=(40, 232)))
    roles = "roles of 1 warpgroup one warp brings tiles and one chooses which ones"
    assert f"{roles} (40 registers a thread); 2 compute, 64 queries each (232)" in two
    assert "grid no more blocks than run at once, 1 on each multiprocessor; they take one tile after another" in two
    assert "head and batch entry; they start while the grid before them ends, and wait for it" in two
    three = header(AttentionSpec(64, mask=full(), direction="forward"), Schedule(registers=(32, 160)))
    assert f"{roles} (32 registers a thread); 3 compute, 64 queries each" in three


def test_the_header_names_the_warps_that_transpose_or_load_values() -> None:
    def roles(role: Role, spec: AttentionSpec) -> str:
        return " ".join(" ".join(summary(plan(spec, None, "sm_90a").kernel(role))).split())

    one = "roles of 1 warpgroup one warp brings tiles"
    eight_bits = roles("forward", AttentionSpec(128, dtype="e4m3", direction="forward"))
    assert f"{one}, one chooses which ones, and two transpose V (" in eight_bits
    paged = roles("prefill", AttentionSpec(128, direction="forward", cache="paged"))
    assert f"{one} of Q and K, one brings those of V, and one chooses which ones (" in paged
    contiguous = roles("prefill", AttentionSpec(128, direction="forward", cache="contiguous"))
    assert f"{one} and one chooses which ones (" in contiguous


def test_the_header_says_why_hopper_runs_the_older_algorithm() -> None:
    spec = AttentionSpec(84, direction="forward")
    assert any(
        "not FlashAttention-3: TMA needs rows" in line for line in summary(plan(spec, None, "sm_90a").kernels[0])
    )
    assert not any("FlashAttention-3" in line for line in summary(plan(spec, None, "sm_80").kernels[0]))


def test_a_source_is_named_after_its_plan_and_digested() -> None:
    source = render(plan(AttentionSpec(64, direction="forward"), None, "sm_80").kernel("forward"))
    assert source.name == source.plan.name
    assert source.digest == hashlib.sha256(source.text.encode()).hexdigest()


def test_the_same_plan_gives_the_same_text_in_every_process(tmp_path: Path) -> None:
    script = (
        "from flashgen.plan import plan; from flashgen.render import render_afresh\n"
        "from flashgen.spec import AttentionSpec\n"
        "p = plan(AttentionSpec(64), None, 'sm_86')\n"
        "print(*[render_afresh(k).digest for k in p.kernels])"
    )
    root = str(templates_dir().parent)
    digests = set()
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": root}
        digests.add(subprocess.check_output([sys.executable, "-c", script], env=environment, text=True))
    assert len(digests) == 1


def test_an_override_replaces_the_rendered_text(
    tiny: KernelPlan, templates: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    templates("int rendered;\n")
    monkeypatch.setenv("FLASHGEN_OVERRIDE_DIR", str(tmp_path))
    before = render(tiny)
    (tmp_path / "tiny.cu").write_text("int edited;\n")
    after = render(tiny)
    assert "int rendered;" in before.text
    assert after.text == "int edited;\n"
    assert after.digest != before.digest
    assert render_afresh(tiny) == before


def test_an_unreadable_override_is_an_error(tiny: KernelPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHGEN_OVERRIDE_DIR", str(tmp_path))
    (tmp_path / "tiny.cu").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(CompileError, match=r"tiny\.cu cannot be read"):
        render(tiny)


def test_an_empty_override_is_an_error(tiny: KernelPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHGEN_OVERRIDE_DIR", str(tmp_path))
    (tmp_path / "tiny.cu").write_text("\n")
    with pytest.raises(CompileError, match=r"tiny\.cu is empty; unset FLASHGEN_OVERRIDE_DIR"):
        render(tiny)
