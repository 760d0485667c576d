from __future__ import annotations

import functools
import itertools
import os
import random
import time

import pytest

from flashgen.cache import Cache
from flashgen.cache.tidy import BAD_SUFFIX, TEMPORARY_SUFFIX

STEPS = ("open", "fchmod", "write", "fsync", "close", "replace", "listdir")


def names(directory):
    return sorted(os.listdir(directory)) if directory.exists() else []


def test_nothing_is_made_before_the_first_publication(cache: Cache, make_key):
    assert cache.get(make_key(1)) is None
    assert cache.info().entries == 0
    assert cache.verify().ok
    assert cache.clear() == 0
    assert not cache.root.exists()


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077, 0o277])
def test_files_and_directories_are_private_under_any_umask(cache: Cache, make_binary, make_key, umask):
    before = os.umask(umask)
    try:
        cache.put(make_key(1), make_binary())
    finally:
        os.umask(before)
    for path in (cache.root, cache.root / "entries", cache.root / "tmp"):
        assert path.stat().st_mode & 0o077 == 0
    (file,) = (cache.root / "entries").iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    assert Cache(cache.root).get(make_key(1)) == make_binary()


def test_a_shared_cache_gives_its_own_mode_to_what_is_in_it(tmp_path, monkeypatch, make_binary, make_key):
    monkeypatch.setenv("FLASHGEN_CACHE_SHARED", "1")
    root = tmp_path / "shared"
    root.mkdir()
    root.chmod(0o2770)
    Cache(root).put(make_key(1), make_binary())
    (file,) = (root / "entries").iterdir()
    assert file.stat().st_mode & 0o777 == 0o660
    assert (root / "entries").stat().st_mode & 0o7777 == 0o2770
    assert Cache(root).get(make_key(1)) == make_binary()


def test_a_writer_killed_at_any_step_leaves_no_broken_entry(cache: Cache, make_binary, make_key, children):
    old, new, key = make_binary(1, 5_000), make_binary(2, 90_000), make_key(9)
    cache.put(key, old)
    for step in STEPS:
        original = getattr(os, step)

        def killed(*args, _step=step, _original=original, **kwargs):
            if _step == "write" and len(args[1]) > 1000:
                _original(args[0], args[1][:1000])
            os.kill(os.getpid(), 9)

        def publish(_step=step, _killed=killed):
            setattr(os, _step, _killed)
            Cache(cache.root).put(key, new)

        assert children.wait(children.run(publish)) == -9, step
        assert cache.verify().ok
        assert Cache(cache.root).get(key) in (old, new)
    assert len(names(cache.root / "tmp")) >= 4
    # The next run is not in the way of what the killed ones left.
    Cache(cache.root).put(key, new)
    assert Cache(cache.root).get(key) == new


def test_writers_killed_at_random_moments_never_leave_a_broken_entry(cache: Cache, make_binary, make_key, children):
    chance = random.Random(20)
    binaries = [make_binary(seed, 300_000 + seed) for seed in range(4)]

    def publish_for_ever(first):
        writer = Cache(cache.root)
        for turn in itertools.count(first):
            seed = turn % len(binaries)
            writer.put(make_key(seed), binaries[seed])

    seen = 0
    for turn in range(120):
        # Each begins with another entry: on a busy machine few live long enough for all four.
        pid = children.run(functools.partial(publish_for_ever, turn))
        time.sleep(0.005 + chance.random() * 0.02)
        children.kill(pid)
        report = cache.verify()
        assert report.bad == ()
        seen = max(seen, report.good)
    assert seen == 4
    for seed, binary in enumerate(binaries):
        assert Cache(cache.root).get(make_key(seed)) == binary


def test_content_reaches_the_disk_before_its_name_and_the_name_before_the_end(
    cache: Cache, make_binary, make_key, monkeypatch
):
    calls = []

    def record(name):
        original = getattr(os, name)

        def recorded(target, *args):
            where = os.readlink(f"/proc/self/fd/{target}") if isinstance(target, int) else str(target)
            calls.append((name, os.path.relpath(where, cache.root).split(os.sep)[0]))
            return original(target, *args)

        monkeypatch.setattr(os, name, recorded)

    for name in ("write", "fsync", "replace"):
        record(name)
    cache.put(make_key(1), make_binary())
    assert calls == [("write", "tmp"), ("fsync", "tmp"), ("replace", "tmp"), ("fsync", "entries")]


def test_temporary_files_of_killed_writers_are_swept_after_an_hour(cache: Cache, make_binary, make_key):
    cache.put(make_key(1), make_binary())
    stale, fresh = (cache.root / "tmp" / (name + TEMPORARY_SUFFIX) for name in ("stale", "fresh"))
    for path, age in ((stale, 3700), (fresh, 60)):
        path.write_bytes(b"half")
        os.utime(path, (time.time() - age,) * 2)
    Cache(cache.root).put(make_key(2), make_binary())
    assert names(cache.root / "tmp") == [fresh.name]


def test_a_damaged_entry_is_a_miss_once_and_is_kept_for_inspection(cache, make_binary, make_key, warnings_of):
    key, binary = make_key(4), make_binary()
    cache.put(key, binary)
    (path,) = (cache.root / "entries").iterdir()
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    reader = Cache(cache.root)
    assert reader.get(key) is None
    assert reader.get(key) is None
    assert not path.exists()
    (bad,) = (cache.root / "bad").iterdir()
    assert bad.read_bytes() == bytes(data)
    assert reader.info().bad == 1
    (warning,) = warnings_of()
    assert "checksum does not match" in warning
    assert str(bad) in warning
    assert reader.obtain(key, lambda: binary) == (binary, False)
    assert Cache(cache.root).get(key) == binary


def test_a_damaged_entry_that_cannot_be_moved_is_still_a_miss(cache, make_binary, make_key, warnings_of):
    key, binary = make_key(4), make_binary()
    cache.put(key, binary)
    (path,) = (cache.root / "entries").iterdir()
    path.write_bytes(path.read_bytes()[:-5])
    (cache.root / "bad").write_text("in the way")
    assert Cache(cache.root).obtain(key, lambda: binary) == (binary, False)
    assert "could not be moved" in warnings_of()[0]
    assert Cache(cache.root).get(key) == binary


def test_every_truncation_on_disk_is_a_miss(cache: Cache, make_binary, make_key):
    key = make_key(5)
    cache.put(key, make_binary())
    (path,) = (cache.root / "entries").iterdir()
    whole = path.read_bytes()
    reader = Cache(cache.root)
    for length in range(0, len(whole), 13):
        path.write_bytes(whole[:length])
        assert reader.get(key) is None
    path.write_bytes(whole)
    assert reader.get(key) == make_binary()


def test_a_good_entry_published_meanwhile_is_not_moved_aside(cache: Cache, make_binary, make_key):
    key = make_key(6)
    cache.put(key, make_binary())
    path = cache._store.path(key)
    seen = os.stat(path)
    cache.put(key, make_binary(1))
    assert cache._store.set_aside(path, seen) == "it has been replaced already"
    assert Cache(cache.root).get(key) == make_binary(1)


def test_few_damaged_entries_are_kept(cache: Cache, make_binary, make_key):
    (cache.root / "bad").mkdir(parents=True, mode=0o700)
    for i in range(20):
        (cache.root / "bad" / f"{i}{BAD_SUFFIX}").write_bytes(b"x")
    cache.root.chmod(0o700)
    cache.put(make_key(1), make_binary())
    assert len(names(cache.root / "bad")) == 16


def test_a_file_of_senseless_length_is_not_read(cache: Cache, make_binary, make_key):
    key = make_key(7)
    cache.put(key, make_binary())
    os.truncate(cache._store.path(key), 1 << 40)
    assert Cache(cache.root).get(key) is None
