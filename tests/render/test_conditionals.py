"""Conditionals of a source: which branches stay, as the C preprocessor would choose them."""

from __future__ import annotations

import itertools
import shutil
import subprocess

import pytest

from flashgen.render.amalgamation.conditionals import resolved
from flashgen.render.source import Origin

#: Name -> source -> what stays of it.
CASES = {
    "a macro of the source": ("#define A\n#ifdef A\none\n#else\ntwo\n#endif", "#define A\none"),
    "none of that name": ("#ifdef A\none\n#else\ntwo\n#endif", "two"),
    "a macro of the command line": (
        "#ifdef FLASHGEN_X\none\n#else\ntwo\n#endif",
        "#ifdef FLASHGEN_X\none\n#else\ntwo\n#endif",
    ),
    "defined if the compiler says so": (
        "#if __X\n#define A\n#endif\n#ifdef A\none\n#else\ntwo\n#endif",
        "#if __X\n#define A\n#endif\n#ifdef A\none\n#else\ntwo\n#endif",
    ),
    "defined either way": (
        "#if __X\n#define A 1\n#else\n#define A 2\n#endif\n#ifndef A\none\n#endif",
        "#if __X\n#define A 1\n#else\n#define A 2\n#endif\n#ifndef A\none\n#endif",
    ),
    "undefined": ("#define A\n#undef A\n#ifdef A\none\n#endif\ntwo", "#define A\n#undef A\ntwo"),
    "undefined if the compiler says so": (
        "#define A\n#if __X\n#undef A\n#endif\n#ifdef A\none\n#endif",
        "#define A\n#if __X\n#undef A\n#endif\n#ifdef A\none\n#endif",
    ),
    "elif behind a branch that is taken": (
        "#define A\n#ifdef A\none\n#elif __X\ntwo\n#else\nthree\n#endif\nfour",
        "#define A\none\nfour",
    ),
    "elif behind a branch that is not": (
        "#ifdef A\none\n#elif __X\ntwo\n#elif __Y\nthree\n#else\nfour\n#endif\nfive",
        "#if __X\ntwo\n#elif __Y\nthree\n#else\nfour\n#endif\nfive",
    ),
    "defined behind such an elif": (
        "#ifdef A\n#elif __X\n#define B\n#endif\n#ifdef B\none\n#endif",
        "#if __X\n#define B\n#endif\n#ifdef B\none\n#endif",
    ),
    "within a branch that goes": (
        "#ifdef A\n#if __X\n#define B\none\n#elif __Y\ntwo\n#else\nthree\n#endif\n#ifdef C\n#else\nfour\n#endif\n#endif"
        "\n#ifdef B\nfive\n#endif\nsix",
        "six",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_stays(name: str) -> None:
    source, left = CASES[name]
    lines = [(text, Origin("x", number)) for number, text in enumerate(source.split("\n"), start=1)]
    assert "\n".join(text for text, _ in resolved(lines)) == left


@pytest.mark.skipif(shutil.which("cpp") is None, reason="no C preprocessor")
@pytest.mark.parametrize("name", CASES)
def test_a_preprocessor_makes_the_same_of_what_stays(name: str) -> None:
    lines = [(text, Origin("x", number)) for number, text in enumerate(CASES[name][0].split("\n"), start=1)]
    left = "\n".join(text for text, _ in resolved(lines))
    for values in itertools.product((0, 1), repeat=3):
        options = [f"-D{macro}={on}" for macro, on in zip(("__X", "__Y", "FLASHGEN_X"), values, strict=True) if on]
        assert _preprocessed(left, options) == _preprocessed(CASES[name][0], options)


def _preprocessed(source: str, options: list[str]) -> list[str]:
    command = ["cpp", "-P", *options, "-"]
    return subprocess.run(command, input=source + "\n", capture_output=True, text=True, check=True).stdout.split()
