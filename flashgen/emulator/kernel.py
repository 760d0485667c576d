"""Kernels compiled for the CPU, and their launch."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from flashgen import settings
from flashgen.emulator.build import kernel_library
from flashgen.emulator.finding import emulation_error
from flashgen.emulator.library import (
    SCHEDULES,
    BufferRecord,
    LaunchRecord,
    ReportRecord,
    TrafficRecord,
    launch_lock,
    load_runtime,
)
from flashgen.emulator.loading import load_library
from flashgen.emulator.places import Places
from flashgen.emulator.traffic import LaunchTraffic, by_array
from flashgen.errors import CompileError, LaunchError

if TYPE_CHECKING:
    from flashgen.render import KernelSource, Origin

#: Parameter structs may hold tensor maps, which are 64-byte aligned.
_PARAMS_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Buffer:
    """Memory of the caller that a kernel may access; everything else is out of bounds."""

    name: str
    address: int
    bytes: int
    writable: bool = False
    #: An earlier kernel may access it until ``griddep_wait``. Until then ``writable`` buffers are NaN, and in race
    #: mode an access is a finding.
    from_primary: bool = False


@dataclass(frozen=True, slots=True)
class _Build:
    """A kernel's loaded library."""

    library: ctypes.CDLL
    entry: int | None
    params_bytes: int


def _load(name: str, text: str, race: bool) -> _Build:
    library = load_library(partial(kernel_library, name, text, race=race))
    entry = ctypes.cast(library.flashgen_emu_entry, ctypes.c_void_p).value
    return _Build(library, entry, ctypes.c_uint.in_dll(library, "flashgen_emu_params_bytes").value)


class EmulatedKernel:
    """One kernel, ready to run on the CPU."""

    def __init__(
        self,
        name: str,
        text: str,
        *,
        threads: int = 0,
        smem_bytes: int = 0,
        race: bool | None = False,
        line_table: Callable[[], Sequence[Origin]] | None = None,
    ) -> None:
        """Builds the library with or without race mode, or neither if ``race`` is None. Launches build what is missing.

        Findings name the places in ``line_table``, which has an origin for each line of ``text``.
        """
        self.name = name
        self._places = Places(name, text, line_table)
        self._threads = threads
        self._smem_bytes = smem_bytes
        self._text = text
        # Load the runtime first, because the kernel's library links to it.
        self._runtime = load_runtime()
        self._builds: dict[bool, _Build] = {}
        if race is not None:
            self._build(race)

    def launch(
        self,
        blocks: int | tuple[int, int, int],
        params: bytes,
        buffers: Sequence[Buffer] = (),
        *,
        threads: int | None = None,
        smem_bytes: int | None = None,
        schedule: str = "sequential",
        seed: int = 0,
        race: bool = False,
        resident: int | None = None,
        cluster: int = 1,
        cooperative: bool = False,
        traffic: list[LaunchTraffic] | None = None,
    ) -> None:
        """Runs the grid. Raises EmulationError if the kernel does something wrong.

        ``blocks`` is their number along x, or along x, y and z.

        ``threads`` and ``smem_bytes`` default to the plan's. ``schedule`` is the order of threads: sequential,
        reverse, random or priority. The last two depend on ``seed``. ``resident`` blocks run concurrently: by
        default one, or two in race mode and with a random schedule. ``cluster`` consecutive blocks along x form a
        cluster and are resident together. ``cooperative=True`` makes all blocks resident. Without ``buffers``,
        global addresses are not checked.

        ``race=True`` runs a build with hooks on each load and store. It finds unordered accesses of shared memory
        and, by several blocks, of writable buffers; reads of uninitialized shared memory; accesses of bytes while a
        copy is in flight; and addresses that are out of bounds or misaligned.

        The launch appends to ``traffic`` the bytes of each buffer that it reads and writes. This needs that build, too.
        """
        if schedule not in SCHEDULES:
            raise LaunchError(f"schedule={schedule!r} is not known; use one of {', '.join(SCHEDULES)}")
        build = self._build(race or traffic is not None)
        if len(params) != build.params_bytes:
            raise LaunchError(
                f"params has {len(params)} bytes, but the parameter struct of {self.name} has"
                f" {build.params_bytes}; pack it from the plan's parameter table"
            )
        storage = ctypes.create_string_buffer(len(params) + _PARAMS_ALIGNMENT)
        aligned = -(-ctypes.addressof(storage) // _PARAMS_ALIGNMENT) * _PARAMS_ALIGNMENT
        ctypes.memmove(aligned, params, len(params))
        records = (BufferRecord * len(buffers))(
            *(BufferRecord(b.name.encode(), b.address, b.bytes, b.writable, b.from_primary) for b in buffers)
        )
        counts = (TrafficRecord * len(buffers))() if traffic is not None else None
        grid = (blocks, 1, 1) if isinstance(blocks, int) else blocks
        if resident is None:
            resident = cluster * (2 if race or schedule in ("random", "priority") else 1)
        request = LaunchRecord(
            entry=build.entry,
            params=aligned,
            params_bytes=len(params),
            grid=grid,
            threads=self._threads if threads is None else threads,
            shared_bytes=self._smem_bytes if smem_bytes is None else smem_bytes,
            schedule=SCHEDULES[schedule],
            seed=seed % 2**64,
            race=race,
            resident=resident,
            cluster=cluster,
            cooperative=cooperative,
            buffers=records,
            buffer_count=len(buffers),
            traffic=counts,
            spin_nanoseconds=round(settings.spin_limit() * 1e9),
        )
        report = ReportRecord()
        with launch_lock:
            failed = self._runtime.flashgen_emu_launch(ctypes.byref(request), ctypes.byref(report))
        if failed:
            repeat = {"schedule": schedule, "seed": seed, "race": race, "resident": resident}
            raise emulation_error(report, self._places, grid, repeat)
        if traffic is not None and counts is not None:
            traffic.append(by_array(self.name, [b.name for b in buffers], counts))

    def _build(self, race: bool) -> _Build:
        if race not in self._builds:
            try:
                self._builds[race] = _load(self.name, self._text, race)
            except CompileError as error:
                raise CompileError(str(error).split("\n", 1)[0], self._places.named(error.log)) from None
        return self._builds[race]


def load(source: KernelSource, *, race: bool | None = False) -> EmulatedKernel:
    """Compiles ``source`` for the CPU, unless it is cached, and loads it. ``race=None`` does so at the first launch."""
    plan = source.plan
    threads, smem_bytes = plan.threads, plan.smem.bytes
    table = partial(_line_table, source)
    return EmulatedKernel(source.name, source.text, threads=threads, smem_bytes=smem_bytes, race=race, line_table=table)


def _line_table(source: KernelSource) -> Sequence[Origin]:
    # Only findings need this import, which loads the template engine.
    from flashgen.render.lines import line_table

    return line_table(source)
