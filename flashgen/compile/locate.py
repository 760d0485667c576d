"""Find the NVRTC library without loading it: loading takes longer than all the rest of a warm build."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path

#: Inside the ``nvidia`` namespace package, where NVIDIA's wheels put their libraries.
_WHEEL_LIBRARY = "cu13/lib/libnvrtc.so.13"
_WHEEL_PROGRAMS = ("cu13/bin", "cuda_nvdisasm/bin", "cuda_cuobjdump/bin", "cuda_nvcc/bin")


def find_nvrtc() -> Path | None:
    """The library that compiling uses or would use; None when only loading it can tell.

    The order is cuda.bindings': a library that is loaded already (torch brings its own), then the wheel's.
    """
    return loaded_nvrtc() or next(_in_wheels(_WHEEL_LIBRARY), None)


def loaded_nvrtc() -> Path | None:
    """The NVRTC library mapped into this process, if any."""
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return None
    for line in maps.splitlines():
        if "/libnvrtc.so." in line:
            return Path(line[line.index("/") :])
    return None


def wheel_programs(name: str) -> Iterator[Path]:
    """Where NVIDIA's wheels have put a program of that name."""
    for directory in _WHEEL_PROGRAMS:
        yield from _in_wheels(f"{directory}/{name}")


def _in_wheels(relative: str) -> Iterator[Path]:
    # PathFinder, not importlib.metadata: 0.2 ms instead of 70.
    spec = PathFinder.find_spec("nvidia")
    for location in (spec.submodule_search_locations if spec else None) or ():
        path = Path(location) / relative
        if path.is_file():
            yield path.resolve()
