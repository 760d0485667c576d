"""Load libraries into this process: exactly the bytes that the cache has verified."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable

from flashgen.cache import default_cache
from flashgen.emulator.build import Library
from flashgen.errors import CompileError

_mutex = threading.Lock()
#: By their keys; a library stays in the process once it is there.
_loaded: dict[str, ctypes.CDLL] = {}
#: By the paths that the loader knows them by, for debuggers' tools. Nothing is at these paths any more.
_images: dict[str, bytes] = {}


def load_library(obtain: Callable[[], Library]) -> ctypes.CDLL:
    """Load the library that ``obtain`` gives; one that the loader refuses is discarded and made once more."""
    library = obtain()
    try:
        return _open(library)
    except OSError:
        # Whole, but no library of this system: its files came from another one, or a broken tool made it.
        default_cache().discard(library.key)
    library = obtain()
    try:
        return _open(library)
    except OSError as error:
        raise CompileError(
            f"the library of the {library.binary.name} was built, but this system does not load it ({error}); if"
            f" {default_cache().root} forbids programs (noexec), set FLASHGEN_CACHE_DIR to a directory that allows them"
        ) from error


def image_of(path: str) -> bytes | None:
    """The bytes of the library that the loader knows by this path."""
    return _images.get(path)


def _open(library: Library) -> ctypes.CDLL:
    with _mutex:
        if library.key not in _loaded:
            # A copy that only we can write to, gone once it is loaded: nothing that happens to the cache's own file
            # changes a mapped library or cuts it short.
            with default_cache().workspace() as directory:
                path = directory / f"{library.key}.so"
                path.write_bytes(library.binary.image)
                _loaded[library.key] = ctypes.CDLL(str(path))
            _images[str(path)] = library.binary.image
        return _loaded[library.key]
