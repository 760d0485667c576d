"""What an emitted source leaves out: declarations that its kernel does not reach."""

from __future__ import annotations

import pytest

from flashgen.plan import plan
from flashgen.render import Origin, render_afresh
from flashgen.render.amalgamation.prune import prune
from flashgen.spec import AttentionSpec, causal

KERNEL = 'extern "C" __global__ void kernel() { used(); }'


def pruned(*texts: str) -> list[str]:
    """The lines of a header and of a kernel behind it."""
    lines = "\n".join(texts).split("\n")
    return [text for text, _ in prune([(line, Origin("flashgen/a.cuh", n)) for n, line in enumerate(lines, start=1)])]


def test_what_is_mentioned_stays_with_its_comment_and_the_rest_goes_with_its_own() -> None:
    assert pruned(
        "// Calls other().",
        "void used() { other(); }",
        "// Never called.",
        "void unused() { other(); }",
        "void other() {}",
        KERNEL,
    ) == ["// Calls other().", "void used() { other(); }", "void other() {}", KERNEL]


def test_a_mention_in_a_comment_or_a_string_does_not_count() -> None:
    text = pruned('void used() { print("unused"); }  // like unused()', "void unused() {}", KERNEL)
    assert text == ['void used() { print("unused"); }  // like unused()', KERNEL]


def test_a_function_goes_if_only_a_variable_has_its_name() -> None:
    assert pruned(
        "int before() { return 1; }",
        "int used() { int before = last<int>(); return before; }",
        "template <class T>",
        "T last() { return 2; }",
        KERNEL,
    ) == [
        "int used() { int before = last<int>(); return before; }",
        "template <class T>",
        "T last() { return 2; }",
        KERNEL,
    ]


def test_what_only_a_ruled_out_branch_of_the_chosen_policy_calls_goes() -> None:
    text = pruned(
        "struct Band {",
        "  static constexpr bool sends = false;",
        "};",
        "struct Sparse {",
        "  static constexpr bool sends = true;",
        "};",
        "void send() {}",
        "template <class Blocks>",
        "void used() {",
        "  if constexpr (Blocks::sends) send();",
        "  load();",
        "}",
        "void load() {}",
        'extern "C" __global__ void kernel() { used<Band>(); }',
    )
    assert text == [
        "struct Band {",
        "};",
        "template <class Blocks>",
        "void used() {",
        "  load();",
        "}",
        "void load() {}",
        'extern "C" __global__ void kernel() { used<Band>(); }',
    ]


def test_functions_that_only_call_each_other_go() -> None:
    assert pruned("void a() { b(); }", "void b() { a(); }", "void used() {}", KERNEL) == ["void used() {}", KERNEL]


def test_the_name_of_a_function_stands_behind_its_attributes() -> None:
    text = ["__attribute__((noinline)) inline int other(int x) { return x; }", "void used() { other(1); }", KERNEL]
    assert pruned(*text) == text


def test_all_overloads_of_a_name_stay() -> None:
    overloads = ["void used(int x) {}", "template <class T>\nvoid used(T x) {}"]
    assert pruned(*overloads, KERNEL) == "\n".join([*overloads, KERNEL]).split("\n")


def test_an_overload_for_an_element_type_that_nothing_reaches_goes() -> None:
    types = ["struct half_t { int bits; };", "struct bfloat16_t { int bits; };"]
    text = pruned(
        *types,
        "void used(half_t x) { half_only(); }",
        "void used(bfloat16_t x) {}",
        "void half_only() {}",
        "using element_t = bfloat16_t;",
        'extern "C" __global__ void kernel() { used(element_t{}); }',
    )
    assert "void used(bfloat16_t x) {}" in text
    assert not any("half" in line for line in text)


def test_a_specialization_for_an_element_type_that_nothing_reaches_goes() -> None:
    text = pruned(
        "struct half_t { int bits; };",
        "template <class T>\nconstexpr int kUsed = 1;",
        "template <>\nconstexpr int kUsed<half_t> = 2;",
        "template <class T>\nstruct Used { int x; };",
        "template <>\nstruct Used<half_t> { int y; };",
        "void used() { Used<int> u{kUsed<int>}; }",
        KERNEL,
    )
    assert not any("half_t" in line for line in text)
    assert "constexpr int kUsed = 1;" in text
    assert "struct Used { int x; };" in text


def test_a_specialization_for_a_struct_that_nothing_else_reaches_goes_with_the_struct() -> None:
    text = pruned(
        "struct Dense { int x; };",
        "struct Packed { int y; };",
        "template <class Params, class Tile>\nstruct Scheduler;",
        "template <class Params>\nstruct Scheduler<Params, Dense> { int of_dense; };",
        "template <class Params>\nstruct Scheduler<Params, Packed> { int of_packed; };",
        "using Tile = Dense;",
        "void used() { Scheduler<int, Tile> scheduler; }",
        KERNEL,
    )
    assert any("of_dense" in line for line in text)
    assert not any("acked" in line for line in text)


def test_macros_that_are_completed_by_a_number_go_unless_some_macro_passes_that_number() -> None:
    text = pruned(
        "#define NAMES_8 int a8;",
        "#define NAMES_16 NAMES_8 int a16;",
        "#define NAMES_24 NAMES_16 int a24;",
        "#define SHAPES(shape) shape(16)",
        "#define SHAPE(n) NAMES_##n",
        "void used() { SHAPES(SHAPE) }",
        KERNEL,
    )
    assert [line.split()[1] for line in text if line.startswith("#define NAMES")] == ["NAMES_8", "NAMES_16"]


def test_a_constrained_specialization_stays_with_its_template() -> None:
    text = [
        "template <int n>\nstruct Ring {};",
        "template <int n>\n  requires((n & (n - 1)) != 0)\nstruct Ring<n> {};",
        "void used() { Ring<3> ring; }",
        KERNEL,
    ]
    assert pruned(*text) == "\n".join(text).split("\n")


def test_members_that_nothing_mentions_go_and_data_stays() -> None:
    struct = """\
struct Used {
  int data;
  static constexpr int size = 4;
  static constexpr int spare = 5;
  Used(int x) : data(x) {}
  bool operator<(int x) const { return data < x; }
  // Is called.
  int get() const { return data; }

  // Is not.
  int lose() const { return data; }
};"""
    text = pruned(struct, "void used() { Used(Used::size).get(); }", KERNEL)
    assert text == [
        "struct Used {",
        "  int data;",
        "  static constexpr int size = 4;",
        "  Used(int x) : data(x) {}",
        "  bool operator<(int x) const { return data < x; }",
        "  // Is called.",
        "  int get() const { return data; }",
        "};",
        "void used() { Used(Used::size).get(); }",
        KERNEL,
    ]


def test_data_of_an_element_type_stays_though_nothing_else_mentions_the_type() -> None:
    text = ["using element_t = float;", "struct Used { element_t* data; };", "void used() { Used u; }", KERNEL]
    assert pruned(*text) == text


def test_references_and_pointers_to_arrays_are_data() -> None:
    struct = ["struct Used {", "  float (&sums)[4];", "  int (*rows)[8];", "};"]
    text = ["\n".join(struct), "void used() { Used u; }", KERNEL]
    assert pruned(*text) == [*struct, *text[1:]]


def test_macros_stay_where_their_names_or_their_pasted_beginnings_are_mentioned() -> None:
    text = pruned(
        "#define SIZE_8 8",
        "#define SIZE_16 16",
        "#define COUNT 1",
        "#define SIZE_OF(n) \\",
        "  SIZE_##n",
        "void used() { int x = SIZE_OF(8) + SIZE_OF(16); }",
        KERNEL,
    )
    assert "#define COUNT 1" not in text
    assert {"#define SIZE_8 8", "#define SIZE_16 16", "  SIZE_##n"} <= set(text)


def test_a_macro_that_declares_a_struct_stays_where_the_struct_is_mentioned() -> None:
    header = ["#define SHAPE(n) \\", "  template <> \\", "  struct Shape<n> { int x; };", "SHAPE(8)", "SHAPE(16)"]
    kept = pruned("template <int n>\nstruct Shape;", *header, "void used() { Shape<8> s; }", KERNEL)
    assert {"SHAPE(8)", "SHAPE(16)"} <= set(kept)
    assert pruned("template <int n>\nstruct Shape;", *header, "void used() {}", KERNEL) == ["void used() {}", KERNEL]


@pytest.mark.parametrize(("define", "taken"), [(["#define WHICH 1"], "a"), ([], "b")])
def test_a_conditional_that_the_source_decides_is_decided(define: list[str], taken: str) -> None:
    text = pruned(*define, "#ifdef WHICH", "void used() { a(); }", "#else", "void used() { b(); }", "#endif", KERNEL)
    assert [line for line in text if not line.startswith("#define")] == [f"void used() {{ {taken}(); }}", KERNEL]


def test_a_conditional_that_the_compiler_decides_stays_until_it_is_empty() -> None:
    branches = ["#if __CUDA_ARCH__ >= 800", "void used() {}", "#else", "void unused() {}", "#endif"]
    assert pruned(*branches, KERNEL) == ["#if __CUDA_ARCH__ >= 800", "void used() {}", "#endif", KERNEL]


def test_neighboring_headers_share_a_namespace_and_empty_ones_go() -> None:
    text = pruned(
        "namespace flashgen {", "", "void used() { other(); }", "", "}  // namespace flashgen", "",
        "namespace flashgen {", "", "void unused() {}", "", "}  // namespace flashgen", "",
        "// More.", "", "namespace flashgen {", "", "void other() {}", "", "}  // namespace flashgen", KERNEL,
    )  # fmt: skip
    assert text == [
        "namespace flashgen {", "", "void used() { other(); }", "", "// More.", "", "void other() {}", "",
        "}  // namespace flashgen", KERNEL,
    ]  # fmt: skip


def test_an_assertion_stays_where_all_that_it_mentions_does() -> None:
    text = pruned(
        "constexpr int kUsed = 1, kSpare = 2;", "constexpr int kUnused = 2;", "static_assert(kUsed == 1);",
        "static_assert(kUsed < kUnused);", "void used() { int x = kUsed; }", KERNEL,
    )  # fmt: skip
    assert "static_assert(kUsed == 1);" in text
    assert "static_assert(kUsed < kUnused);" not in text


def test_a_text_without_a_kernel_stays_as_it_is() -> None:
    assert pruned("void unused() {}") == ["void unused() {}"]


def test_a_bf16_kernel_has_no_text_for_other_element_types() -> None:
    made = plan(AttentionSpec(128, mask=causal(), direction="forward"), None, "sm_80").kernel("forward")
    text = render_afresh(made).code
    assert "bfloat16_t" in text
    assert "half_t" not in text
    assert "float32_t" not in text


def test_the_table_of_contents_names_the_line_of_each_section() -> None:
    made = plan(AttentionSpec(128, mask=causal(), direction="forward"), None, "sm_80").kernel("forward")
    lines = render_afresh(made).text.split("\n")
    start = next(n for n, line in enumerate(lines) if line.startswith("// contents"))
    rows = [line.removeprefix("// contents").removeprefix("//").split(maxsplit=1) for line in lines[start:]]
    table = rows[: next(n for n, row in enumerate(rows) if not row)]
    assert len(table) > 10
    assert len({title for _, title in table}) == len(table)
    for number, title in table[:-1]:
        assert lines[int(number) - 1].startswith("// ---- flashgen/")
        if not title.startswith("Instructions, one per function: "):
            assert lines[int(number)].startswith(f"// {title.rstrip('.')[:60]}")
    assert lines[int(table[-1][0]) - 1 :][:2] == ["// ---- kernels/forward.cu.j2", "using namespace flashgen;"]
