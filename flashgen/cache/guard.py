"""Who may have written what we are about to load: a cubin from the cache runs with the caller's rights."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from flashgen import settings
from flashgen.errors import CacheError

_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_SHARE = "set FLASHGEN_CACHE_SHARED=1 to trust everyone who can write there"


def check_directory(path: Path) -> None:
    """Raise CacheError when someone else could have put files into ``path``.

    A directory that is not there raises FileNotFoundError. A symbolic link is followed if it is ours: people
    keep ~/.cache on another disk.
    """
    status = os.lstat(path)
    if stat.S_ISLNK(status.st_mode):
        # Someone else's link in a sticky directory such as /tmp could point anywhere, and change at any time.
        _require_owner(path, status, "link")
        status = os.stat(path)
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(f"{path} is not a directory")
    _require_owner(path, status, "directory")
    _require_private(path, status, "directory")


def open_entry(path: Path) -> int:
    """A descriptor to read the entry at ``path`` from, after checking the very file it refers to."""
    # O_NOFOLLOW: a planted link would make us load another file.
    # O_NONBLOCK: opening a FIFO would wait for ever.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        descriptor = os.open(path, flags)
    except OSError:
        if path.is_symlink():
            raise CacheError(f"cache entry {path} is a symbolic link; {_remove(path)}") from None
        raise
    try:
        # fstat, not stat: between a check of the name and the open, the file could be exchanged.
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise CacheError(f"cache entry {path} is not a regular file; {_remove(path)}")
        _require_owner(path, status, "entry")
        _require_private(path, status, "entry")
        # Entries are published by rename and have one name; a second one lets its holder choose what we load.
        if status.st_nlink > 1 and not settings.cache_shared():
            raise CacheError(f"cache entry {path} has {status.st_nlink} hard links, not 1; {_remove(path)}")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _require_owner(path: Path, status: os.stat_result, what: str) -> None:
    if status.st_uid not in (os.geteuid(), 0) and not settings.cache_shared():
        raise CacheError(
            f"cache {what} {path} belongs to user {status.st_uid}, not to you (user {os.geteuid()}) or"
            f" root, so it could hold anything; set FLASHGEN_CACHE_DIR to one of your own, or {_SHARE}"
        )


def _require_private(path: Path, status: os.stat_result, what: str) -> None:
    if status.st_mode & _WRITABLE_BY_OTHERS and not settings.cache_shared():
        raise CacheError(
            f"cache {what} {path} has mode {stat.S_IMODE(status.st_mode):04o}, so other users can write to it"
            f" and could plant kernels; run `chmod go-w '{path}'` if you trust what is there, or {_SHARE}"
        )


def _remove(path: Path) -> str:
    return f"flashgen never makes such a file: find out who did, then remove it (rm '{path}')"
