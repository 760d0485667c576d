"""Who may have written what we are about to load: code from the cache runs with the caller's rights."""

from __future__ import annotations

import os
import stat
from functools import lru_cache
from pathlib import Path

from flashgen import settings
from flashgen.errors import CacheError

_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_SHARE = "set FLASHGEN_CACHE_SHARED=1 to trust everyone who can write there"


def check_root(path: Path) -> None:
    """Raise CacheError when someone else could have put files into ``path``, or another directory in its place.

    Whoever can write to a directory above it can rename what lies there. A sticky directory, such as /tmp, is safe:
    there only owners rename.
    """
    # First, because this also finds links that lead in a circle.
    check_directory(path)
    if not settings.cache_shared():
        if path.is_symlink():
            _check_above(path.parent / os.readlink(path), set())
        _check_above(path, set())


def _check_above(path: Path, checked: set[Path]) -> None:
    """Check the directories that lead to ``path``, and those that lead to where links among them point."""
    for directory in path.parents:
        if directory in checked:
            return
        checked.add(directory)
        status = os.lstat(directory)
        _require_trusted_owner(directory, status)
        if stat.S_ISLNK(status.st_mode):
            # The name below the target only makes the target itself one of the directories above.
            _check_above(directory.parent / os.readlink(directory) / path.name, checked)
        elif _others_can_write(status) and not status.st_mode & stat.S_ISVTX:
            raise CacheError(
                f"{directory}, a directory above the cache, has mode {stat.S_IMODE(status.st_mode):04o}, so other"
                f" users can rename what is in it and put a cache of theirs there; run `chmod go-w '{directory}'`,"
                f" set FLASHGEN_CACHE_DIR to a directory elsewhere, or {_SHARE}"
            )


def _require_trusted_owner(directory: Path, status: os.stat_result) -> None:
    # The owner of / is root, also in a user namespace that shows root as nobody.
    if status.st_uid not in (os.geteuid(), 0, os.stat("/").st_uid):
        raise CacheError(
            f"{directory}, a directory above the cache, belongs to user {status.st_uid}, not to you (user"
            f" {os.geteuid()}) or root, who can rename what is in it and put a cache of theirs there; set"
            f" FLASHGEN_CACHE_DIR to a directory elsewhere, or {_SHARE}"
        )


def _others_can_write(status: os.stat_result) -> bool:
    if status.st_mode & stat.S_IWOTH:
        return True
    return bool(status.st_mode & stat.S_IWGRP) and not _is_private_group(status.st_gid)


@lru_cache(maxsize=64)
def _is_private_group(group: int) -> bool:
    """Whether the group is the user's own and nobody else's, as where new files get mode 0664."""
    import grp
    import pwd

    try:
        user, found = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except KeyError:
        return False
    return group != 0 and found.gr_name == user.pw_name and user.pw_gid == group and set(found.gr_mem) <= {user.pw_name}


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
