"""The only reader of FLASHGEN_* environment variables; every function reads when called, not at import."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NamedTuple

from flashgen.common.show import show, show_error
from flashgen.errors import SpecError

_UNITS = {
    "": 1,
    "B": 1,
    "K": 2**10,
    "KIB": 2**10,
    "M": 2**20,
    "MIB": 2**20,
    "G": 2**30,
    "GIB": 2**30,
    "T": 2**40,
    "TIB": 2**40,
}
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("", "0", "false", "no", "off")


class Variable(NamedTuple):
    """One environment variable, as ``flashgen doctor`` lists it."""

    name: str
    default: str
    meaning: str

    @property
    def value(self) -> str | None:
        """What the environment says, unparsed; None when it is not set."""
        return _read(self.name)


VARIABLES: dict[str, Variable] = {
    v.name: v
    for v in (
        Variable("FLASHGEN_CACHE_DIR", "the user's cache directory", "where compiled kernels are kept"),
        Variable("FLASHGEN_CACHE_SIZE", "1GiB", "soft cap on the cache, in bytes (K, M, G, T are understood)"),
        Variable("FLASHGEN_CACHE_SHARED", "0", "1 trusts everyone who can write to the cache directory"),
        Variable(
            "FLASHGEN_LOCK_TIMEOUT",
            "600",
            "seconds to wait for another process that compiles the same kernel",
        ),
        Variable(
            "FLASHGEN_DUMP_DIR",
            "not set",
            "directory that receives .cu, .ptx and .cubin of all that is compiled",
        ),
        Variable(
            "FLASHGEN_OVERRIDE_DIR",
            "not set",
            "directory whose <kernel name>.cu replaces the rendered source",
        ),
        Variable("FLASHGEN_TUNED", "1", "0 ignores the schedules that flashgen tune found"),
        Variable("FLASHGEN_CXX", "the first of c++, g++, clang++ found", "C++ compiler of the emulator"),
        Variable(
            "FLASHGEN_SPIN_LIMIT",
            "10",
            "seconds of CPU time that emulated threads may spin before it is a livelock; 0 for no limit",
        ),
    )
}


def cache_dir() -> Path:
    """The root of the kernel cache; it may not exist yet."""
    return _directory("FLASHGEN_CACHE_DIR") or _user_cache() / "flashgen"


def cache_size() -> int:
    """Soft cap on the kernel cache, in bytes."""
    text = _read("FLASHGEN_CACHE_SIZE")
    if text is None:
        return 2**30
    digits = text.rstrip("BbIiKkMmGgTt ")
    unit = _UNITS.get(text[len(digits) :].strip().upper())
    if not (digits.isascii() and digits.isdigit()) or unit is None:
        raise _wrong("FLASHGEN_CACHE_SIZE", text, "a whole number of bytes, such as 1073741824 or 1GiB")
    return int(digits) * unit


def cache_shared() -> bool:
    """Whether cache entries that other users could have written are trusted."""
    return _flag("FLASHGEN_CACHE_SHARED")


def lock_timeout() -> float:
    """Seconds to wait for another process that compiles the same kernel, before compiling it here too."""
    return _seconds("FLASHGEN_LOCK_TIMEOUT", 600.0)


def spin_limit() -> float:
    """Seconds of processor time that emulated threads may run while nothing comes of it; 0 for no limit."""
    return _seconds("FLASHGEN_SPIN_LIMIT", 10.0)


def dump_dir() -> Path | None:
    """Where to write the source, PTX and cubin of everything that is compiled."""
    return _directory("FLASHGEN_DUMP_DIR")


def override_dir() -> Path | None:
    """Where kernel authors keep edited sources that replace the rendered ones; it must exist."""
    path = _directory("FLASHGEN_OVERRIDE_DIR")
    if path is not None and not path.is_dir():
        raise _wrong("FLASHGEN_OVERRIDE_DIR", str(path), "the path of a directory that exists, or unset it")
    return path


def use_tuned() -> bool:
    """Whether builds for this machine's GPU use schedules that were tuned on it."""
    return _flag("FLASHGEN_TUNED", "1")


def cxx() -> str | None:
    """The C++ compiler that builds emulated kernels: one command or path, without options."""
    return _read("FLASHGEN_CXX")


def _read(name: str) -> str | None:
    # An empty variable counts as unset, as shells that export defaults leave them.
    return os.environ.get(name, "").strip() or None


def _directory(name: str) -> Path | None:
    text = _read(name)
    if text is None:
        return None
    try:
        path = Path(text).expanduser().absolute()
        occupied = path.exists() and not path.is_dir()
    except (RuntimeError, ValueError, OSError) as error:
        raise _wrong(name, text, f"the path of a directory ({show_error(error)})") from None
    if occupied:
        raise _wrong(name, text, "the path of a directory; a file is there now")
    return path


def _seconds(name: str, default: float) -> float:
    text = _read(name)
    if text is None:
        return default
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= 1e9:
        raise _wrong(name, text, f"a number of seconds that is not negative, such as {default:g}")
    return seconds


def _flag(name: str, default: str = "") -> bool:
    text = (_read(name) or default).lower()
    if text not in _TRUE + _FALSE:
        raise _wrong(name, text, "1 or 0")
    return text in _TRUE


def _user_cache() -> Path:
    # By hand: a library for these lines would cost half the time that a warm build may take.
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches"
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG rules: a relative path is to be ignored.
    return Path(xdg) if os.path.isabs(xdg) else Path.home() / ".cache"


def _wrong(name: str, value: str, expected: str) -> SpecError:
    return SpecError(f"{name}={show(value)} is not usable; set it to {expected}")
