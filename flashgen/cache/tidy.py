"""Keeping the cache small: old temporary files, damaged entries, and the entries used longest ago."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

ENTRY_SUFFIX = ".entry"
TEMPORARY_SUFFIX = ".tmp"
BAD_SUFFIX = ".bad"

#: A killed writer leaves its temporary file; nobody writes one for so long.
_TEMPORARY_SECONDS = 3600.0
#: Damaged entries are kept as evidence, not as an archive.
_BAD_KEPT = 16


class File(NamedTuple):
    """A file of the cache, as seen in one look."""

    path: Path
    status: os.stat_result


def files_in(directory: Path, suffix: str) -> Iterator[File]:
    """The files in ``directory`` that are the cache's own, by name; none if it is not a real directory."""
    try:
        # A link in its place would make clear() delete files somewhere else.
        if not stat.S_ISDIR(os.lstat(directory).st_mode):
            return
        names = os.listdir(directory)
    except FileNotFoundError:
        return
    for name in sorted(names):
        if name.endswith(suffix):
            # Other processes evict and publish meanwhile.
            with suppress(FileNotFoundError):
                path = directory / name
                yield File(path, os.lstat(path))


def sweep_temporary(directory: Path) -> None:
    """Remove temporary files and directories that a killed process left behind."""
    oldest = time.time() - _TEMPORARY_SECONDS
    for file in files_in(directory, TEMPORARY_SUFFIX):
        if file.status.st_mtime >= oldest:
            continue
        if stat.S_ISDIR(file.status.st_mode):
            remove_tree(file.path)
        else:
            remove(file)


def keep_newest_bad(directory: Path) -> None:
    """Remove all but the newest damaged entries."""
    files = sorted(files_in(directory, BAD_SUFFIX), key=lambda file: file.status.st_ctime_ns)
    for file in files[:-_BAD_KEPT]:
        remove(file)


def evict(directory: Path, limit: int, *, keep: str) -> None:
    """Remove the entries used longest ago until the rest takes ``limit`` bytes; never ``keep``."""
    files = sorted(files_in(directory, ENTRY_SUFFIX), key=lambda file: file.status.st_atime_ns)
    total = sum(file.status.st_size for file in files)
    for file in files:
        if total <= limit:
            return
        # The limit is soft: the kernel in use stays, even if it alone is larger.
        if file.path.name != keep and remove(file):
            total -= file.status.st_size


def remove_tree(directory: Path) -> None:
    """Remove a directory of our own and what is in it, as far as that can be done; links are not followed."""
    # Imported here: a warm build has no use for it.
    import shutil

    shutil.rmtree(directory, ignore_errors=True)


def remove(file: File) -> bool:
    """Unlink ``file`` unless it has changed since we looked; whether its bytes are free now."""
    try:
        now = os.lstat(file.path)
        # Published anew or used since the scan: it is not the oldest any more.
        if not os.path.samestat(now, file.status) or now.st_atime_ns != file.status.st_atime_ns:
            return False
        os.unlink(file.path)
    except FileNotFoundError:
        # Another process evicted it first: as good as done by us.
        return True
    except OSError:
        # Not ours to delete (shared or read-only caches): try the next one.
        return False
    return True
