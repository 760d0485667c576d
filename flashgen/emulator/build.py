"""Build the runtime once and each kernel once; both are cached by everything that goes into them."""

from __future__ import annotations

import functools
import hashlib
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from flashgen import settings
from flashgen.cache.guard import check_directory
from flashgen.emulator.toolchain import RUNTIME_FLAGS, Toolchain, find_toolchain
from flashgen.render.paths import include_dir
from flashgen.render.source import code_of

_RUNTIME = Path(__file__).parent / "runtime"
_INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]*)"', re.MULTILINE)
_ENTRY = '\n#line 1 "flashgen emulator entry"\nFLASHGEN_EMU_ENTRY({name})\n'


def runtime_library() -> Path:
    """The shared library that carries out the primitives, built if need be."""
    tools = find_toolchain()
    include = include_dir()
    files = [file for file in sorted(_RUNTIME.iterdir()) + _headers(include) if file.is_file()]
    key = _runtime_key(tools, tuple((file, file.stat().st_mtime_ns, file.stat().st_size) for file in files))
    # Kernels ask for the runtime by this name, and find the one that the process has loaded.
    name = f"libflashgen-emulator-{key}.so"
    return _cached(name, lambda output: _build_runtime(tools, include, name, output))


@functools.lru_cache(maxsize=4)
def _runtime_key(tools: Toolchain, files: tuple[tuple[Path, int, int], ...]) -> str:
    """What the runtime is built from; each kernel asks, and as long as no file changes none is read again."""
    return _digest((tools.identity, *tools.flags, *RUNTIME_FLAGS), (path.read_bytes() for path, _, _ in files))


def kernel_library(name: str, text: str, *, race: bool = False) -> Path:
    """The shared library of one kernel, built if need be; ``race`` makes it tell of its loads and stores."""
    tools = find_toolchain()
    include = include_dir()
    runtime = runtime_library()
    source = text + _ENTRY.format(name=name)
    flags = (*tools.kernel_flags, f"-I{include}", *(tools.hook_flags if race else ()))
    libraries = (str(runtime), *tools.kernel_link_flags, *(tools.hook_link_flags if race else ()))
    contents = (_nameless(code_of(source), name).encode(), *(path.read_bytes() for path in _included(source, include)))
    key = _digest((tools.identity, *tools.flags, *flags, runtime.name), contents)
    return _cached(f"kernel-{key}.so", lambda output: _build_kernel(tools, flags, libraries, name, source, output))


def _nameless(code: str, name: str) -> str:
    """The code with nothing for the kernel's name, which is all that some kernels of two specs differ in."""
    # What stands in front of the name is looked at behind it: a pattern that begins with letters is found at once.
    word = re.escape(name)
    return re.sub(rf"{word}(?<!\w{word})\b", "\0", code)


def _included(text: str, include: Path) -> list[Path]:
    """The headers that a text reads, as one written by hand may, and those that they read."""
    found: dict[Path, None] = {}
    texts = [text]
    while texts:
        for name in _INCLUDE.findall(texts.pop()):
            path = include / name
            if path not in found and path.is_file():
                found[path] = None
                texts.append(path.read_text(encoding="utf-8"))
    return list(found)


def _headers(include: Path) -> list[Path]:
    ptx = include / "flashgen" / "ptx"
    shared = (ptx / name for name in ("descriptor.cuh", "tensor_map.cuh", "types.cuh"))
    return [*sorted((include / "flashgen" / "emu").iterdir()), *shared]


def _digest(words: Sequence[str], contents: Iterable[bytes]) -> str:
    digest = hashlib.sha256(usedforsecurity=False)
    for data in (*(word.encode() for word in words), *contents):
        digest.update(len(data).to_bytes(8, "big"))
        digest.update(data)
    return digest.hexdigest()[:32]


def _build_runtime(tools: Toolchain, include: Path, name: str, output: Path) -> None:
    main = _RUNTIME / "runtime.cpp"
    options = (
        *RUNTIME_FLAGS,
        f"-I{include}",
        f"-Wl,-soname,{name}",
        str(main),
        "-o",
        str(output),
        "-ldl",
        "-lpthread",
    )
    tools.run(options, "the emulator's runtime")


def _build_kernel(
    tools: Toolchain, flags: Sequence[str], libraries: Sequence[str], name: str, source: str, output: Path
) -> None:
    text, machine_code = output.with_suffix(".cpp"), output.with_suffix(".o")
    text.write_text(source)
    try:
        # Two steps: told of the hooks, the compiler would link its own sanitizer.
        tools.run((*flags, "-c", str(text), "-o", str(machine_code)), f"kernel {name}")
        tools.run((str(machine_code), *libraries, "-o", str(output)), f"kernel {name}")
    finally:
        text.unlink()
        machine_code.unlink(missing_ok=True)


def _cached(name: str, build: Callable[[Path], None]) -> Path:
    """The file ``name`` of the emulator's cache, which ``build`` writes where it is told if it is missing."""
    directory = _directory()
    path = directory / name
    if path.is_file():
        return path
    # Other processes may build the same file now; each publishes a whole one, and the last rename wins.
    temporary = directory / f"tmp-{os.getpid()}-{os.urandom(6).hex()}.so"
    try:
        build(temporary)
        os.replace(temporary, path)
    finally:
        with suppress(OSError):
            temporary.unlink()
    return path


def _directory() -> Path:
    """The cache directory for libraries: the user's own and nobody else's, since we run what lies there."""
    root = settings.cache_dir()
    directory = root / "emulator"
    try:
        root.parent.mkdir(parents=True, exist_ok=True)
        root.mkdir(mode=0o700, exist_ok=True)
        directory.mkdir(mode=0o700, exist_ok=True)
        writable = os.access(directory, os.W_OK)
    except OSError:
        writable = False
    if not writable:
        return _private_directory()
    check_directory(root)
    check_directory(directory)
    return directory


@functools.lru_cache(maxsize=1)
def _private_directory() -> Path:
    """Where no cache can be written: a directory that lives as long as this process."""
    return Path(_private_directory_handle().name)


@functools.lru_cache(maxsize=1)
def _private_directory_handle() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="flashgen-emulator-")
