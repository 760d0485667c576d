"""Looking at a whole cache directory, for people: how much is in it, and whether it is sound."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from flashgen.cache import entry, tidy
from flashgen.cache.guard import open_entry
from flashgen.cache.report import BadFile, CacheInfo, CacheReport
from flashgen.cache.store import Store, read_all
from flashgen.compile.binary import DEFAULT_KIND
from flashgen.errors import CacheError


def info(store: Store) -> CacheInfo:
    """Count the entries; contents are not verified."""
    files = list(tidy.files_in(store.entries, tidy.ENTRY_SUFFIX))
    metas = [_meta(file) for file in files]
    builds = {str(meta.get("build_id", "")) for meta in metas} - {""}
    return CacheInfo(
        root=store.root,
        entries=len(files),
        bytes=sum(file.status.st_size for file in files),
        bad=sum(1 for _ in tidy.files_in(store.bad, tidy.BAD_SUFFIX)),
        compilers=tuple(sorted(builds)),
        kinds=dict(sorted(Counter(str(meta.get("kind", DEFAULT_KIND)) for meta in metas if meta).items())),
    )


def verify(store: Store) -> CacheReport:
    """Check every byte of every entry; damaged ones are moved aside."""
    good, bad = 0, []
    for file in tidy.files_in(store.entries, tidy.ENTRY_SUFFIX):
        try:
            with _looking_at(file) as descriptor:
                try:
                    entry.decode(file.path.stem, read_all(descriptor))
                    good += 1
                except entry.DamagedEntryError as damage:
                    fate = store.set_aside(file.path, os.fstat(descriptor))
                    bad.append(BadFile(file.path.name, f"{damage}; {fate}"))
        except FileNotFoundError:
            # Evicted since the directory was listed.
            continue
        except CacheError as error:
            bad.append(BadFile(file.path.name, str(error)))
    return CacheReport(good, tuple(bad))


def clear(store: Store) -> int:
    """Remove every file of the cache, and nothing else; the number of entries removed."""
    # Only old directories go: in a new one a compiler may be at work.
    tidy.sweep_temporary(store.temporary)
    for directory, suffix in ((store.temporary, tidy.TEMPORARY_SUFFIX), (store.bad, tidy.BAD_SUFFIX)):
        for file in tidy.files_in(directory, suffix):
            tidy.remove(file)
    return sum(tidy.remove(file) for file in tidy.files_in(store.entries, tidy.ENTRY_SUFFIX))


def _meta(file: tidy.File) -> dict[str, Any]:
    """What an entry says about itself, unverified; nothing if it cannot be read."""
    try:
        with _looking_at(file) as descriptor:
            # The front of the file only: a large cache is listed without reading its images.
            head = os.read(descriptor, 1 << 13)
            start, stop = entry.meta_span(head)
            if stop > len(head):
                head += os.read(descriptor, stop - len(head))
            return entry.read_meta(head[start:stop])
    except (OSError, CacheError, entry.DamagedEntryError):
        return {}


@contextmanager
def _looking_at(file: tidy.File) -> Iterator[int]:
    """A descriptor of an entry whose time of use stays what it was: after a look at all, all would be new."""
    descriptor = open_entry(file.path)
    try:
        yield descriptor
    finally:
        with suppress(OSError):
            os.utime(descriptor, ns=(file.status.st_atime_ns, file.status.st_mtime_ns))
        os.close(descriptor)
