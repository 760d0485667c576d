"""The kernel cache: memory, then disk, then one compile among all threads and processes of the machine.

It keeps cubins, the sources they come from, and the libraries of the emulator.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from flashgen import settings
from flashgen.cache import fork
from flashgen.cache.key import cache_key, check_key
from flashgen.cache.store import Store
from flashgen.cache.talk import warn
from flashgen.errors import CacheError

if TYPE_CHECKING:
    from flashgen.cache.lock import NodeLock
    from flashgen.cache.report import CacheInfo, CacheReport
    from flashgen.compile.binary import Binary
    from flashgen.render import KernelSource

_Outcome = TypeVar("_Outcome")


class _Flight:
    """A compile under way in this process; other threads that want the same key wait for it."""

    def __init__(self) -> None:
        self.landed = threading.Event()
        self.binary: Binary | None = None
        self.error: Exception | None = None


class Cache:
    """Compiled kernels, kept below ``root`` (by default where the settings say) and in memory.

    No fault of the disk or of locks ever fails a call: the kernel is then compiled and kept in memory, and
    one warning is logged. CacheError is raised only where loading would be unsafe.
    """

    def __init__(self, root: Path | None = None) -> None:
        # Absolute now: a later chdir must not move the cache.
        self.root = Path(root if root is not None else settings.cache_dir()).expanduser().absolute()
        self._store = Store(self.root)
        self._memory: dict[str, Binary] = {}
        self._warned: set[str] = set()
        self.after_fork_in_child()
        fork.protect(self)

    def after_fork_in_child(self) -> None:
        """Start with free locks: the threads that held them or would land the flights are the parent's."""
        self._mutex = threading.Lock()
        self._flights: dict[str, _Flight] = {}

    def get_or_compile(
        self, source: KernelSource, compile_source: Callable[[KernelSource], Binary]
    ) -> tuple[Binary, bool]:
        """The binary of ``source``, and whether it was there already; else ``compile_source`` makes it.

        A RegistersError where it is there, or is now, and is not to be used.
        """
        from flashgen.compile import require_registers

        key, build_id = _key_of(source)
        binary, cached = self.obtain(key, lambda: compile_source(source), build_id)
        require_registers(source.plan, binary)
        return binary, cached

    def obtain(self, key: str, make: Callable[[], Binary], build_id: str = "") -> tuple[Binary, bool]:
        """The binary of ``key``, and whether it was there already; else ``make`` makes it, once."""
        check_key(key)
        while True:
            with self._mutex:
                known = self._memory.get(key)
                if known is not None:
                    return known, True
                flight = self._flights.get(key)
                if flight is None:
                    mine = self._flights[key] = _Flight()
                    break
            flight.landed.wait()
            # A source that does not compile fails the same way for every thread; do not try once per thread.
            if flight.error is not None:
                raise flight.error
            # Neither error nor binary: Ctrl-C ended that thread's compile, and another thread takes over.
            if flight.binary is not None:
                return flight.binary, True
        try:
            mine.binary, cached = self._load_or_make(key, make, build_id)
            self._memory[key] = mine.binary
            return mine.binary, cached
        except Exception as error:
            mine.error = error
            raise
        finally:
            with self._mutex:
                self._flights.pop(key, None)
            mine.landed.set()

    def get(self, key: str) -> Binary | None:
        """The binary of ``key`` from memory or disk; None when there is none that is whole."""
        binary = self._memory.get(check_key(key))
        if binary is None:
            binary = self._read(key)
            if binary is not None:
                self._memory[key] = binary
        return binary

    def holds(self, source: KernelSource) -> bool:
        """Whether the binary of ``source`` is there, in memory from now on."""
        return self.get(_key_of(source)[0]) is not None

    def put(self, key: str, binary: Binary, build_id: str = "") -> None:
        """Keep ``binary`` under ``key``, in memory and, if the disk takes it, for other processes."""
        self._memory[check_key(key)] = binary
        self._publish(key, binary, build_id)

    def discard(self, key: str) -> None:
        """Forget ``key`` and move its entry aside: for a binary that the driver refuses to load."""
        self._memory.pop(check_key(key), None)
        path = self._store.path(key)
        if os.path.lexists(path):
            warn(f"cache entry {path} was rejected; {self._store.set_aside(path)}")

    def remove(self, key: str) -> bool:
        """Remove the entry of ``key``, which is whole but unwanted; whether there was one."""
        self._memory.pop(check_key(key), None)
        try:
            os.unlink(self._store.path(key))
        except FileNotFoundError:
            return False
        except OSError as error:
            self._disk_failed(error)
            return False
        return True

    def discard_source(self, source: KernelSource) -> None:
        """Forget the binary of ``source``, for whoever compiles it next."""
        self.discard(_key_of(source)[0])

    @contextmanager
    def workspace(self) -> Iterator[Path]:
        """A directory that nobody else can write to, for files on their way into or out of the cache."""
        with ExitStack() as stack:
            try:
                path = stack.enter_context(self._store.workspace())
            except OSError:
                # Where the cache cannot be written, which a publication reports.
                import tempfile

                path = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="flashgen-")))
            yield path

    def info(self) -> CacheInfo:
        """The number and size of the entries on disk, and which compilers made them."""
        from flashgen.cache import audit

        return self._for_people(audit.info)

    def verify(self) -> CacheReport:
        """Check every byte of every entry on disk; damaged ones are moved aside and reported."""
        from flashgen.cache import audit

        return self._for_people(audit.verify)

    def clear(self) -> int:
        """Remove all entries, on disk and in this process's memory; how many were removed on disk."""
        from flashgen.cache import audit

        self._memory.clear()
        return self._for_people(audit.clear)

    def _load_or_make(self, key: str, make: Callable[[], Binary], build_id: str) -> tuple[Binary, bool]:
        found = self._read(key)
        if found is not None:
            return found, True
        with ExitStack() as stack:
            lock = self._lock(key, stack)
            # Another process may have published it while we waited for the lock.
            found = self._read(key)
            if found is not None:
                return found, True
            if lock is not None and lock.results_are_lost():
                # The disk takes nothing: in turn, the last of n processes would wait for n compiles.
                stack.close()
            # From here on our own bytes serve: on network disks others' files can stay invisible for seconds.
            binary = make()
            published = self._publish(key, binary, build_id)
            if lock is not None:
                lock.note(published=published)
            return binary, False

    def _lock(self, key: str, stack: ExitStack) -> NodeLock | None:
        # Imported here: only what is not in the cache needs a lock.
        from flashgen.cache.lock import LockUnavailableError, node_lock

        try:
            return stack.enter_context(node_lock(key, settings.lock_timeout()))
        except LockUnavailableError as reason:
            self._warn_once("lock", f"compiling without waiting for other processes: {reason}")
            return None

    def _read(self, key: str) -> Binary | None:
        try:
            return self._store.read(key)
        except OSError as error:
            self._disk_failed(error)
            return None

    def _publish(self, key: str, binary: Binary, build_id: str) -> bool:
        try:
            self._store.publish(key, binary, build_id)
        except OSError as error:
            self._disk_failed(error)
            return False
        return True

    def _disk_failed(self, error: OSError) -> None:
        self._warn_once(
            "disk",
            f"the kernel cache {self.root} does not work ({error}); kernels stay in memory only."
            " Set FLASHGEN_CACHE_DIR to a directory that can be written",
        )

    def _warn_once(self, kind: str, message: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            warn(message)

    def _for_people(self, look: Callable[[Store], _Outcome]) -> _Outcome:
        try:
            return look(self._store)
        except OSError as error:
            raise CacheError(f"the kernel cache {self.root} cannot be read: {error}") from error


_default: dict[Path, Cache] = {}


def _key_of(source: KernelSource) -> tuple[str, str]:
    """The key of a source's binary, and the compiler that it names."""
    from flashgen.compile import compiler_build_id, options_for

    build_id = compiler_build_id()
    return cache_key(source, build_id, options_for(source.plan.arch.name)), build_id


def default_cache() -> Cache:
    """The process's cache for the directory that the settings name now."""
    try:
        root = settings.cache_dir()
    except RuntimeError:
        # No home directory, as for the made-up users of some container platforms. This path cannot be made
        # either, so kernels stay in memory, and the warning says what to set.
        root = Path("/nonexistent/flashgen")
    # setdefault: two threads that come first together must share memory and flights.
    return _default.get(root) or _default.setdefault(root, Cache(root))
