from __future__ import annotations

from pathlib import Path

import pytest

from flashgen.errors import FlashgenError
from flashgen.plan import plan
from flashgen.render import golden
from flashgen.render.golden import GOLDEN, Golden, golden_sources, main, write
from flashgen.spec import AttentionSpec, Schedule, causal

ROWS = (Golden(AttentionSpec(128, mask=causal()), "sm_80", ("forward", "prepare")),)


def test_files_are_named_after_the_kernels_they_hold() -> None:
    files = golden_sources(ROWS)
    assert next(iter(files)) == "forward_d128_causal_sm80.cu"
    assert len(files) == 2
    for name, text in files.items():
        assert Path(name).stem in text


def test_the_table_holds_few_specs_all_different() -> None:
    files = golden_sources(GOLDEN)
    assert 10 <= len(GOLDEN) <= 27
    assert len(files) == sum(len(row.roles) for row in GOLDEN)
    assert {f"forward_{name}.cu" for name in ("d128_causal_sm80", "d128_causal_sm90a", "d64_sm90a")} <= set(files)


def test_the_kernels_for_hopper_show_every_part_of_their_template() -> None:
    rows = [row for row in GOLDEN if row.arch == "sm_90a"]
    kernels = [plan(row.spec, row.schedule, row.arch).forward for row in rows]
    kernels = [kernel for kernel in kernels if kernel.algorithm == "FlashAttention-3"]
    assert {"block_sparse" in kernel.switches for kernel in kernels} == {False, True}
    assert {kernel.score is None for kernel in kernels} == {False, True}
    assert {kernel.constant("has_upper") for kernel in kernels} == {False, True}
    assert {kernel.constant("consumers") for kernel in kernels} == {2, 3}
    assert {"o" in kernel.smem.names for kernel in kernels} == {False, True}


def test_check_passes_after_writing_and_fails_on_every_kind_of_staleness(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(golden, "GOLDEN", ROWS)
    check = ["--check", "--directory", str(tmp_path)]
    assert main(check) == 1
    assert main(["--directory", str(tmp_path)]) == 0
    assert main(check) == 0
    one, two = sorted(tmp_path.glob("*.cu"))
    one.write_text(one.read_text() + "// edited\n")
    two.unlink()
    (tmp_path / "left_over.cu").write_text("")
    capsys.readouterr()
    assert main(check) == 1
    out, err = capsys.readouterr()
    assert "-// edited" in out
    assert f"{two.name} is missing" in out
    assert "left_over.cu is no longer generated" in out
    assert "3 stale" in err
    assert sorted(write(tmp_path, golden_sources(ROWS))) == sorted([one.name, two.name, "left_over.cu"])
    assert main(check) == 0


def test_two_kernels_of_one_name_are_refused() -> None:
    rows = (*ROWS, Golden(ROWS[0].spec, "sm_80", ("forward",), Schedule(tile_q=64)))

    def careless(spec: AttentionSpec, schedule: Schedule | None, arch: str) -> object:
        attention = plan(spec, schedule, arch)
        from dataclasses import replace

        return replace(attention, kernels=tuple(replace(k, name=f"{k.role}_same") for k in attention.kernels))

    with pytest.raises(FlashgenError, match=r"both called forward_same\.cu"):
        golden_sources(rows, careless)  # type: ignore[arg-type]
