"""The cache directory: one file per entry, published whole or not at all, checked whenever it is read.

    <root>/entries/<key>.entry   what get() finds
    <root>/tmp/*.tmp             entries being written, and directories for work in progress
    <root>/bad/*.bad             damaged entries, kept for inspection

OSError leaves these functions as it is; the cache above decides that no fault of the disk reaches its caller.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from flashgen import settings
from flashgen.cache import entry, tidy
from flashgen.cache.guard import check_directory, check_root, open_entry
from flashgen.cache.talk import warn

if TYPE_CHECKING:
    from flashgen.compile.binary import Binary

#: Renewing the time of use on every read would make each of a node's ranks write to the file system.
_TOUCH_AFTER_SECONDS = 60.0
#: A store looks for entries to evict after it has published this fraction of the limit: a look at every publication
#: would make thousands of kernels take quadratic time.
_EVICT_AFTER = 1 / 64


class Store:
    """Reads and publishes entries below ``root``; makes nothing before the first publication."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.entries = root / "entries"
        self.temporary = root / "tmp"
        self.bad = root / "bad"
        #: Bytes published since the last look for entries to evict; None before the first look.
        self._published: int | None = None

    def path(self, key: str) -> Path:
        """The file of ``key``, whether or not it exists."""
        return self.entries / (key + tidy.ENTRY_SUFFIX)

    def read(self, key: str) -> Binary | None:
        """The binary of ``key``; None when there is none, or it was damaged (and is now out of the way)."""
        path = self.path(key)
        try:
            check_root(self.root)
            check_directory(self.entries)
            descriptor = open_entry(path)
        except FileNotFoundError:
            return None
        try:
            # Before reading, which may renew the time by the file system's own rule.
            _touch(descriptor)
            binary = entry.decode(key, read_all(descriptor))
        except entry.DamagedEntryError as damage:
            # Left in place, it would cost every process this check and this warning.
            fate = self.set_aside(path, os.fstat(descriptor))
            warn(f"cache entry {path} is damaged: {damage}; {fate}, and counts as missing")
            return None
        finally:
            os.close(descriptor)
        return binary

    def publish(self, key: str, binary: Binary, build_id: str) -> None:
        """Put ``binary`` under ``key``; readers see the old state or the whole entry, also after a crash."""
        mode = self._make_directories()
        data = entry.encode(key, binary, build_id)
        path = self._temporary_path(key[:16])
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(path, flags, 0o600)
        try:
            try:
                os.fchmod(descriptor, mode)
                _write_all(descriptor, data)
                # Without it, a power cut after the rename can leave the right name on an empty file.
                os.fsync(descriptor)
            finally:
                # Network file systems report a full disk here at the latest, still before the rename.
                os.close(descriptor)
            os.replace(path, self.path(key))
        except BaseException:
            # A full disk must not get fuller with every try.
            with suppress(OSError):
                os.unlink(path)
            raise
        _sync_directory(self.entries)
        self._keep_tidy(key, len(data))

    @contextmanager
    def workspace(self) -> Iterator[Path]:
        """A directory that only we can write to, gone afterwards; one of a killed process is swept later."""
        self._make_directories()
        path = self._temporary_path("work")
        os.mkdir(path, 0o700)
        try:
            yield path
        finally:
            tidy.remove_tree(path)

    def _temporary_path(self, label: str) -> Path:
        # Process id and random bytes: neither two threads nor two hosts may meet in one temporary file.
        return self.temporary / f"{label}.{os.getpid()}.{os.urandom(8).hex()}{tidy.TEMPORARY_SUFFIX}"

    def set_aside(self, path: Path, status: os.stat_result | None = None) -> str:
        """Move an entry to ``bad/``, and say in words what became of it."""
        target = self.bad / f"{path.stem}.{os.urandom(4).hex()}{tidy.BAD_SUFFIX}"
        try:
            # Another process may have replaced it by a good one since we read it.
            if status is not None and not os.path.samestat(status, os.lstat(path)):
                return "it has been replaced already"
            _make_directory(self.bad, self._directory_mode())
            os.replace(path, target)
        except OSError as error:
            return f"it could not be moved aside ({error})"
        return f"it was moved to {target}"

    def _make_directories(self) -> int:
        """Make what is missing; the mode for new files."""
        if not self.root.is_dir():
            _make_parents(self.root)
            _make_directory(self.root, 0o700)
        check_root(self.root)
        mode = self._directory_mode()
        for directory in (self.entries, self.temporary):
            _make_directory(directory, mode)
            check_directory(directory)
        return mode & 0o666

    def _directory_mode(self) -> int:
        # A shared directory's own mode says who may read and write; otherwise it is us alone.
        return stat.S_IMODE(os.stat(self.root).st_mode) if settings.cache_shared() else 0o700

    def _keep_tidy(self, key: str, published: int) -> None:
        limit = settings.cache_size()
        if self._published is None:
            tidy.sweep_temporary(self.temporary)
            tidy.keep_newest_bad(self.bad)
        elif self._published + published < limit * _EVICT_AFTER:
            self._published += published
            return
        self._published = 0
        tidy.evict(self.entries, limit, keep=self.path(key).name)


def read_all(descriptor: int) -> bytes:
    """The whole file, or DamagedEntryError when it is too long to be an entry."""
    left = os.fstat(descriptor).st_size
    if left > entry.LARGEST_ENTRY:
        raise entry.DamagedEntryError(f"it has {left} bytes, more than any entry")
    chunks = []
    while left > 0:
        chunk = os.read(descriptor, left)
        if not chunk:
            break
        chunks.append(chunk)
        left -= len(chunk)
    return b"".join(chunks)


def _write_all(descriptor: int, data: bytes) -> None:
    rest = memoryview(data)
    # write() may take a part only, which is how a nearly full disk answers first.
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def _touch(descriptor: int) -> None:
    """Record the use for eviction; by hand, because most file systems are mounted relatime or noatime."""
    status = os.fstat(descriptor)
    now = time.time_ns()
    if now - status.st_atime_ns > _TOUCH_AFTER_SECONDS * 1e9:
        # Read-only caches and other users' entries cannot be touched; they can be used all the same.
        with suppress(OSError):
            os.utime(descriptor, ns=(now, status.st_mtime_ns))


def _make_parents(path: Path) -> None:
    """Make what is missing above ``path``, ours alone: under some umasks others could write to it otherwise."""
    if not path.parent.is_dir():
        _make_parents(path.parent)
        _make_directory(path.parent, 0o700)


def _make_directory(path: Path, mode: int) -> None:
    try:
        os.mkdir(path, mode)
    except FileExistsError:
        return
    if mode != 0o700:
        # mkdir is subject to the umask, which would hide a shared cache from the group it is shared with.
        os.chmod(path, mode)


def _sync_directory(path: Path) -> None:
    """Make the rename itself last; where the file system cannot, a crash costs the entry, nothing more."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)
