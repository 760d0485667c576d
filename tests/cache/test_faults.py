"""Whatever the disk and the locks answer, the caller gets the kernel, and hears of it once."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from flashgen.cache import Cache, cache, default_cache
from flashgen.errors import CacheError

ERRNOS = [errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EACCES, errno.EIO, errno.ESTALE]
WRITING = ["open", "mkdir", "fchmod", "write", "fsync", "replace", "listdir"]
READING = ["open", "lstat", "fstat", "read"]


def fail(monkeypatch, module, name, number, place):
    """Let ``module.name`` fail with ``number`` for descriptors, and for paths inside ``place``."""
    original = getattr(module, name)

    def failing(target, *args, **kwargs):
        if isinstance(target, int) or str(target).startswith(str(place)):
            raise OSError(number, os.strerror(number), None if isinstance(target, int) else str(target))
        return original(target, *args, **kwargs)

    monkeypatch.setattr(module, name, failing)


@pytest.mark.parametrize("number", ERRNOS, ids=errno.errorcode.get)
@pytest.mark.parametrize("call", WRITING)
def test_a_fault_while_publishing_costs_only_the_entry(
    cache: Cache, make_binary, make_key, monkeypatch, warnings_of, call, number
):
    with monkeypatch.context() as patch:
        fail(patch, os, call, number, cache.root)
        assert cache.obtain(make_key(1), make_binary) == (make_binary(), False)
        # From memory now, as often as it is asked for.
        assert cache.obtain(make_key(1), pytest.fail) == (make_binary(), True)
        assert cache.obtain(make_key(2), make_binary) == (make_binary(), False)
    (warning,) = warnings_of()
    assert os.strerror(number) in warning
    assert "FLASHGEN_CACHE_DIR" in warning
    # Nothing half-done is found by the next process, nor left over.
    assert Cache(cache.root).get(make_key(1)) in (None, make_binary())
    assert cache.verify().ok
    assert not list((cache.root / "tmp").glob("*"))


@pytest.mark.parametrize("number", ERRNOS, ids=errno.errorcode.get)
@pytest.mark.parametrize("call", READING)
def test_a_fault_while_reading_is_a_miss(cache: Cache, make_binary, make_key, monkeypatch, warnings_of, call, number):
    cache.put(make_key(1), make_binary(1))
    reader = Cache(cache.root)
    with monkeypatch.context() as patch:
        fail(patch, os, call, number, cache.root)
        assert reader.obtain(make_key(1), lambda: make_binary(2)) == (make_binary(2), False)
    assert len([w for w in warnings_of() if "does not work" in w]) == 1
    assert len(warnings_of()) <= 2
    # The entry is not to blame, and stays.
    assert Cache(cache.root).get(make_key(1)) in (make_binary(1), make_binary(2))


@pytest.mark.parametrize("number", [*ERRNOS, errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP], ids=errno.errorcode.get)
@pytest.mark.parametrize("call", ["open", "mkdir", "flock", "stat"])
def test_without_locks_kernels_are_compiled_and_shared_all_the_same(
    cache: Cache, lock_root: Path, make_binary, make_key, monkeypatch, warnings_of, call, number
):
    with monkeypatch.context() as patch:
        # No lock directory anywhere, not only where the test keeps its own.
        for place in (lock_root, Path("/tmp/flashgen-")) if call != "flock" else (lock_root,):
            fail(patch, fcntl if call == "flock" else os, call, number, place)
        assert cache.obtain(make_key(1), make_binary) == (make_binary(), False)
        assert cache.obtain(make_key(2), make_binary) == (make_binary(), False)
    (warning,) = warnings_of()
    assert "without waiting for other processes" in warning
    assert Cache(cache.root).get(make_key(1)) == make_binary()


def test_a_full_disk_takes_a_part_of_a_write_first(cache: Cache, make_binary, make_key, monkeypatch):
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, bytes(data[:100])))
    cache.put(make_key(1), make_binary(size=1000))
    assert Cache(cache.root).get(make_key(1)) == make_binary(size=1000)


def test_a_fault_of_the_last_close_is_noticed_before_the_rename(
    cache: Cache, make_binary, make_key, monkeypatch, warnings_of
):
    close = os.close

    def closes_badly(descriptor):
        name = os.readlink(f"/proc/self/fd/{descriptor}")
        close(descriptor)
        if name.startswith(str(cache.root)):
            raise OSError(errno.EDQUOT, "quota exceeded")

    with monkeypatch.context() as patch:
        patch.setattr(os, "close", closes_badly)
        assert cache.obtain(make_key(1), make_binary) == (make_binary(), False)
    assert "quota exceeded" in warnings_of()[0]
    assert not list((cache.root / "entries").glob("*"))


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP])
def test_a_file_system_that_cannot_sync_directories_is_no_fault(
    cache: Cache, make_binary, make_key, monkeypatch, warnings_of, number
):
    fsync = os.fsync

    def sync_files_only(descriptor):
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(number, "no")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", sync_files_only)
    cache.put(make_key(1), make_binary())
    assert warnings_of() == []


def test_a_file_in_place_of_the_directory_fails_no_call(tmp_path, make_binary, make_key, warnings_of):
    (tmp_path / "file").write_text("mine")
    broken = Cache(tmp_path / "file")
    assert broken.obtain(make_key(1), make_binary) == (make_binary(), False)
    assert len(warnings_of()) == 1
    assert (tmp_path / "file").read_text() == "mine"
    with pytest.raises(CacheError, match="ot a directory"):
        broken.clear()
    deeper = Cache(tmp_path / "file" / "below")
    assert deeper.obtain(make_key(1), make_binary) == (make_binary(), False)


def test_a_dangling_link_in_place_of_the_directory_fails_no_call(tmp_path, make_binary, make_key, warnings_of):
    (tmp_path / "link").symlink_to(tmp_path / "unmounted")
    assert Cache(tmp_path / "link").obtain(make_key(1), make_binary) == (make_binary(), False)
    assert len(warnings_of()) == 1


def test_a_cache_deleted_while_in_use_is_made_anew(cache: Cache, make_binary, make_key):
    import shutil

    cache.put(make_key(1), make_binary())
    shutil.rmtree(cache.root)
    cache.put(make_key(2), make_binary())
    assert Cache(cache.root).get(make_key(2)) == make_binary()


def test_without_a_home_directory_kernels_stay_in_memory(make_binary, make_key, monkeypatch, warnings_of):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(cache.settings, "cache_dir", homeless)
    original = os.mkdir

    def mkdir(path, *args, **kwargs):
        # As for a user who is not root.
        if str(path).startswith("/nonexistent"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        original(path, *args, **kwargs)

    monkeypatch.setattr(os, "mkdir", mkdir)
    assert default_cache().obtain(make_key(1), make_binary) == (make_binary(), False)
    assert default_cache().obtain(make_key(1), pytest.fail) == (make_binary(), True)
    assert "FLASHGEN_CACHE_DIR" in warnings_of()[0]


def test_reports_for_people_say_that_the_disk_failed(cache: Cache, make_binary, make_key, monkeypatch):
    cache.put(make_key(1), make_binary())
    fail(monkeypatch, os, "listdir", errno.EIO, cache.root)
    for look in (cache.info, cache.verify, cache.clear):
        with pytest.raises(CacheError, match="cannot be read"):
            look()
