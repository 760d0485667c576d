"""Types as a user's checker sees them: flashgen says that it has some, and lazy names have their real signatures."""

from __future__ import annotations

import ast
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import flashgen
from tests.conftest import has_torch

RIGHT = """
from typing import Any

import numpy as np

import flashgen as fg


def turns(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k


spec = fg.AttentionSpec(head_dim=64, dtype="fp16", mask=fg.causal() & fg.window(512, 0), score=fg.softcap(30.0))
fg.AttentionSpec(64, mask=turns, score=lambda s, b, h, q, k: s * 2)
kernel = fg.build(spec, fg.Schedule(tile_q=64, warps=fg.WarpPartition("split_q", 4)), arch="sm_80", target="emulator")
q = np.zeros((1, 40, 4, 64), np.float16)
out, lse = kernel(q, q, q, scale=0.5)
expected, _ = fg.oracle.forward(spec, q, q, q)
print(expected.max(), kernel.plan, kernel.report["forward"].registers, fg.explain(spec, 256).flops)
with fg.torch.enable_sdpa():
    fg.attention(q, q, q, mask=fg.causal())
try:
    fg.integrations.transformers.register()
except fg.FlashgenError as error:
    print(error)
"""
#: A line, and what a checker says of it.
WRONG = {
    'fg.AttentionSpec(head_dim="64")': 'Argument "head_dim" to "AttentionSpec" has incompatible type "str"',
    "fg.AttentionSpec(64, mask=3)": 'Argument "mask" to "AttentionSpec" has incompatible type "int"',
    "fg.AttentionSpec(64, masc=fg.causal())": 'Unexpected keyword argument "masc"',
    "fg.casual()": 'has no attribute "casual"',
    'fg.causal("left")': 'Argument 1 to "causal" has incompatible type',
    'fg.build(fg.AttentionSpec(64), target="cpu")': 'Argument "target" to "build" has incompatible type',
    "fg.build(fg.AttentionSpec(64))(1)": 'Missing positional arguments "k", "v"',
    'fg.explain(fg.causal(), "many")': 'Argument 2 to "explain" has incompatible type "str"',
    'fg.Schedule(tile_q="large")': 'Argument "tile_q" to "Schedule" has incompatible type "str"',
    "fg.flash_attn_func(1)": 'Missing positional arguments "k", "v" in call to "flash_attn_func"',
    "fg.cache.default_cache(1)": 'Too many arguments for "default_cache"',
    'fg.compile.compile_source("text")': 'Argument 1 to "compile_source" has incompatible type "str"',
    "(1 + fg.q_len).cosine()": '"Node" has no attribute "cosine"',
    "(fg.q_len == fg.k_len).cosine()": '"Node" has no attribute "cosine"',
}
#: Types of other packages are theirs, and take a while.
CONFIG = "[mypy]\nstrict = true\n[mypy-torch.*,transformers.*,rich.*,jinja2.*,msgspec.*]\nfollow_imports = skip\n"


def test_the_package_says_that_it_is_typed() -> None:
    assert Path(flashgen.__file__).with_name("py.typed").is_file()


def test_a_users_file_is_checked_against_real_signatures(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    pytest.importorskip("mypy", reason="mypy is not installed")
    (tmp_path / "right.py").write_text(RIGHT)
    (tmp_path / "wrong.py").write_text("\n".join(["import flashgen as fg", *WRONG]) + "\n")
    (tmp_path / "mypy.ini").write_text(CONFIG)
    assert pytestconfig.cache is not None
    environment = os.environ | {
        # As an installed package, whose types count only where it says that it has some.
        "PYTHONPATH": str(Path(flashgen.__file__).parents[1]),
        "MYPY_CACHE_DIR": str(pytestconfig.cache.mkdir("mypy-of-a-user")),
    }
    command = [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "right.py", "wrong.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    errors = re.findall(r"^(\w+\.py):(\d+): error: (.*)$", done.stdout, flags=re.MULTILINE)
    assert [error for error in errors if error[0] == "right.py"] == [], done.stdout
    found = {int(line): message for file, line, message in errors if file == "wrong.py"}
    assert sorted(found) == list(range(2, 2 + len(WRONG))), done.stdout
    for line, message in enumerate(WRONG.values(), 2):
        assert message in found[line]


@pytest.mark.parametrize(
    "name", ["flashgen", *[f"flashgen.{part}" for part in ("cache", "compat", "compile", "integrations", "spec")]]
)
def test_dir_lists_the_public_names_and_no_others(name: str) -> None:
    # In a process of its own, before and after names and modules have loaded.
    code = f"""
import importlib
package = importlib.import_module({name!r})
before = dir(package)
import flashgen.api, flashgen.cli.main, flashgen.spec.text.files
assert before == dir(package) == sorted(package.__all__), set(dir(package)) ^ set(package.__all__)
for public in before:
    if public not in ("torch", "attention", "serving", "transformers") and not public.startswith("flash_attn"):
        getattr(package, public)
assert before == dir(package)
"""
    environment = os.environ | {"PYTHONPATH": str(Path(flashgen.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("part", ["cache", "compat", "compile", "integrations", "spec"])
def test_the_names_that_load_on_use_are_those_that_checkers_see(part: str) -> None:
    package = importlib.import_module(f"flashgen.{part}")
    tree = ast.parse(Path(str(package.__file__)).read_text(encoding="utf-8"))
    (branch,) = (node for node in tree.body if isinstance(node, ast.If))
    imports = [node for node in [*tree.body, *branch.body] if isinstance(node, ast.ImportFrom)]
    seen = {alias.asname or alias.name: (str(node.module), alias.name) for node in imports for alias in node.names}
    for name in {"annotations", "TYPE_CHECKING", "lazy_names"}:
        seen.pop(name)
    assert set(seen) == set(package.__all__)
    for name, (module, defined) in seen.items():
        if has_torch() or not _needs_torch(module, defined):
            source = importlib.import_module(module)
            assert getattr(package, name) is getattr(source, defined), name


def _needs_torch(module: str, name: str) -> bool:
    return "torch" in module or "compat" in module or name in ("torch", "transformers")
