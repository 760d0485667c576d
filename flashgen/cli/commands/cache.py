"""``flashgen cache info|verify|clear`` and ``flashgen list``."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flashgen.cli.commands.builder import builds_in
from flashgen.cli.exits import Exit
from flashgen.cli.output import talk
from flashgen.cli.output.help import Command, Group
from flashgen.errors import CacheError

if TYPE_CHECKING:
    from flashgen.cache import CacheInfo

app = typer.Typer(help="Look at, check or empty the kernel cache.", no_args_is_help=True, cls=Group)

#: The kinds of entries, for people.
KINDS = {"cubin": "cubins", "sources": "rendered sources", "library": "emulator libraries"}
COLUMNS = ("name", "arch", "registers", "spills", "compile", "size", "created", "key")
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]


@dataclass(frozen=True, slots=True)
class CachedKernel:
    """What an entry says about itself, unverified."""

    name: str
    arch: str
    registers: int
    spill_bytes: int
    compile_seconds: float
    entry_bytes: int
    created: float
    key: str


def cached_kernels(root: Path) -> Iterator[CachedKernel]:
    """The entries below a cache's root; damaged and foreign ones are left to ``cache verify``."""
    from flashgen.cache import entry, tidy
    from flashgen.cache.guard import open_entry
    from flashgen.cache.store import Store

    for file in tidy.files_in(Store(root).entries, tidy.ENTRY_SUFFIX):
        try:
            descriptor = open_entry(file.path)
        except (OSError, CacheError):
            continue
        try:
            # Descriptions are short and come first; the cubins behind them are not read.
            head = os.read(descriptor, 1 << 17)
            start, stop = entry.meta_span(head)
            meta = entry.read_meta(head[start:stop])
            # A kernel has registers; what else the cache keeps (sources, libraries of the emulator) has none.
            if meta["registers"]:
                yield _cached_kernel(meta, file.path.stem, file.status.st_size)
        except (OSError, KeyError, TypeError, ValueError, entry.DamagedEntryError):
            continue
        finally:
            os.close(descriptor)


def _cached_kernel(meta: dict[str, Any], key: str, size: int) -> CachedKernel:
    return CachedKernel(
        name=str(meta["name"]),
        arch=str(meta["arch"]),
        registers=int(meta["registers"]),
        spill_bytes=int(meta["spill_bytes"]),
        compile_seconds=float(meta["compile_seconds"]),
        entry_bytes=size,
        created=float(meta["created"]),
        key=key,
    )


def list_kernels(json: Json = False) -> None:
    """List the cached kernels, newest first."""
    from flashgen.cache import default_cache

    root = default_cache().root
    kernels = sorted(cached_kernels(root), key=lambda kernel: -kernel.created)
    if json:
        talk.print_json({"schema": 1, "root": str(root), "kernels": [asdict(kernel) for kernel in kernels]})
        return
    if not kernels:
        talk.say(f"no kernels in {root}; flashgen build puts them there")
        return
    rows: list[tuple[str, ...]] = [COLUMNS]
    rows += [_row(kernel) for kernel in kernels]
    talk.print_rows(rows, styles={COLUMNS[0]: "dim"})


def _row(kernel: CachedKernel) -> tuple[str, ...]:
    return (
        kernel.name,
        kernel.arch,
        str(kernel.registers),
        f"{kernel.spill_bytes} B",
        f"{kernel.compile_seconds:.2f} s",
        f"{kernel.entry_bytes / 1024:.0f} KiB",
        datetime.fromtimestamp(kernel.created).strftime("%Y-%m-%d %H:%M"),
        kernel.key[:12],
    )


@app.command(cls=Command)
def info(json: Json = False) -> None:
    """Where the cache is and how much is in it."""
    from flashgen.cache import default_cache

    found = default_cache().info()
    if json:
        talk.print_json({"schema": 1, **asdict(found), "root": str(found.root)})
        return
    talk.print_rows(
        [
            ("directory", str(found.root)),
            ("entries", _counted(found)),
            ("size", f"{found.bytes / 2**20:.1f} MiB"),
            ("damaged", f"{found.bad} moved aside"),
            ("compilers", "\n".join(found.compilers)),
        ]
    )


def _counted(found: CacheInfo) -> str:
    """How many entries there are, and of which kinds."""
    kinds = ", ".join(f"{count} {KINDS.get(kind, kind)}" for kind, count in found.kinds.items())
    return f"{found.entries} ({kinds})" if kinds else str(found.entries)


@app.command(cls=Command)
def verify() -> None:
    """Check every byte of every entry; damaged ones are moved aside, and the exit code is 1."""
    from flashgen.cache import default_cache

    report = default_cache().verify()
    talk.print_text(f"{report.good} good, {len(report.bad)} bad")
    if not report.ok:
        talk.fail("\n".join(f"{file.name}: {file.reason}" for file in report.bad))
        raise typer.Exit(Exit.CHECK_FAILED)


@app.command(cls=Command)
def clear() -> None:
    """Remove all cached kernels and emulator libraries, and the files of builds without --out."""
    from flashgen.cache import default_cache

    cache = default_cache()
    removed = cache.clear()
    builds = builds_in(cache.root)
    if builds.is_dir() and not builds.is_symlink():
        shutil.rmtree(builds, ignore_errors=True)
    talk.print_text(f"{removed} entries removed from {cache.root}")
