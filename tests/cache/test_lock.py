from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from flashgen.cache import Cache, lock
from flashgen.cache.lock import LockUnavailableError, lock_directory, node_lock

KEY = "c" * 64


def is_free(timeout: float = 0.0) -> bool:
    try:
        with node_lock(KEY, timeout):
            return True
    except LockUnavailableError:
        return False


def hold(ready, release):
    with node_lock(KEY, 5):
        ready.fire()
        release.wait()


def test_a_held_lock_keeps_other_processes_and_threads_out(children, signal):
    ready, release = signal(), signal()
    pid = children.run(lambda: hold(ready, release))
    ready.wait()
    assert not is_free()
    release.fire()
    assert children.wait(pid) == 0
    with node_lock(KEY, 0):
        assert not is_free()
    assert is_free()


def test_the_lock_of_a_killed_holder_is_free_at_once(children, signal):
    for _ in range(30):
        ready, release = signal(), signal()
        pid = children.run(lambda r=ready, s=release: hold(r, s))
        ready.wait()
        children.kill(pid)
        start = time.monotonic()
        assert is_free(1.0)
        assert time.monotonic() - start < 1.0
        for pipe in (ready, release):
            os.close(pipe.reader)
            os.close(pipe.writer)


def test_a_waiter_gets_the_lock_when_the_holder_is_killed(children, signal):
    ready, release = signal(), signal()
    pid = children.run(lambda: hold(ready, release))
    ready.wait()
    killer = threading.Timer(0.1, children.kill, [pid])
    killer.start()
    start = time.monotonic()
    assert is_free(5.0)
    assert 0.05 < time.monotonic() - start < 1.0
    # Else it might be done with the child when the test's end is about to be.
    killer.join()


def test_a_child_forked_while_the_lock_is_held_does_not_keep_it(children, signal):
    forked, idle = signal(), signal()

    def hold_and_fork():
        with node_lock(KEY, 5):
            if os.fork() == 0:
                forked.fire()
                idle.wait()
                os._exit(0)
            time.sleep(30)

    pid = children.run(hold_and_fork)
    forked.wait()
    assert not is_free()
    children.kill(pid)
    assert is_free(1.0)
    idle.fire()


def test_a_forked_child_does_not_release_its_parents_lock(children):
    def leave_the_block_as_a_child():
        with node_lock(KEY, 5):
            pid = os.fork()
            if pid:
                os.waitpid(pid, 0)
                assert not is_free()
        if pid == 0:
            os._exit(0)

    assert children.wait(children.run(leave_the_block_as_a_child)) == 0


def test_a_copy_of_the_descriptor_that_nobody_closes_does_not_keep_the_lock():
    # As in a child that was forked behind Python's back, between opening the file and locking it.
    with node_lock(KEY, 0):
        (descriptor,) = lock._held._descriptors
        copy = os.dup(descriptor)
    assert is_free()
    os.close(copy)


def test_waiting_has_a_bound_and_then_the_kernel_is_compiled_here(
    cache: Cache, make_binary, monkeypatch, children, signal, warnings_of
):
    monkeypatch.setenv("FLASHGEN_LOCK_TIMEOUT", "0.2")
    ready, release = signal(), signal()
    children.run(lambda: hold(ready, release))
    ready.wait()
    start = time.monotonic()
    assert cache.obtain(KEY, make_binary) == (make_binary(), False)
    assert 0.2 <= time.monotonic() - start < 2.0
    assert "another process has held" in warnings_of()[0]
    assert Cache(cache.root).get(KEY) == make_binary()


def test_a_removed_lock_file_stops_nobody(lock_root: Path, children, signal):
    ready, release = signal(), signal()
    pid = children.run(lambda: hold(ready, release))
    ready.wait()
    (file,) = lock_root.iterdir()
    file.unlink()
    # The old holder excludes nobody now; among the living, the new file is the lock.
    with node_lock(KEY, 0):
        assert not is_free()
        release.fire()
        assert children.wait(pid) == 0
        assert not is_free()


def test_a_lock_file_removed_between_open_and_lock_is_not_trusted(lock_root: Path, monkeypatch):
    with node_lock(KEY, 0):
        pass
    (file,) = lock_root.iterdir()
    flock, removed = lock.fcntl.flock, []

    def slow_flock(descriptor, operation):
        if not removed:
            removed.append(file.unlink())
        flock(descriptor, operation)

    monkeypatch.setattr(lock.fcntl, "flock", slow_flock)
    with node_lock(KEY, 5):
        assert file.exists()
        assert not is_free()


def test_lock_files_stay_and_are_few(lock_root: Path):
    for i in range(200):
        with node_lock(f"abc{i:061x}", 0):
            pass
    assert [p.name for p in lock_root.iterdir()] == ["abc.lock"]
    assert lock_root.stat().st_mode & 0o777 == 0o700


def test_the_lock_directory_is_in_the_runtime_directory_or_in_tmp(lock_root: Path, monkeypatch):
    assert lock_directory() == lock_root
    for useless in ("", "relative", "/proc/1/nowhere"):
        monkeypatch.setenv("XDG_RUNTIME_DIR", useless)
        assert lock_directory() == Path(f"/tmp/flashgen-{os.geteuid()}")


@pytest.mark.parametrize("kind", ["writable by others", "link", "file", "foreign"])
def test_a_lock_directory_that_others_control_is_not_used(lock_root: Path, tmp_path: Path, kind):
    if kind == "writable by others":
        lock_root.mkdir()
        lock_root.chmod(0o777)
    elif kind == "link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        lock_root.symlink_to(tmp_path / "elsewhere")
    elif kind == "file":
        lock_root.write_text("")
    else:
        if os.geteuid() != 0:
            pytest.skip("only root can give files to other users")
        lock_root.mkdir(mode=0o700)
        os.chown(lock_root, 12345, -1)
    assert lock_directory() != lock_root


def test_after_a_failed_publication_nobody_waits_in_turn(
    cache: Cache, make_binary, monkeypatch, children, tmp_path: Path
):
    # Every process compiles anyway, as none can publish; one after the other would take 8 x 0.3 s.
    (tmp_path / "cache").write_text("not a directory")

    def slow():
        time.sleep(0.3)
        return make_binary()

    assert cache.obtain(KEY, slow) == (make_binary(), False)
    start = time.monotonic()
    for _ in range(8):
        children.run(lambda: Cache(cache.root).obtain(KEY, slow))
    assert children.wait_all() == [0] * 8
    assert time.monotonic() - start < 1.8


def test_the_note_of_a_failed_publication_is_withdrawn_by_a_good_one(cache: Cache, make_binary, lock_root: Path):
    with node_lock(KEY, 0) as held:
        assert not held.results_are_lost()
        held.note(published=False)
    with node_lock(KEY, 0) as held:
        assert held.results_are_lost()
    with node_lock(KEY[:3] + "0" * 61, 0) as other:
        assert not other.results_are_lost()
    assert cache.obtain(KEY, make_binary) == (make_binary(), False)
    with node_lock(KEY, 0) as held:
        assert not held.results_are_lost()
