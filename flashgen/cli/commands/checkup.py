"""The doctor's checks, one function each; none imports torch, creates a context or leaves a file behind."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import sys
from collections.abc import Callable

from flashgen import settings
from flashgen.cli.commands.finding import Finding
from flashgen.common.version import __version__
from flashgen.errors import CacheError, FlashgenError, NoGpuError

OLDEST_PYTHON = (3, 10)
REINSTALL = "reinstall: pip install --force-reinstall flashgen"


def python() -> Finding:
    """The interpreter."""
    detail = f"{platform.python_version()} ({sys.executable})"
    if sys.version_info < OLDEST_PYTHON:
        return Finding("python", "broken", detail, "use Python 3.10 or later")
    return Finding("python", "ok", detail)


def package() -> Finding:
    """flashgen itself and its templates."""
    from flashgen.render import templates_dir

    try:
        return Finding("flashgen", "ok", f"{__version__}, templates in {templates_dir()}")
    except FlashgenError as error:
        return Finding("flashgen", "broken", str(error), REINSTALL)


def nvrtc() -> Finding:
    """The compiler."""
    from flashgen.compile import compiler_build_id, find_nvrtc

    try:
        build = compiler_build_id()
    except (FlashgenError, ImportError, RuntimeError, OSError) as error:
        remedy = "install it: pip install 'nvidia-cuda-nvrtc>=13,<14' 'cuda-bindings>=13,<14'"
        return Finding("nvrtc", "broken", str(error), remedy)
    return Finding("nvrtc", "ok", f"{find_nvrtc() or 'found by the loader'}, {build}")


def driver() -> Finding:
    """The NVIDIA driver; building needs none."""
    from flashgen.launch.driver.cuda import get_driver

    try:
        version = int(get_driver().call("cuDriverGetVersion"))
    except NoGpuError as error:
        remedy = "needed to run kernels, not to build them: install the NVIDIA driver"
        return Finding("driver", "missing", str(error).split(";")[0], remedy)
    return Finding("driver", "ok", f"supports CUDA {version // 1000}.{version % 1000 // 10}")


def gpus() -> Finding:
    """The GPUs and whether flashgen knows them."""
    from flashgen.arch import DEFAULT_ARCHS, arch_for_capability
    from flashgen.cli.gpu.arrays import find_gpus

    found = find_gpus()
    if not found:
        remedy = f"build works without: for {' and '.join(DEFAULT_ARCHS)}, checked on the emulator"
        return Finding("gpus", "missing", "none found", remedy)
    lines = []
    for gpu in found:
        try:
            lines.append(f"{gpu.describe()}, built for as {arch_for_capability(gpu.capability).name}")
        except FlashgenError as error:
            return Finding("gpus", "broken", gpu.describe(), str(error))
    return Finding("gpus", "ok", "\n".join(lines))


def cache() -> Finding:
    """The cache directory: safe, writable, and its entries."""
    from flashgen.cache import Cache
    from flashgen.cache.guard import check_root

    root = settings.cache_dir()
    try:
        check_root(root)
    except FileNotFoundError:
        return Finding("cache", "ok", f"{root} (not made yet)")
    except (CacheError, OSError) as error:
        return Finding("cache", "broken", str(error), "set FLASHGEN_CACHE_DIR to a directory of your own")
    if not os.access(root, os.W_OK | os.X_OK):
        remedy = "kernels are compiled anew in each process; set FLASHGEN_CACHE_DIR to a writable directory"
        return Finding("cache", "missing", f"{root} cannot be written", remedy)
    info = Cache(root).info()
    detail = f"{root}: {info.entries} entries, {info.bytes / 2**20:.1f} MiB"
    if info.bad:
        return Finding("cache", "ok", f"{detail}, {info.bad} damaged ones moved aside", "see: flashgen cache info")
    return Finding("cache", "ok", detail)


def cxx() -> Finding:
    """The emulator's C++ compiler."""
    from flashgen.cli.gpu.verification import missing_emulator

    reason = missing_emulator()
    if reason:
        detail, _, remedy = reason.partition(";")
        return Finding("c++", "missing", detail, remedy.strip() or "needed to verify without a GPU")
    from flashgen.emulator.toolchain import find_toolchain

    found = find_toolchain()
    return Finding("c++", "ok", f"{found.path}: {found.version}")


def disassembler() -> Finding:
    """nvdisasm or cuobjdump."""
    from flashgen.compile import find_disassembler

    found = find_disassembler()
    if found is None:
        remedy = "needed by show --what sass only: pip install nvidia-cuda-nvdisasm"
        return Finding("disassembler", "missing", "none found", remedy)
    return Finding("disassembler", "ok", str(found))


def torch() -> Finding:
    """Whether torch is installed; found out without importing it."""
    if importlib.util.find_spec("torch") is None:
        return Finding("torch", "missing", "not installed", "needed by flashgen.attention only: pip install torch")
    return Finding("torch", "ok", importlib.metadata.version("torch"))


def environment() -> Finding:
    """The FLASHGEN_ variables that are set."""
    given = [f"{v.name}={v.value}" for v in settings.VARIABLES.values() if v.value is not None]
    for read in (
        settings.cache_dir,
        settings.cache_size,
        settings.cache_shared,
        settings.lock_timeout,
        settings.dump_dir,
        settings.override_dir,
        settings.spin_limit,
    ):
        try:
            read()
        except FlashgenError as error:
            detail, _, remedy = str(error).partition(";")
            return Finding("settings", "broken", detail, remedy.strip())
    return Finding("settings", "ok", "\n".join(given) or "all defaults")


CHECKS: dict[str, Callable[[], Finding]] = {
    "python": python,
    "flashgen": package,
    "settings": environment,
    "nvrtc": nvrtc,
    "driver": driver,
    "gpus": gpus,
    "cache": cache,
    "c++": cxx,
    "disassembler": disassembler,
    "torch": torch,
}
