"""NVRTC's C interface as one function; the only module that loads the compiler."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from flashgen.errors import CompileError


@dataclass(frozen=True, slots=True)
class Compilation:
    """What one run of the compiler left behind; ``ptx`` is there even if assembling it failed."""

    succeeded: bool
    log: str
    ptx: str
    cubin: bytes


def load() -> None:
    """Load the compiler if it is not loaded yet; a CompileError where there is none."""
    _bindings()


def run(text: str, name: str, options: tuple[str, ...]) -> Compilation:
    """Compile a text; the result reports its errors, and only misuse or a missing compiler raises."""
    nvrtc = _bindings()
    program = _checked(nvrtc.nvrtcCreateProgram(text.encode(), name.encode(), 0, [], []), "start")
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])
        log = _get(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
        if status not in (nvrtc.nvrtcResult.NVRTC_SUCCESS, nvrtc.nvrtcResult.NVRTC_ERROR_COMPILATION):
            raise CompileError(f"NVRTC refused to compile {name} with {' '.join(options)}: {status.name}", _text(log))
        succeeded = status == nvrtc.nvrtcResult.NVRTC_SUCCESS
        return Compilation(
            succeeded,
            _text(log),
            _text(_get(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program)),
            _get(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program) if succeeded else b"",
        )
    finally:
        nvrtc.nvrtcDestroyProgram(program)


@lru_cache(maxsize=1)
def _bindings() -> Any:
    try:
        from cuda.bindings import nvrtc

        # The first call loads the library.
        _checked(nvrtc.nvrtcVersion(), "load")
    except (ImportError, RuntimeError, OSError) as error:
        if isinstance(error, CompileError):
            raise
        raise CompileError(
            "NVRTC, the CUDA compiler library, was not found; install it with: pip install nvidia-cuda-nvrtc",
            f"{type(error).__name__}: {error}",
        ) from error
    return nvrtc


def _checked(answer: Any, verb: str) -> Any:
    status, *values = answer
    if int(status) != 0:
        raise CompileError(f"NVRTC did not {verb}: {status.name}")
    return values[0] if len(values) == 1 else values


def _get(size_of: Any, fill: Any, program: Any) -> bytes:
    """One of the outputs; empty when the compilation did not get that far."""
    status, size = size_of(program)
    if int(status) != 0 or not size:
        return b""
    buffer = bytes(size)
    (status,) = fill(program, buffer)
    return buffer if int(status) == 0 else b""


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace").rstrip("\0").strip()
