"""Files that somebody else could have put there are never loaded."""

from __future__ import annotations

import grp
import os
import pwd
from pathlib import Path
from types import SimpleNamespace

import pytest

from flashgen.cache import Cache, guard
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


@pytest.fixture
def way(tmp_path: Path, make_binary) -> list[Path]:
    """A cache below two directories: the upper one, the lower one, the root."""
    upper = tmp_path / "upper"
    cache = Cache(upper / "lower" / "cache")
    cache.put(KEY, make_binary())
    return [upper, upper / "lower", cache.root]


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o707, 0o2775])
@pytest.mark.parametrize("which", [0, 1], ids=["upper", "lower"])
def test_a_directory_above_the_cache_in_which_others_can_rename_is_refused(way, monkeypatch, make_binary, which, mode):
    way[which].chmod(mode)
    assert_refused(way[2], f"{way[which]}, a directory above the cache, has mode .*chmod go-w")
    with pytest.raises(CacheError):
        Cache(way[2]).put("1" * 64, make_binary())
    monkeypatch.setenv("FLASHGEN_CACHE_SHARED", "1")
    assert Cache(way[2]).get(KEY) == make_binary()


@pytest.mark.parametrize("mode", [0o1777, 0o755, 0o711])
def test_a_directory_above_the_cache_where_only_owners_rename_is_accepted(way, make_binary, mode):
    way[1].chmod(mode)
    assert Cache(way[2]).get(KEY) == make_binary()


@needs_root
@pytest.mark.parametrize("which", [0, 1], ids=["upper", "lower"])
def test_a_directory_above_the_cache_that_belongs_to_another_user_is_refused(way, monkeypatch, make_binary, which):
    os.chown(way[which], 12345, -1)
    assert_refused(way[2], "a directory above the cache, belongs to user 12345, not to you")
    monkeypatch.setenv("FLASHGEN_CACHE_SHARED", "1")
    assert Cache(way[2]).get(KEY) == make_binary()


@pytest.mark.parametrize("linked", ["root", "above"])
def test_where_a_link_leads_must_be_as_safe_as_the_link(way, tmp_path, make_binary, linked):
    link = tmp_path / "link"
    link.symlink_to(way[2] if linked == "root" else way[1])
    root = link if linked == "root" else link / "cache"
    assert Cache(root).get(KEY) == make_binary()
    way[0].chmod(0o777)
    assert_refused(root, f"{way[0]}, a directory above the cache")


@needs_root
def test_somebody_elses_link_above_the_cache_is_refused(way, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(way[1])
    os.chown(link, 12345, -1, follow_symlinks=False)
    assert_refused(link / "cache", "belongs to user 12345")


@needs_root
def test_a_directory_that_only_its_users_own_group_can_write_is_accepted(way, monkeypatch, make_binary):
    user = SimpleNamespace(pw_name="ada", pw_gid=4321)
    members: list[str] = []
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: user)
    monkeypatch.setattr(
        grp, "getgrgid", lambda gid: SimpleNamespace(gr_name="ada" if gid == 4321 else "x", gr_mem=members)
    )
    os.chown(way[1], 0, 4321)
    way[1].chmod(0o775)
    guard._is_private_group.cache_clear()
    try:
        assert Cache(way[2]).get(KEY) == make_binary()
        members.append("eve")
        guard._is_private_group.cache_clear()
        assert_refused(way[2], "mode 0775")
    finally:
        guard._is_private_group.cache_clear()


@pytest.mark.parametrize("umask", [0o000, 0o002])
def test_what_is_made_above_the_cache_is_ours_alone(tmp_path, make_binary, umask):
    before = os.umask(umask)
    try:
        cache = Cache(tmp_path / "new" / "newer" / "cache")
        cache.put(KEY, make_binary())
        assert Cache(cache.root).get(KEY) == make_binary()
    finally:
        os.umask(before)
