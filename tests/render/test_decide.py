"""Branches of headers that the printed config decides."""

from __future__ import annotations

import pytest

from flashgen.plan import plan
from flashgen.render import Origin, render_afresh
from flashgen.render.amalgamation.decide import decided, known_values
from flashgen.spec import AttentionSpec, causal

CONFIG = ["    .turing = false,", "    .access_bytes = 16,  // of rows", "    .stages = 2,"]


def lines_of(header: str, config: list[str] = CONFIG, file: str = "flashgen/a.cuh") -> list[str]:
    """What stays of a header above a config."""
    lines = [(text, Origin(file, number)) for number, text in enumerate(header.split("\n"), start=1)]
    lines += [(text, Origin("kernels/a.cu.j2", number)) for number, text in enumerate(config, start=1)]
    out = [text for text, _ in decided(lines, known_values(lines))]
    assert out[len(out) - len(config) :] == config
    return out[: len(out) - len(config)]


@pytest.mark.parametrize(
    ("header", "left"),
    [
        ("if constexpr (turing) a();", ""),
        ("if constexpr (!turing) a();", "a();"),
        ("if constexpr (access_bytes == 16) a();", "a();"),
        ("if constexpr (access_bytes == 8) a();", ""),
        ("if constexpr (turing) {\n  a();\n} else {\n  b();\n}", "b();"),
        ("if constexpr (!turing) {\n  a();\n} else {\n  b();\n}\nc();", "a();\nc();"),
        ("  if constexpr (turing) {\n    a();\n  }\n  c();", "  c();"),
        (
            "if constexpr (access_bytes == 4) {\n  a();\n} else if constexpr (access_bytes == 16) {\n  b();\n}"
            " else {\n  c();\n}",
            "b();",
        ),
        (
            "if constexpr (turing) {\n  a();\n} else if constexpr (sizeof(T) == 4) {\n  b();\n} else {\n  c();\n}",
            "if constexpr (sizeof(T) == 4) {\n  b();\n} else {\n  c();\n}",
        ),
        ("if constexpr (!turing) {\n  if constexpr (turing) {\n    a();\n  } else {\n    b();\n  }\n}", "b();"),
        ("void f(int x) {\n  if constexpr (turing) {\n    a();\n  }\n}", "void f(int x) {}"),
        (
            "FLASHGEN_DEVICE i32 f() {\n  if constexpr (turing) {\n    a();\n  } else {\n    return 2;\n  }\n}",
            "FLASHGEN_DEVICE i32 f() { return 2; }",
        ),
        (
            f"FLASHGEN_DEVICE i32 f() {{\n  if constexpr (!turing) {{\n    {'x' * 90}();\n  }}\n}}",
            f"FLASHGEN_DEVICE i32 f() {{\n  {'x' * 90}();\n}}",
        ),
        (
            "if constexpr (!turing) {\n#pragma unroll\n  for (;;) {\n    a();\n  }\n}",
            "#pragma unroll\nfor (;;) {\n  a();\n}",
        ),
    ],
)
def test_a_branch_that_the_config_decides_stays_alone_or_goes(header: str, left: str) -> None:
    assert "\n".join(lines_of(header)) == left


@pytest.mark.parametrize(
    "header",
    [
        "if constexpr (stages == 2) a();",
        "if constexpr (other) a();",
        "if constexpr (turing && other) a();",
        "if constexpr (Mask::turing) a();",
        "if constexpr (access_bytes) a();",
        "if constexpr (turing == 1) a();",
        "if constexpr (other) {\n  a();\n} else if constexpr (turing) {\n  b();\n} else {\n  c();\n}",
        "if (turing) a();",
    ],
)
def test_other_conditions_are_the_compilers(header: str) -> None:
    assert lines_of(header) == header.split("\n")


def test_nothing_is_decided_in_the_text_of_a_kernel_or_where_two_values_are_printed() -> None:
    header = "if constexpr (turing) a();"
    assert lines_of(header, file="kernels/a.cu.j2") == [header]
    assert lines_of(header, [*CONFIG, "  static constexpr bool turing = true;"]) == [header]


def decided_by_policies(header: str) -> str:
    """What stays of a header above a config with two consumers."""
    texts = [*header.split("\n"), "    .consumers = 2,", "    .last = true,"]
    lines = [(text, Origin("flashgen/a.cuh", number)) for number, text in enumerate(texts)]
    return "\n".join(text for text, _ in decided(lines, known_values(lines))[:-2])


@pytest.mark.parametrize(
    ("constants", "statement", "left"),
    [
        (["sends = false"], "if constexpr (Blocks::sends) a();", ""),
        (["sends = true"], "if constexpr (tile.sends) a();", "a();"),
        (["sends = false", "sends = Blocks::sends"], "if constexpr (Shared::sends) a();", ""),
        (["sends = true", "sends = true"], "if constexpr (Blocks::sends) a();", "a();"),
        (["kPairs = cfg.consumers == 2"], "if constexpr (kPairs) a();", "a();"),
        (["kPairs = cfg.consumers > 2"], "if constexpr (kPairs) a();", ""),
        (["sends = false", "kAny = Blocks::sends || !Tile::sends"], "if constexpr (!kAny) a();", ""),
        (["sends = other", "kAny = Blocks::sends || cfg.last"], "if constexpr (kAny) a();", "a();"),
        (["sends = false", "kAny = Blocks::sends || cfg.consumers == 3"], "if constexpr (kAny) a();", ""),
        ([], "if constexpr (!cfg.last) a();", ""),
    ],
)
def test_constants_of_the_only_policies_left_decide(constants: list[str], statement: str, left: str) -> None:
    declared = [f"  static constexpr bool {constant};" for constant in constants]
    assert decided_by_policies("\n".join([*declared, statement])) == "\n".join([*declared, *([left] if left else [])])


@pytest.mark.parametrize(
    ("constants", "statement"),
    [
        (["sends = false", "sends = true"], "if constexpr (Blocks::sends) a();"),
        (["sends = false", "sends = other"], "if constexpr (Blocks::sends) a();"),
        # A template parameter may have the same name.
        (["sends = false"], "if constexpr (sends) a();"),
        (["kAny = a && b"], "if constexpr (kAny) a();"),
        (["sends = false"], "if constexpr (Blocks::sends == 0) a();"),
        ([], "if constexpr (consumers == 2) a();"),
        ([], "if constexpr (other.consumers == 2) a();"),
    ],
)
def test_what_policies_leave_open_is_the_compilers(constants: list[str], statement: str) -> None:
    header = "\n".join([*(f"  static constexpr bool {constant};" for constant in constants), statement])
    assert decided_by_policies(header) == header


def test_nothing_stays_behind_a_return_that_is_decided() -> None:
    body = "  if constexpr (cfg.last) return false;\n  return a() &&\n         b();"
    assert decided_by_policies(f"bool f() {{\n{body}\n}}\nc();") == "bool f() {\n  return false;\n}\nc();"
    assert decided_by_policies(f"bool f() {{\n{body.replace('cfg', '!cfg')}\n}}") == (
        "bool f() {\n  return a() &&\n         b();\n}"
    )


@pytest.mark.parametrize(
    ("arch", "instruction", "other"), [("sm_75", "m16n8k8", "m16n8k16"), ("sm_80", "m16n8k16", "m16n8k8.")]
)
def test_a_kernel_has_no_text_for_other_architectures(arch: str, instruction: str, other: str) -> None:
    spec = AttentionSpec(64, dtype="fp16", mask=causal(), direction="forward")
    text = render_afresh(plan(spec, None, arch).kernel("forward")).code
    assert instruction in text
    assert other not in text
    assert ("cp.async" in text) == (arch == "sm_80")
