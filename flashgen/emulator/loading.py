"""Loads libraries into this process: exactly the bytes that the cache has verified."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable

from flashgen.cache import default_cache
from flashgen.emulator.build import Library
from flashgen.errors import CompileError

_mutex = threading.Lock()
#: Loaded libraries by cache key. A library stays loaded for the life of the process.
_loaded: dict[str, ctypes.CDLL] = {}
#: Bytes of each library by the path that the loader reports, for symbolizers. The files no longer exist.
_images: dict[str, bytes] = {}


def load_library(obtain: Callable[[], Library]) -> ctypes.CDLL:
    """The loaded library that ``obtain`` returns. If the loader refuses it, it is discarded and rebuilt."""
    library = obtain()
    try:
        return _open(library)
    except OSError:
        # The checksum is right, but the library is for another system, or a broken toolchain built it.
        default_cache().discard(library.key)
    library = obtain()
    try:
        return _open(library)
    except OSError as error:
        raise CompileError(
            f"the library of the {library.binary.name} was built, but this system does not load it ({error}); if"
            f" {default_cache().root} is mounted noexec, set FLASHGEN_CACHE_DIR to another directory"
        ) from error


def image_of(path: str) -> bytes | None:
    """The bytes of the library that the loader reports at this path."""
    return _images.get(path)


def _open(library: Library) -> ctypes.CDLL:
    with _mutex:
        if library.key not in _loaded:
            # Load a private copy, deleted after loading: a later write to the cache's file, or its truncation, must not
            # change a mapped library.
            with default_cache().workspace() as directory:
                path = directory / f"{library.key}.so"
                path.write_bytes(library.binary.image)
                _loaded[library.key] = ctypes.CDLL(str(path))
            _images[str(path)] = library.binary.image
        return _loaded[library.key]
