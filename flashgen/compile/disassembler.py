"""SASS for people: NVIDIA's disassembler, wherever one is installed."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path

from flashgen.compile.locate import wheel_programs

#: Where branches go is a third of the work, and is in the text as it is.
_PROGRAMS = {"nvdisasm": ("--print-code", "--no-dataflow"), "cuobjdump": ("--dump-sass",)}
_SECONDS = 120


def find_disassembler() -> Path | None:
    """The disassembler that ``disassemble`` tries first; None when none is installed."""
    return next(disassemblers(), None)


def disassemble(image: bytes) -> str | None:
    """The SASS of a cubin; None when no disassembler is installed, or none is new enough to read it."""
    # Imported here: few builds disassemble, and all of them import this package.
    import subprocess
    import tempfile

    with tempfile.TemporaryDirectory(prefix="flashgen-") as directory:
        cubin = Path(directory) / "kernel.cubin"
        cubin.write_bytes(image)
        for program in disassemblers():
            try:
                done = subprocess.run(
                    [str(program), *_PROGRAMS[program.stem], str(cubin)],
                    capture_output=True,
                    text=True,
                    timeout=_SECONDS,
                    check=False,
                )
            except (OSError, subprocess.TimeoutExpired):
                continue
            if done.returncode == 0 and done.stdout.strip():
                return done.stdout
    return None


def disassemblers() -> Iterator[Path]:
    """All there are: on the PATH, in NVIDIA's wheels, in triton's. The first may be too old for a cubin."""
    import shutil

    for name in _PROGRAMS:
        if (found := shutil.which(name)) is not None:
            yield Path(found)
        yield from wheel_programs(name)
        yield from _in_triton(name)


def _in_triton(name: str) -> Iterator[Path]:
    # Found, not imported: triton takes a second to import and may start a driver.
    spec = PathFinder.find_spec("triton")
    for location in (spec.submodule_search_locations if spec else None) or ():
        path = Path(location) / "backends" / "nvidia" / "bin" / name
        if path.is_file():
            yield path
