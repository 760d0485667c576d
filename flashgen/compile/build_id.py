"""Which compiler this is: part of the cache key, and known without loading it once it has been asked."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

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
    library = find_nvrtc()
    identity = _identity(library)
    known = recall(_KIND, digest(identity)[:32], identity) if identity else None
    if known is not None:
        return known
    build_id = _ask()
    # Where only loading could tell which library it is, the next process has to load it as well.
    identity = identity or _identity(loaded_nvrtc())
    if identity:
        remember(_KIND, digest(identity)[:32], identity, build_id)
    return build_id


def _ask() -> str:
    import re

    from flashgen.compile import nvrtc

    result = nvrtc.run("", "empty.cu", ("--gpu-architecture=compute_80",))
    build, version = re.search(_BUILD, result.ptx), re.search(_VERSION, result.ptx)
    if build is None or version is None:
        raise CompileError("NVRTC did not say which build it is in the PTX of an empty program", result.log)
    return f"{build[1].strip()}; {version[1].strip()}"


def _identity(library: Path | None) -> str:
    """What changes when the library is exchanged; empty when it is not known."""
    try:
        status = library.stat() if library else None
    except OSError:
        return ""
    return f"{library} {status.st_size} {status.st_mtime_ns}" if status else ""
