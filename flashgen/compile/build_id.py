"""Which compiler this is: part of the cache key, and known without loading it once it has been asked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from threading import Thread

from flashgen.compile.locate import find_nvrtc, loaded_nvrtc
from flashgen.compile.notes import digest, recall, remember
from flashgen.errors import CompileError

_BUILD = r"// Compiler Build ID: (.+)"
_VERSION = r"// (Cuda compilation tools, .+)"
_KIND = "compiler"


@lru_cache(maxsize=1)
def compiler_build_id() -> str:
    """NVRTC's build number and version: ``CL-39125733; Cuda compilation tools, release 13.5, V13.5.37``.

    ``nvrtcVersion()`` cannot tell patch releases apart, though their cubins differ; the PTX they print can.
    The answer is kept on disk by the library's path, size and time, because asking takes a compilation.
    """
    identity = _identity(find_nvrtc())
    known = _noted(identity)
    if known is not None:
        return known
    build_id = _ask()
    # Where only loading could tell which library it is, the next process has to load it as well.
    identity = identity or _identity(loaded_nvrtc())
    if identity:
        remember(_KIND, digest(identity)[:32], identity, build_id)
    return build_id


@contextmanager
def asked_meanwhile() -> Iterator[None]:
    """Around work that needs no compiler yet: a thread asks for the build number, unless a note has it.

    NVRTC answers on another core. What goes wrong is not for that work to know: ``compiler_build_id`` then asks
    again, and gives the error to its caller.
    """
    asking = _asking() if _noted(_identity(find_nvrtc())) is None else None
    try:
        yield
    finally:
        # Also after an error of the work: a process forked while a thread is inside the compiler may find it locked.
        if asking is not None:
            asking.join()


def _asking() -> Thread | None:
    """The thread, started; None where there is no compiler to ask, or no thread to be had."""
    from flashgen.compile import nvrtc

    asking = Thread(target=_ask_ahead, name="flashgen asks the compiler which build it is")
    try:
        # Not in the thread: loading is Python, which would only take turns with the work.
        nvrtc.load()
        asking.start()
    except RuntimeError:
        # CompileError is one, too.
        return None
    return asking


def _ask_ahead() -> None:
    with suppress(CompileError):
        compiler_build_id()


def _ask() -> str:
    import re

    from flashgen.compile import nvrtc

    result = nvrtc.run("", "empty.cu", ("--gpu-architecture=compute_80",))
    build, version = re.search(_BUILD, result.ptx), re.search(_VERSION, result.ptx)
    if build is None or version is None:
        raise CompileError("NVRTC did not say which build it is in the PTX of an empty program", result.log)
    return f"{build[1].strip()}; {version[1].strip()}"


def _noted(identity: str) -> str | None:
    return recall(_KIND, digest(identity)[:32], identity) if identity else None


def _identity(library: Path | None) -> str:
    """What changes when the library is exchanged; empty when it is not known."""
    try:
        status = library.stat() if library else None
    except OSError:
        return ""
    return f"{library} {status.st_size} {status.st_mtime_ns}" if status else ""
