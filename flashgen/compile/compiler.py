"""Compile one source with NVRTC: the cubin with its resource report, or an error at the template's line."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from flashgen import settings
from flashgen.compile.binary import Binary
from flashgen.compile.options import options_for, ptx_options_for
from flashgen.compile.resources import parse_resources
from flashgen.errors import CompileError, SpecError

if TYPE_CHECKING:
    from flashgen.arch import Arch
    from flashgen.render import KernelSource

_LONGEST_LOG = 64 * 1024


def compile_source(source: KernelSource) -> Binary:
    """The cubin of a source for its plan's architecture, whatever ``require_registers`` will say of it."""
    from flashgen.compile import nvrtc

    arch = source.plan.arch.name
    # Before compiling: a source that does not compile is the one its author wants to see.
    _dump(source.name, "cu", source.text.encode())
    started = time.perf_counter()
    result = nvrtc.run(source.text, f"{source.name}.cu", options_for(arch))
    seconds = time.perf_counter() - started
    if not result.succeeded:
        raise _error(source, result.log)
    _dump(source.name, "ptx", result.ptx.encode())
    _dump(source.name, "cubin", result.cubin)
    resources = parse_resources(result.log, source.name)
    if resources is None:
        raise CompileError(f"the source of {source.name} defines no kernel of that name", result.log[:_LONGEST_LOG])
    return Binary(source.name, arch, result.cubin, resources, seconds, _lasting(result.log))


def compile_text(name: str, text: str, arch: Arch) -> bytes:
    """The cubin of a kernel that has no plan."""
    from flashgen.compile import nvrtc

    result = nvrtc.run(text, f"{name}.cu", options_for(arch))
    if not result.succeeded:
        raise CompileError(f"{name} does not compile for {arch.name}", result.log[:_LONGEST_LOG])
    return result.cubin


def compile_ptx(source: KernelSource) -> str:
    """The PTX of a source, to be read; it is not what ``compile_source`` loads."""
    from flashgen.compile import nvrtc

    result = nvrtc.run(source.text, f"{source.name}.cu", ptx_options_for(source.plan.arch))
    if not result.succeeded:
        raise _error(source, result.log)
    return result.ptx + "\n"


def _error(source: KernelSource, log: str) -> CompileError:
    # Imported when something is wrong: it brings the template engine with it.
    from flashgen.compile.diagnostics import explain

    return explain(source, log, lambda: _with_lines(source))


def _with_lines(source: KernelSource) -> tuple[str, str]:
    """PTX that names its source lines, and the log of assembling it."""
    from flashgen.compile import nvrtc

    result = nvrtc.run(source.text, f"{source.name}.cu", (*options_for(source.plan.arch), "-lineinfo"))
    return result.ptx, result.log


def _lasting(log: str) -> str:
    """The log without what differs from run to run, so that equal sources give equal binaries."""
    lines = [line for line in log.splitlines() if "Compile time =" not in line]
    return "\n".join(lines)[:_LONGEST_LOG]


def _dump(name: str, suffix: str, data: bytes) -> None:
    directory = settings.dump_dir()
    if directory is None:
        return
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / f"{name}.{suffix}").write_bytes(data)
    except OSError as error:
        raise SpecError(
            f"FLASHGEN_DUMP_DIR={str(directory)!r} cannot be written ({error.strerror}); "
            "set it to a directory of yours, or unset it"
        ) from error
