"""No name of a captured value, whatever it means in C++, breaks a kernel."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import flashgen as fg
from flashgen.compile import nvrtc
from flashgen.compile.options import ptx_options_for
from flashgen.emulator.build import include_dir
from flashgen.emulator.toolchain import find_toolchain
from flashgen.plan import plan
from flashgen.render import render

#: What every identifier made of a captured name begins with.
PREFIXES = re.compile(r"(captured[0-9]*|stride[0-9]+|size[0-9]+|survey[0-9]+|gradient|sums|elements|cleared)_")
IDENTIFIER = re.compile(r"[A-Za-z_]\w*")
#: Keywords, types, functions, macros and parameters of kernels, words of the language, and what is no C++ identifier.
_NASTY = """
i32 u8 half_t bfloat16_t Key Query Mask Score Params Captured Survey Range Thread Pair First FLASHGEN_DEVICE kConfig
load select lane lo hi is_whole value slope sink p s b h q k t1 captured survey first row column pair key query
captured_x x x_stride0 x_size0 x_elements stride0_x size0_x gradient_x sums_x x2 x_min x_max x0 x1 x_2 row_of_x
int float double auto new this class template operator namespace asm and not xor constexpr requires co_await char8_t
__CUDA_ARCH__ __device__ _Atomic _x __x __ NULL EOF INFINITY NAN errno assert major linux unix min max exp tanh sin inf
Ids ids IDS für größe Größe 変数 λ main printf threadIdx blockIdx warpSize nullptr true False None return lambda
"""
NASTY = _NASTY.split()
#: A developer's run compiles a few of the batches of harvested names, DRAWN_CASES=ci all, and a turn one in so many.
SAMPLED = os.environ.get("DRAWN_CASES", "sample") == "sample"
TURN = int(os.environ.get("DRAWN_TURN", -1))
TURNS = 6
BATCH = 48


def spec_with(names: Iterable[str]) -> fg.AttentionSpec:
    """A spec that captures a value under each name, and uses them in all the ways that kernels treat differently."""
    roles = dict(zip(names, cycle(["document", "limit", "bias", "number", "per head", "flags"]), strict=False))
    shapes = {"document": (2, 64), "limit": (2,), "bias": (4, 64, 64), "per head": (4,), "flags": (64,)}
    types = {"document": np.int32, "limit": np.int64, "bias": np.float16, "per head": np.float32, "flags": np.bool_}
    values = SimpleNamespace(
        **{name: 3 if role == "number" else np.ones(shapes[role], types[role]) for name, role in roles.items()}
    )

    def mask(b: Any, h: Any, q: Any, k: Any) -> Any:
        terms = {
            "document": lambda x: x[b, q] == x[b, k],
            "limit": lambda x: k < x[b],
            "number": lambda x: q - k < x,
            "flags": lambda x: x[k] | (q < k),
        }
        found = [terms[role](getattr(values, name)) for name, role in roles.items() if role in terms]
        while len(found) > 1:
            found = [found[i] & found[i + 1] if i + 1 < len(found) else found[i] for i in range(0, len(found), 2)]
        return found[0]

    def score(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        for name, role in roles.items():
            if role == "bias":
                s = s + getattr(values, name)[h, q, k]
            elif role == "per head":
                s = s * getattr(values, name)[h]
        return s

    return fg.AttentionSpec(64, dtype="fp16", mask=mask, score=score)


def batches(names: Sequence[str]) -> list[Sequence[str]]:
    return [names[i : i + BATCH] for i in range(0, len(names), BATCH)]


def kernels(spec: fg.AttentionSpec, arch: str = "sm_80") -> dict[str, str]:
    return {kernel.role: render(kernel).text for kernel in plan(spec, None, arch).kernels}


#: In a process of its own: after one compile with that option, NVRTC makes other machine code of whatever follows.
NVRTC = """
import sys
from pathlib import Path
from flashgen.compile import nvrtc
from flashgen.compile.options import ptx_options_for
for path in map(Path, sys.argv[1:]):
    result = nvrtc.run(path.read_text(), path.name, (*ptx_options_for("sm_80"), "--Ofast-compile=max"))
    if not result.succeeded:
        sys.exit(result.log)
"""


def assert_compiles(texts: dict[str, str], directory: Path) -> None:
    """The front ends of both compilers accept the sources; optimizing them takes minutes."""
    files = written(texts, directory)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", NVRTC, *files]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert_compiles_on_host(files)


def assert_compiles_on_host(files: Sequence[str]) -> None:
    tools = find_toolchain()
    command = [tools.path, *tools.flags, *tools.kernel_flags, f"-I{include_dir()}", "-fsyntax-only", *files]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def written(texts: dict[str, str], directory: Path) -> list[str]:
    """Files that hold the sources."""
    paths = {role: directory / f"{role}.cpp" for role in texts}
    for role, path in paths.items():
        path.write_text(texts[role])
    return [str(path) for path in paths.values()]


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_every_identifier_made_from_a_captured_name_has_a_prefix(arch: str) -> None:
    names = [f"zyx{letter}" for letter in "abcdefghijkl"]
    found = {word for text in kernels(spec_with(names), arch).values() for word in IDENTIFIER.findall(code_of(text))}
    made = {word for word in found if "zyx" in word}
    assert len(made) > 40
    wanted = re.compile(rf"(row_of_)?{PREFIXES.pattern}({'|'.join(names)})(_min|_max)?[0-9]*")
    assert not [word for word in made if not wanted.fullmatch(word)]
    assert not [word for word in found - made if PREFIXES.match(word)]


def code_of(text: str) -> str:
    """A source without its comments, which hold the spec, and without literals."""
    return re.sub(r'//[^\n]*|"[^"\n]*"', "", text)


def test_no_prefix_of_captured_names_starts_with_another() -> None:
    found = {"captured_", "captured2_", "captured12_", "stride0_", "stride10_", "size0_", "size1_", "survey0_"}
    found |= {"survey12_", "gradient_", "sums_", "elements_", "cleared_"}
    assert all(PREFIXES.fullmatch(prefix) for prefix in found)
    assert not [(a, b) for a in found for b in found if a != b and a.startswith(b)]


def test_two_loads_of_a_tensor_and_one_of_its_namesake_differ() -> None:
    x, x2 = np.ones((2, 64), np.float16), np.ones((64, 64), np.float16)

    def score(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + x[q % 2, k] + x[(q + 1) % 2, k] * x2[q, k]

    for role, text in kernels(fg.AttentionSpec(64, dtype="fp16", score=score), "sm_90a").items():
        if role in ("forward", "main"):
            result = nvrtc.run(text, f"{role}.cu", ptx_options_for("sm_90a"))
            assert result.succeeded, result.log


def test_kernels_compile_whatever_captured_values_are_called(tmp_path: Path) -> None:
    for names in batches(NASTY):
        spec = spec_with(names)
        assert len({**spec.scalars, **spec.tensors}) == len(names)
        assert_compiles(kernels(spec), tmp_path)


def test_values_may_be_called_like_anything_in_the_source_itself(tmp_path: Path) -> None:
    texts = kernels(spec_with("abcdef"))
    harvested = sorted({word for text in texts.values() for word in IDENTIFIER.findall(text)})
    assert len(harvested) > 500
    found = batches(harvested)
    of_turn = found if TURN < 0 else found[TURN % TURNS :: TURNS]
    for names in found[:: len(found) // 3] if SAMPLED else of_turn:
        assert_compiles({"forward": kernels(spec_with(names))["forward"]}, tmp_path)


def test_the_front_ends_see_what_breaks_a_kernel(tmp_path: Path) -> None:
    texts = {"forward": kernels(spec_with("abcdef"))["forward"].replace("captured_a", "i32")}
    with pytest.raises(AssertionError, match="error"):
        assert_compiles(texts, tmp_path)
    with pytest.raises(AssertionError, match="error"):
        assert_compiles_on_host(written(texts, tmp_path))


def test_a_captured_value_keeps_its_name_for_calls_and_texts() -> None:
    spec = spec_with(["i32", "Key", "double", "FLASHGEN_DEVICE"])
    assert set(spec.tensors) == {"i32", "Key", "double"}
    assert set(spec.scalars) == {"FLASHGEN_DEVICE"}
    assert "i32[b, q] == i32[b, k]" in spec.mask.describe()
