"""Converts a finding of the runtime to an EmulationError: what, where, which thread, and how to reproduce it."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from typing import TypeAlias, TypedDict, cast

from flashgen.emulator.library import PlaceRecord, ReportRecord
from flashgen.emulator.loading import image_of
from flashgen.emulator.places import Places
from flashgen.errors import EmulationError

#: Files of the emulator, which errors do not show.
_INTERNAL = ("flashgen/emu/", "flashgen emulator entry")

Grid: TypeAlias = tuple[int, int, int]


class Options(TypedDict):
    """The options that reproduce a launch."""

    schedule: str
    seed: int
    race: bool
    resident: int


def emulation_error(report: ReportRecord, places: Places, grid: Grid, options: Mapping[str, object]) -> EmulationError:
    """The error for the runtime's report; ``options``, which are all of Options, reproduce the launch."""
    kind, kernel = _text(report.kind), places.name
    calls, other_calls = ([places.named(call) for call in _calls(place)] for place in (report.place, report.other))
    lines = [f"{kind}: {places.named(_text(report.what))}", *_describe(report.place, calls, grid)]
    if report.other_role:
        lines += [f"  {_text(report.other_role)}:", *_describe(report.other, other_calls, grid)]
    repeat = ", ".join(f"{name}={value!r}" for name, value in options.items())
    lines.append(f"  in kernel {kernel}, {repeat}")
    file, line = _innermost(calls)
    known = report.place.thread >= 0
    return EmulationError(
        "\n".join(lines),
        kind=kind,
        kernel=kernel,
        file=file,
        line=line,
        block=_coordinates(report.place, grid) if report.place.block >= 0 else None,
        warp=report.place.thread // 32 if known else None,
        lane=report.place.thread % 32 if known else None,
        **cast(Options, options),
    )


def _calls(place: PlaceRecord) -> list[str]:
    """The places in the source, innermost first."""
    return _inlined_places(place) or _called_from(place)


def _innermost(calls: list[str]) -> tuple[str | None, int | None]:
    """File and line of the first place."""
    file, colon, line = calls[0].rpartition(":") if calls else ("", "", "")
    return (file, int(line)) if colon and line.isdigit() else (None, None)


def _describe(place: PlaceRecord, calls: list[str], grid: Grid) -> list[str]:
    """The places and the thread, a line each."""
    lines = [f"  {'at' if i == 0 else 'called from'} {call}" for i, call in enumerate(calls)]
    if place.thread >= 0:
        warp, lane = divmod(place.thread, 32)
        lines.append(f"  by {_block(place, grid)}, warp {warp}, lane {lane} (thread {place.thread})")
    elif place.block >= 0:
        lines.append(f"  by {_block(place, grid)}")
    return lines


def _block(place: PlaceRecord, grid: Grid) -> str:
    x, y, z = _coordinates(place, grid)
    return f"block {x}" if grid[1:] == (1, 1) else f"block ({x}, {y}, {z})"


def _coordinates(place: PlaceRecord, grid: Grid) -> tuple[int, int, int]:
    rest, x = divmod(place.block, grid[0])
    z, y = divmod(rest, grid[1])
    return x, y, z


def _text(data: bytes) -> str:
    return data.decode(errors="replace")


def _called_from(place: PlaceRecord) -> list[str]:
    return [f"{_text(place.file)}:{place.line}"] if place.line >= 0 else []


def _inlined_places(place: PlaceRecord) -> list[str]:
    """The chain of inlined calls at the place's code address, innermost first; empty without addr2line."""
    tool = shutil.which("addr2line") or shutil.which("llvm-addr2line")
    image = image_of(_text(place.library))
    if image is None or not place.code_offset or tool is None:
        return []
    try:
        with tempfile.NamedTemporaryFile(prefix="flashgen-", suffix=".so") as library:
            library.write(image)
            library.flush()
            command = [tool, "-i", "-e", library.name, hex(place.code_offset)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    lines = (line.split(" (discriminator")[0].strip() for line in done.stdout.splitlines())
    # Compilers prefix the relative file names of #line with their working directory.
    known = [_shorten(line) for line in lines if not line.startswith("?") and not line.endswith((":0", ":?"))]
    return [line for line in known if not any(name in line for name in _INTERNAL)]


def _shorten(place: str) -> str:
    """Paths below ``templates``, ``flashgen`` and ``kernels`` from there on; others unchanged."""
    for root in ("templates/", "flashgen/", "kernels/"):
        _, found, rest = place.partition(f"/{root}")
        if found:
            return root + rest
    return place
