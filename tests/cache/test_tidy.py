from __future__ import annotations

import os
import time

from flashgen.cache import Cache, tidy


def kept(cache, make_key, count):
    return [i for i in range(count) if cache._store.path(make_key(i)).exists()]


def fill(cache, make_binary, make_key, count):
    """Entries of about 10 kB, each last used a minute after the one before."""
    for i in range(count):
        cache.put(make_key(i), make_binary(i, 10_000))
        used = time.time() - 60 * (count + 10 - i)
        os.utime(cache._store.path(make_key(i)), (used, used))


def test_the_entries_used_longest_ago_go_first(cache: Cache, make_binary, make_key, monkeypatch):
    fill(cache, make_binary, make_key, 6)
    # Number 0 is the oldest, but it is read again.
    assert Cache(cache.root).get(make_key(0)) is not None
    monkeypatch.setenv("FLASHGEN_CACHE_SIZE", "44000")
    cache.put(make_key(6), make_binary(6, 10_000))
    assert kept(cache, make_key, 7) == [0, 4, 5, 6]
    assert cache.info().bytes <= 44_000


def test_the_new_entry_stays_even_if_it_alone_is_too_large(cache: Cache, make_binary, make_key, monkeypatch):
    monkeypatch.setenv("FLASHGEN_CACHE_SIZE", "5K")
    cache.put(make_key(0), make_binary(0, 10_000))
    cache.put(make_key(1), make_binary(1, 10_000))
    assert kept(cache, make_key, 2) == [1]


def test_a_cache_far_below_its_limit_is_looked_through_seldom(cache: Cache, make_binary, make_key, monkeypatch):
    looks = []
    evict = tidy.evict
    monkeypatch.setattr(tidy, "evict", lambda *args, **kwargs: (looks.append(args), evict(*args, **kwargs)))
    # A look at the first publication, and one after each 64th of the limit.
    monkeypatch.setenv("FLASHGEN_CACHE_SIZE", str(64 * 45_000))
    fill(cache, make_binary, make_key, 11)
    assert len(looks) == 3


def test_a_full_cache_exceeds_its_limit_by_a_64th_at_most(cache: Cache, make_binary, make_key, monkeypatch):
    monkeypatch.setenv("FLASHGEN_CACHE_SIZE", "100K")
    for i in range(300):
        cache.put(make_key(i), make_binary(i, 500))
        assert cache.info().bytes <= 100 * 1024 * 65 / 64


def test_reading_renews_the_time_of_use_at_most_once_a_minute(cache, make_binary, make_key, monkeypatch):
    cache.put(make_key(1), make_binary())
    path = cache._store.path(make_key(1))
    changed = os.stat(path).st_mtime_ns
    utime, renewals = os.utime, []

    def counted(*args, **kwargs):
        renewals.append(kwargs)
        utime(*args, **kwargs)

    for age, renewed in ((30, 0), (90, 1)):
        utime(path, ns=(time.time_ns() - age * 10**9, changed))
        renewals.clear()
        # Counted, because the file system may renew the time by a rule of its own (relatime).
        with monkeypatch.context() as patch:
            patch.setattr(os, "utime", counted)
            Cache(cache.root).get(make_key(1))
        assert len(renewals) == renewed
        assert os.stat(path).st_mtime_ns == changed


def test_listing_all_entries_does_not_count_as_use(cache: Cache, make_binary, make_key):
    fill(cache, make_binary, make_key, 3)
    before = [os.stat(cache._store.path(make_key(i))).st_atime_ns for i in range(3)]
    cache.verify()
    cache.info()
    assert [os.stat(cache._store.path(make_key(i))).st_atime_ns for i in range(3)] == before


def test_an_entry_that_another_process_evicted_counts_as_freed(cache: Cache, make_binary, make_key, monkeypatch):
    fill(cache, make_binary, make_key, 4)
    unlink = os.unlink

    def raced(path, **kwargs):
        unlink(path)
        unlink(path, **kwargs)

    monkeypatch.setattr(os, "unlink", raced)
    tidy.evict(cache.root / "entries", 25_000, keep="")
    assert kept(cache, make_key, 4) == [2, 3]


def test_an_entry_used_since_the_scan_stays(cache: Cache, make_binary, make_key):
    fill(cache, make_binary, make_key, 1)
    (file,) = tidy.files_in(cache.root / "entries", tidy.ENTRY_SUFFIX)
    os.utime(file.path)
    assert not tidy.remove(file)
    assert file.path.exists()


def test_entries_that_cannot_be_deleted_do_not_stop_eviction(cache: Cache, make_binary, make_key, monkeypatch):
    fill(cache, make_binary, make_key, 4)
    unlink = os.unlink

    def refuse(path, **kwargs):
        if str(path) == str(cache._store.path(make_key(0))):
            raise PermissionError(13, "not yours")
        unlink(path, **kwargs)

    monkeypatch.setattr(os, "unlink", refuse)
    tidy.evict(cache.root / "entries", 25_000, keep="")
    assert kept(cache, make_key, 4) == [0, 3]


def test_eviction_by_many_processes_at_once_harms_nobody(cache, make_binary, make_key, monkeypatch, children):
    monkeypatch.setenv("FLASHGEN_CACHE_SIZE", "60K")

    def work(first):
        mine = Cache(cache.root)
        for i in range(first, first + 20):
            mine.put(make_key(i), make_binary(i, 10_000))
            assert mine.get(make_key(i)) == make_binary(i, 10_000)

    for first in range(0, 80, 20):
        children.run(lambda first=first: work(first))
    assert children.wait_all() == [0] * 4
    assert cache.verify().ok
    assert 1 <= cache.info().entries <= 9


def test_a_workspace_is_private_and_gone_afterwards(cache: Cache):
    before = os.umask(0)
    try:
        with cache.workspace() as directory:
            assert directory.parent == cache.root / "tmp"
            assert directory.stat().st_mode & 0o777 == 0o700
            (directory / "file").write_text("x")
    finally:
        os.umask(before)
    assert list((cache.root / "tmp").iterdir()) == []


def test_without_a_disk_for_the_cache_a_workspace_is_elsewhere(tmp_path):
    (tmp_path / "file").write_text("")
    with Cache(tmp_path / "file" / "cache").workspace() as directory:
        (directory / "file").write_text("x")
        assert directory.stat().st_mode & 0o777 == 0o700
    assert not directory.exists()


def test_the_workspace_of_a_killed_process_is_swept_and_a_new_one_stays(cache: Cache, make_binary, make_key, children):
    def die_at_work():
        with cache.workspace() as directory:
            (directory / "file").write_text("x")
            os.kill(os.getpid(), 9)

    for _ in range(2):
        children.wait(children.run(die_at_work))
    old, new = (cache.root / "tmp").iterdir()
    os.utime(old, (0, 0))
    # Only the first publication of a process sweeps.
    Cache(cache.root).put(make_key(1), make_binary())
    assert list((cache.root / "tmp").iterdir()) == [new]
    cache.clear()
    assert new.exists()
