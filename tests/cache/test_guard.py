"""Files that somebody else could have put there are never loaded."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from flashgen.cache import Cache
from flashgen.errors import CacheError

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to other users")
KEY = "e" * 64


@pytest.fixture
def path(cache: Cache, make_binary) -> Path:
    """A good entry's file."""
    cache.put(KEY, make_binary())
    return cache._store.path(KEY)


def assert_refused(root: Path, match: str) -> None:
    for use in (lambda c: c.get(KEY), lambda c: c.obtain(KEY, pytest.fail)):
        with pytest.raises(CacheError, match=match):
            use(Cache(root))


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702, 0o1777])
@pytest.mark.parametrize("which", [".", "entries"])
def test_a_directory_that_others_can_write_is_refused(cache: Cache, path, monkeypatch, make_binary, mode, which):
    (cache.root / which).chmod(mode)
    assert_refused(cache.root, "chmod go-w")
    with pytest.raises(CacheError):
        Cache(cache.root).put("1" * 64, make_binary())
    monkeypatch.setenv("FLASHGEN_CACHE_SHARED", "1")
    assert Cache(cache.root).get(KEY) == make_binary()


@pytest.mark.parametrize("mode", [0o755, 0o750, 0o500])
def test_a_directory_that_others_can_only_read_is_accepted(cache: Cache, path, make_binary, mode):
    cache.root.chmod(mode)
    assert Cache(cache.root).get(KEY) == make_binary()


@needs_root
@pytest.mark.parametrize("which", ["root", "entries", "entry"])
def test_what_belongs_to_another_user_is_refused(cache: Cache, path, monkeypatch, make_binary, which):
    os.chown({"root": cache.root, "entries": path.parent, "entry": path}[which], 12345, -1)
    assert_refused(cache.root, "belongs to user 12345")
    monkeypatch.setenv("FLASHGEN_CACHE_SHARED", "1")
    assert Cache(cache.root).get(KEY) == make_binary()


@needs_root
def test_what_belongs_to_root_is_accepted(cache: Cache, path, monkeypatch, make_binary):
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert Cache(cache.root).get(KEY) == make_binary()


def test_an_entry_that_others_can_write_is_refused(cache: Cache, path, monkeypatch, make_binary):
    path.chmod(0o620)
    assert_refused(cache.root, "mode 0620")
    monkeypatch.setenv("FLASHGEN_CACHE_SHARED", "1")
    assert Cache(cache.root).get(KEY) == make_binary()


def test_a_link_in_place_of_an_entry_is_refused_even_in_a_shared_cache(cache: Cache, path, tmp_path, monkeypatch):
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert_refused(cache.root, "symbolic link")
    monkeypatch.setenv("FLASHGEN_CACHE_SHARED", "1")
    assert_refused(cache.root, "symbolic link")


def test_a_hard_linked_entry_is_refused(cache: Cache, path, tmp_path):
    os.link(path, tmp_path / "second name")
    assert_refused(cache.root, "2 hard links")


def test_a_fifo_is_refused_and_does_not_block(cache: Cache, path):
    path.unlink()
    os.mkfifo(path, 0o600)
    assert_refused(cache.root, "not a regular file")


def test_a_directory_in_place_of_an_entry_is_refused(cache: Cache, path):
    path.unlink()
    path.mkdir(mode=0o700)
    assert_refused(cache.root, "not a regular file")


def test_swapped_entries_are_misses(cache: Cache, path, make_binary, make_key):
    other = "f" * 64
    cache.put(other, make_binary(1))
    spare = path.with_suffix(".spare")
    path.rename(spare)
    cache._store.path(other).rename(path)
    spare.rename(cache._store.path(other))
    assert Cache(cache.root).get(KEY) is None
    assert Cache(cache.root).get(other) is None
    assert cache.info().bad == 2


def test_our_own_link_to_the_directory_is_followed(cache: Cache, path, tmp_path, make_binary):
    (tmp_path / "link").symlink_to(cache.root)
    linked = Cache(tmp_path / "link")
    assert linked.get(KEY) == make_binary()
    linked.put("1" * 64, make_binary(1))
    assert Cache(cache.root).get("1" * 64) == make_binary(1)


@needs_root
def test_somebody_elses_link_to_our_directory_is_refused(cache: Cache, path, tmp_path):
    (tmp_path / "link").symlink_to(cache.root)
    os.chown(tmp_path / "link", 12345, -1, follow_symlinks=False)
    assert_refused(tmp_path / "link", "belongs to user 12345")


def test_clear_does_not_follow_a_link_out_of_the_cache(cache: Cache, path, tmp_path):
    outside = tmp_path / "outside"
    path.parent.rename(outside)
    path.parent.symlink_to(outside)
    assert cache.clear() == 0
    assert (outside / path.name).exists()


def test_clear_removes_what_was_refused_and_nothing_else(cache: Cache, path):
    os.mkfifo(path.with_name("1" * 64 + ".entry"))
    (path.parent / "notes.txt").write_text("mine")
    (cache.root / "notes.txt").write_text("mine")
    assert cache.clear() == 2
    assert os.listdir(path.parent) == ["notes.txt"]
    assert (cache.root / "notes.txt").exists()


def test_verify_lists_what_would_be_refused(cache: Cache, path, make_binary):
    cache.put("1" * 64, make_binary(1))
    path.chmod(0o666)
    report = cache.verify()
    assert (report.good, report.ok) == (1, False)
    assert "mode 0666" in report.bad[0].reason
