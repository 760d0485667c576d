"""What a build does not load when all its kernels are in the cache: that is where its milliseconds would go."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BUILD = """
import json, sys
import flashgen as fg
before = set(sys.modules)
kernel = fg.build(fg.AttentionSpec(16, dtype="fp16", mask=fg.causal()), arch="sm_80")
loaded = sorted(set(sys.modules) - before)
print(json.dumps({"loaded": loaded, "import": sorted(before), "text": kernel.source,
                  "cubins": {role: binary.image.hex() for role, binary in kernel.binaries.items()}}))
"""
#: Parts of the standard library that cost milliseconds each and that only a miss or a launch needs.
SLOW_TO_IMPORT = {"argparse", "ctypes", "importlib.metadata", "logging", "subprocess", "tempfile", "textwrap"}
NOT_FOR_A_HIT = {
    "flashgen.cache.audit",
    "flashgen.cache.lock",
    "flashgen.cache.report",
    "flashgen.compile.compiler",
    "flashgen.compile.diagnostics",
    "flashgen.compile.disassembler",
    "flashgen.compile.nvrtc",
    "flashgen.compile.residency",
    "flashgen.compile.resources",
    "flashgen.emulator",
    "flashgen.launch.driver.cuda",
    "flashgen.launch.executor",
    "flashgen.launch.call.packing",
    "flashgen.oracle",
    "flashgen.render.amalgamation.amalgamate",
    "flashgen.render.engine",
    "flashgen.render.summary",
    "flashgen.spec.text.files",
    "flashgen.spec.text.reading",
}


def build(cache: Path) -> dict[str, object]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "FLASHGEN_CACHE_DIR": str(cache)}
    done = subprocess.run([sys.executable, "-c", BUILD], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def cold_and_warm(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, dict]:
    cache = tmp_path_factory.mktemp("warm")
    return build(cache), build(cache)


def test_a_warm_build_gives_the_same_kernels(cold_and_warm: tuple[dict, dict]) -> None:
    cold, warm = cold_and_warm
    assert set(warm["cubins"]) == {"forward", "prepare", "main", "finish"}
    assert warm["cubins"] == cold["cubins"]
    assert warm["text"] == cold["text"]


def test_a_warm_build_imports_nothing_but_the_standard_library(cold_and_warm: tuple[dict, dict]) -> None:
    cold, warm = cold_and_warm
    allowed = sys.stdlib_module_names | {"flashgen"}
    foreign = {name for name in warm["loaded"] if name.split(".")[0] not in allowed}
    assert foreign == set()
    # The check can fail: a cold build does import these.
    assert {"jinja2", "msgspec", "cuda.bindings.nvrtc"} <= set(cold["loaded"])


def test_a_warm_build_imports_nothing_that_only_a_miss_or_a_launch_needs(
    cold_and_warm: tuple[dict, dict],
) -> None:
    cold, warm = cold_and_warm
    assert set(warm["loaded"]) & (SLOW_TO_IMPORT | NOT_FOR_A_HIT) == set()
    assert {"flashgen.render.engine", "flashgen.compile.compiler", "flashgen.cache.lock"} <= set(cold["loaded"])


def test_importing_flashgen_loads_no_part_of_it(cold_and_warm: tuple[dict, dict]) -> None:
    loaded = {name for name in cold_and_warm[1]["import"] if name.startswith("flashgen")}
    assert loaded == {"flashgen", "flashgen.common", "flashgen.common.lazy", "flashgen.common.version"}
