"""The emulator's libraries lie in the kernel cache: nothing else is loaded than whole files of our own."""

from __future__ import annotations

import ctypes
import os
import shutil
from pathlib import Path

import pytest

from flashgen.cache import default_cache
from flashgen.emulator import loading
from flashgen.emulator.build import kernel_library, runtime_library
from flashgen.emulator.kernel import EmulatedKernel
from flashgen.emulator.library import load_runtime
from flashgen.errors import CacheError, CompileError
from tests.emulator.test_build import result_of, text

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to other users")


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own that holds the runtime and one kernel, which the process has not loaded."""
    load_runtime()
    image = runtime_library().binary.image
    # The runtime takes longest to build, and always the same way.
    monkeypatch.setattr("flashgen.emulator.build._build_runtime", lambda *parts: parts[-1].write_bytes(image))
    forget(monkeypatch)
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path / "cache"))
    assert run() == 7
    forget(monkeypatch)
    return tmp_path / "cache"


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that starts; a second copy of the runtime would be found by its name and not be used."""
    runtime = runtime_library().key
    default_cache()._memory.clear()
    monkeypatch.setattr(loading, "_loaded", {runtime: loading._loaded[runtime]})


def run() -> int:
    return result_of(EmulatedKernel("thing", text(2), threads=32))


def libraries() -> list[Path]:
    """The files of the runtime and the kernel."""
    found = [
        default_cache()._store.path(library.key) for library in (runtime_library(), kernel_library("thing", text(2)))
    ]
    default_cache()._memory.clear()
    return found


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


DAMAGES = {
    "empty": lambda path: path.write_bytes(b""),
    "cut short": lambda path: os.truncate(path, path.stat().st_size // 2),
    "flipped bit": flip,
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("which", [0, 1], ids=["runtime", "kernel"])
def test_a_damaged_library_is_moved_aside_and_built_anew(store: Path, damage: str, which: int) -> None:
    victim = libraries()[which]
    DAMAGES[damage](victim)
    assert run() == 7
    assert default_cache().info().bad == 1
    assert default_cache().verify().ok
    assert victim.exists()


@pytest.mark.parametrize("which", [0, 1], ids=["runtime", "kernel"])
def test_a_library_that_others_can_write_is_refused(store: Path, which: int) -> None:
    libraries()[which].chmod(0o666)
    with pytest.raises(CacheError, match="mode 0666"):
        run()


@needs_root
@pytest.mark.parametrize("which", [0, 1], ids=["runtime", "kernel"])
def test_a_library_that_belongs_to_another_user_is_refused(store: Path, which: int) -> None:
    os.chown(libraries()[which], 12345, -1)
    with pytest.raises(CacheError, match="belongs to user 12345"):
        run()


def test_libraries_that_change_places_are_built_anew(store: Path) -> None:
    runtime, kernel = libraries()
    shutil.copyfile(runtime, kernel)
    assert run() == 7
    assert default_cache().info().bad == 1


def test_what_is_loaded_outlives_every_change_of_the_cache(store: Path) -> None:
    kernel = EmulatedKernel("thing", text(2), threads=32)
    for path in libraries():
        os.truncate(path, 0)
    assert result_of(kernel) == 7
    shutil.rmtree(store)
    assert result_of(kernel) == 7


def test_a_whole_library_that_the_loader_refuses_is_built_once_more(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, library = default_cache(), kernel_library("thing", text(2))
    cache.put(library.key, library.binary.__class__("thing", "?", b"no ELF", library.binary.resources, 0.0, ""))
    forget(monkeypatch)
    assert run() == 7
    assert default_cache().info().bad == 1


def test_a_library_that_never_loads_is_an_error_that_names_the_directory(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: str) -> ctypes.CDLL:
        raise OSError("failed to map segment from shared object")

    monkeypatch.setattr(loading.ctypes, "CDLL", refuse)
    with pytest.raises(CompileError, match="failed to map segment") as caught:
        run()
    assert f"{store} is mounted noexec" in str(caught.value)


def test_the_cache_counts_libraries_as_what_they_are(store: Path) -> None:
    info = default_cache().info()
    assert (info.entries, info.kinds) == (2, {"library": 2})
    assert default_cache().verify().good == 2
    assert default_cache().clear() == 2
    assert run() == 7


def test_nothing_is_left_beside_the_entries(store: Path) -> None:
    assert sorted(path.name for path in store.iterdir()) == ["entries", "tmp"]
    assert list((store / "tmp").iterdir()) == []


def test_a_kernel_that_does_not_compile_leaves_nothing(store: Path) -> None:
    with pytest.raises(CompileError):
        kernel_library("thing", text(2).replace("p.value", "p.values"))
    assert list((store / "tmp").iterdir()) == []
