"""One compile per key and node: flock on files that are never deleted, waited for within a bound."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from flashgen.cache import fork
from flashgen.cache.talk import inform

_FIRST_PAUSE = 0.005
_LONGEST_PAUSE = 0.1
_LOG_EVERY = 10.0
#: So many hex digits of the key name the lock file: at most 4096 files, ever, however many kernels.
_LOCK_NAME_DIGITS = 3


class LockUnavailableError(Exception):
    """The lock could not be had, for the reason in the message; the caller works without it."""


class _HeldDescriptors:
    """Lock files open in this process, to be closed in a forked child."""

    def __init__(self) -> None:
        self._descriptors: set[int] = set()

    def add(self, descriptor: int) -> None:
        # First use, not import: importing flashgen registers nothing.
        fork.protect(self)
        self._descriptors.add(descriptor)

    def close(self, descriptor: int) -> None:
        # In a child forked inside the `with`, the number is closed already and may belong to another file.
        if descriptor in self._descriptors:
            self._descriptors.remove(descriptor)
            # Unlock, not only close: a child forked between our open and `add` keeps the file open, and with
            # it the lock, which belongs to the open file and not to the process.
            _quietly(fcntl.flock, descriptor, fcntl.LOCK_UN)
            _quietly(os.close, descriptor)

    def after_fork_in_child(self) -> None:
        # Close without unlocking: the lock is the parent's. Kept open, it would outlive a killed parent.
        for descriptor in self._descriptors:
            _quietly(os.close, descriptor)
        self._descriptors.clear()


_held = _HeldDescriptors()


@dataclass(frozen=True, slots=True)
class NodeLock:
    """A held lock, and a note in its file from one holder to the next."""

    path: Path
    key: str

    def results_are_lost(self) -> bool:
        """Whether the last holder could not publish this key: then taking turns only adds up the waits."""
        try:
            return self.path.read_bytes() == self.key.encode()
        except OSError:
            return False

    def note(self, *, published: bool) -> None:
        """Tell later holders whether the kernel is on disk for them."""
        if published and not self.results_are_lost():
            return
        try:
            descriptor = os.open(self.path, os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return
        if not published:
            _quietly(os.write, descriptor, self.key.encode())
        _quietly(os.close, descriptor)


@contextmanager
def node_lock(key: str, timeout: float, directory: Path | None = None) -> Iterator[NodeLock]:
    """Hold the lock of ``key`` among all processes of this user on this machine.

    Raises LockUnavailableError after ``timeout`` seconds, or at once where locks do not work.
    """
    try:
        path = (directory or lock_directory()) / (key[:_LOCK_NAME_DIGITS] + ".lock")
        descriptor = _acquire(path, timeout)
    except OSError as error:
        # ENOSYS, ENOLCK, ESTALE, EACCES, ENOSPC ...: without a lock, work is merely done twice.
        raise LockUnavailableError(f"no lock in this place ({error})") from error
    try:
        yield NodeLock(path, key)
    finally:
        _held.close(descriptor)


def lock_directory() -> Path:
    """A directory on this machine, ours alone, for lock files; made if need be.

    Not in the cache: on network file systems flock is missing, slow or private to each client.
    """
    problem: OSError = FileNotFoundError(errno.ENOENT, "no directory for lock files")
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    candidates = [Path(runtime) / "flashgen"] if os.path.isabs(runtime) else []
    for path in [*candidates, Path(f"/tmp/flashgen-{os.geteuid()}")]:
        try:
            _make_private_directory(path)
            return path
        except OSError as error:
            # XDG_RUNTIME_DIR survives `su` and may be another user's, or be gone since logout.
            problem = error
    raise problem


def _make_private_directory(path: Path) -> None:
    with suppress(FileExistsError):
        os.mkdir(path, 0o700)
    status = os.lstat(path)
    # /tmp is everyone's: a directory or link that someone else put there first could hold our locks for ever.
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise PermissionError(errno.EPERM, "it is not a private directory of yours", str(path))


def _acquire(path: Path, timeout: float) -> int:
    start = time.monotonic()
    pause, next_log = _FIRST_PAUSE, _LOG_EVERY
    while True:
        descriptor = _try_lock(path)
        if descriptor is not None:
            return descriptor
        waited = time.monotonic() - start
        if waited >= timeout:
            raise LockUnavailableError(f"another process has held {path} for {waited:.0f} s")
        if waited >= next_log:
            inform(f"waiting for another process to compile this kernel ({waited:.0f} s, lock {path})")
            next_log += _LOG_EVERY
        # Polling, because a blocked flock cannot be given up without signals.
        time.sleep(min(pause, max(timeout - waited, 0)))
        pause = min(pause * 1.5, _LONGEST_PAUSE)


def _try_lock(path: Path) -> int | None:
    """A descriptor that holds the lock, or None while another process does."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    _held.add(descriptor)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # A cleaner of old files may have deleted the name: this lock excludes nobody then; take the new one.
        if _is_current(path, descriptor):
            return descriptor
    except BlockingIOError:
        pass
    except BaseException:
        _held.close(descriptor)
        raise
    _held.close(descriptor)
    return None


def _is_current(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _quietly(function: Callable[..., object], *arguments: object) -> None:
    with suppress(OSError):
        function(*arguments)
