"""Small facts kept on disk between processes: finding them out again would outlast a warm build.

A note counts only if it is whole and nobody else could have written it. No disk fault reaches the caller.
"""

from __future__ import annotations

import hashlib
import os
import stat
from contextlib import suppress
from pathlib import Path

from flashgen import settings

#: Notes of one kind; beyond that the oldest go.
_KEPT = 256


def digest(*parts: str) -> str:
    """A name for what the parts say, in hex."""
    result = hashlib.sha256(usedforsecurity=False)
    for part in parts:
        data = part.encode("utf-8", "surrogatepass")
        result.update(len(data).to_bytes(8, "big") + data)
    return result.hexdigest()


def recall(kind: str, name: str, condition: str) -> str | None:
    """The note of that name, if it was taken under the same condition."""
    data = _read(settings.cache_dir() / kind / name)
    if data is None:
        return None
    seal, _, text = data.decode("utf-8", "replace").partition("\n")
    # The seal also turns away a note that was cut short, or moved here from another name.
    return text if seal == digest(kind, name, condition, text) else None


def remember(kind: str, name: str, condition: str, text: str) -> None:
    """Take a note, in place of the one of that name."""
    import tempfile

    root = settings.cache_dir()
    directory = root / kind
    try:
        root.parent.mkdir(parents=True, exist_ok=True)
        for path in (root, directory):
            path.mkdir(mode=0o700, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=directory)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8", newline="\n") as file:
                file.write(f"{digest(kind, name, condition, text)}\n{text}")
            # Readers find the old note or the new one, never half of it.
            os.replace(temporary, directory / name)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            raise
        _drop_oldest(directory)
    except OSError:
        # A disk that cannot be written costs time, never the build.
        return


def _read(path: Path) -> bytes | None:
    # Not to be followed, not to be waited for: a planted link or FIFO.
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    try:
        descriptor = os.open(path, flags)
    except OSError:
        return None
    try:
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(file.fileno())
            private = status.st_uid == os.geteuid() and not status.st_mode & 0o022 and status.st_nlink == 1
            return file.read() if stat.S_ISREG(status.st_mode) and private else None
    except OSError:
        return None


def _drop_oldest(directory: Path) -> None:
    with os.scandir(directory) as listing:
        files = sorted(listing, key=lambda file: file.stat(follow_symlinks=False).st_mtime_ns)
    for file in files[:-_KEPT]:
        with suppress(OSError):
            os.unlink(file.path)
