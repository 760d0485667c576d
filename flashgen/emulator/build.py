"""Builds the runtime and kernels as shared libraries. The cache key covers everything that goes into them."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from flashgen.cache import default_cache
from flashgen.compile.binary import Binary, Resources
from flashgen.emulator.places import KERNEL_FILE
from flashgen.emulator.toolchain import RUNTIME_FLAGS, Toolchain, find_toolchain
from flashgen.render.paths import include_dir
from flashgen.render.source import code_of

_RUNTIME = Path(__file__).parent / "runtime"
_INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]*)"', re.MULTILINE)
#: A file's path, the time of its last change in nanoseconds, and its size.
_Version = tuple[str, int, int]
_ENTRY = '\n#line 1 "flashgen emulator entry"\nFLASHGEN_EMU_ENTRY({name})\n'


@dataclass(frozen=True, slots=True)
class Library:
    """A shared library and its key in the cache."""

    key: str
    binary: Binary


def runtime_library() -> Library:
    """The shared library that implements the primitives, from the cache or built."""
    tools = find_toolchain()
    include = include_dir()
    key = _runtime_key(tools, _versions(include))
    return _cached(key, "emulator runtime", tools, lambda output: _build_runtime(tools, include, _soname(key), output))


def _soname(key: str) -> str:
    """The runtime's soname, by which kernels link to the loaded runtime."""
    return f"libflashgen-emulator-{key[:32]}.so"


@functools.lru_cache(maxsize=4)
def _runtime_key(tools: Toolchain, files: tuple[_Version, ...]) -> str:
    """The key of the runtime. Each kernel needs it, so unchanged files are not read again."""
    return _digest((tools.identity, *tools.flags, *RUNTIME_FLAGS), (Path(path).read_bytes() for path, _, _ in files))


def kernel_library(name: str, text: str, *, race: bool = False) -> Library:
    """The shared library of one kernel, from the cache or built; ``race`` adds hooks to its loads and stores."""
    tools = find_toolchain()
    include = include_dir()
    runtime = runtime_library()
    # The comment at the top is not part of the key, and would shift line numbers.
    source = f'#line 1 "{KERNEL_FILE}"\n{code_of(text)}{_ENTRY.format(name=name)}'
    flags = (*tools.kernel_flags, f"-I{include}", *(tools.hook_flags if race else ()))
    link_flags = (*tools.kernel_link_flags, *(tools.hook_link_flags if race else ()))
    contents = (_nameless(source, name).encode(), *(path.read_bytes() for path in _included(source, include)))
    key = _digest((tools.identity, *tools.flags, *flags, *link_flags, runtime.key), contents)

    def build(output: Path) -> None:
        # The linker needs the runtime's file to resolve its symbols.
        linked = output.with_name(_soname(runtime.key))
        linked.write_bytes(runtime.binary.image)
        _build_kernel(tools, flags, (str(linked), *link_flags), name, source, output)

    return _cached(key, name, tools, build)


def _nameless(code: str, name: str) -> str:
    """The code without the kernel's name, so that kernels that differ only in names share a library."""
    # A pattern that begins with literal text is found fastest, so the lookbehind comes after the name.
    word = re.escape(name)
    return re.sub(rf"{word}(?<!\w{word})\b", "\0", code)


def _included(text: str, include: Path) -> list[Path]:
    """The headers that a text includes, directly or not. Rendered sources include none, edited ones may."""
    found: dict[Path, None] = {}
    texts = [text]
    while texts:
        for name in _INCLUDE.findall(texts.pop()):
            path = include / name
            if path not in found and path.is_file():
                found[path] = None
                texts.append(path.read_text(encoding="utf-8"))
    return list(found)


def _versions(include: Path) -> tuple[_Version, ...]:
    """The files that the runtime is built from. Every launch calls this, so it makes no Path per file."""
    found: list[_Version] = []
    for folder in (str(_RUNTIME), f"{include}/flashgen/emu"):
        with os.scandir(folder) as entries:
            files = sorted((entry.path, entry.stat()) for entry in entries if entry.is_file())
        found += [(path, stat.st_mtime_ns, stat.st_size) for path, stat in files]
    for name in ("descriptor.cuh", "types.cuh"):
        path = f"{include}/flashgen/ptx/{name}"
        stat = os.stat(path)
        found.append((path, stat.st_mtime_ns, stat.st_size))
    return tuple(found)


def _digest(words: Sequence[str], contents: Iterable[bytes]) -> str:
    digest = hashlib.sha256(usedforsecurity=False)
    for data in (*(word.encode() for word in words), *contents):
        digest.update(len(data).to_bytes(8, "big"))
        digest.update(data)
    return digest.hexdigest()


def _build_runtime(tools: Toolchain, include: Path, name: str, output: Path) -> None:
    main = _RUNTIME / "runtime.cpp"
    options = (
        *RUNTIME_FLAGS,
        f"-I{include}",
        f"-Wl,-soname,{name}",
        str(main),
        "-ldl",
        "-lpthread",
        "-lrt",
    )
    tools.run(options, output, "the emulator's runtime")


def _build_kernel(
    tools: Toolchain, flags: Sequence[str], libraries: Sequence[str], name: str, source: str, output: Path
) -> None:
    text, machine_code = output.with_suffix(".cpp"), output.with_suffix(".o")
    text.write_text(source)
    # Two steps: with the sanitizer flags at link time, the compiler would link its own sanitizer.
    tools.run((*flags, "-c", str(text)), machine_code, f"kernel {name}")
    tools.run((str(machine_code), *libraries), output, f"kernel {name}")


def _cached(key: str, name: str, tools: Toolchain, build: Callable[[Path], None]) -> Library:
    """The library with this key. If the cache does not have it, ``build`` writes it to a path."""
    cache = default_cache()

    def make() -> Binary:
        start = time.perf_counter()
        with cache.workspace() as directory:
            output = directory / "library.so"
            build(output)
            image = output.read_bytes()
        seconds = time.perf_counter() - start
        return Binary(name, platform.machine(), image, Resources(0, 0, 0, 0), seconds, "", kind="library")

    return Library(key, cache.obtain(key, make, build_id=tools.version)[0])
