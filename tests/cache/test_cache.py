from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

import flashgen.compile
from flashgen.cache import Cache, cache_key, default_cache
from flashgen.compile.binary import Binary, Resources
from flashgen.errors import CompileError, SpillError


def no_disk(monkeypatch):
    """Fail on anything that looks at the disk."""

    def touched(*args, **kwargs):
        raise AssertionError(f"disk was touched: {args}")

    for name in ("open", "lstat", "stat", "listdir", "utime", "mkdir"):
        monkeypatch.setattr(os, name, touched)


def test_what_is_refused_for_its_registers_is_kept_and_refused_again_without_compiling_it(
    cache: Cache, make_source, make_binary, monkeypatch
):
    monkeypatch.setattr(flashgen.compile, "compiler_build_id", lambda: "CL-1", raising=False)
    resources = make_binary().resources._replace(spill_bytes=16)
    compiled = []

    def compile_source(source):
        compiled.append(source.name)
        return replace(make_binary(), resources=resources)

    for again in (cache, cache, Cache(cache.root)):
        with pytest.raises(SpillError, match="16 bytes"):
            again.get_or_compile(make_source(), compile_source)
    assert compiled == ["f"]


def test_a_second_get_touches_no_disk(cache: Cache, make_binary, make_key, monkeypatch):
    cache.put(make_key(1), make_binary())
    reader = Cache(cache.root)
    first = reader.get(make_key(1))
    with monkeypatch.context() as patch:
        no_disk(patch)
        assert reader.get(make_key(1)) is first
        assert reader.obtain(make_key(1), pytest.fail) == (first, True)
        assert cache.get(make_key(1)) == make_binary()


def test_a_source_is_compiled_once_and_then_found(cache: Cache, make_source, make_binary, monkeypatch):
    monkeypatch.setattr(flashgen.compile, "compiler_build_id", lambda: "CL-1", raising=False)
    monkeypatch.setattr(flashgen.compile, "options_for", lambda arch: ("-arch=" + arch,), raising=False)
    compiled = []

    def compile_source(source):
        compiled.append(source.name)
        return make_binary()

    source = make_source()
    assert cache.get_or_compile(source, compile_source) == (make_binary(), False)
    assert cache.get_or_compile(source, compile_source) == (make_binary(), True)
    assert Cache(cache.root).get_or_compile(source, pytest.fail) == (make_binary(), True)
    assert Cache(cache.root).get(cache_key(source, "CL-1", ("-arch=sm_80",))) == make_binary()
    # Another compiler build, another kernel.
    monkeypatch.setattr(flashgen.compile, "compiler_build_id", lambda: "CL-2", raising=False)
    assert cache.get_or_compile(source, compile_source)[1] is False
    assert compiled == ["f", "f"]
    assert cache.info().compilers == ("CL-1", "CL-2")


def test_it_says_whether_a_source_has_a_binary_and_compiles_nothing(
    cache: Cache, make_source, make_binary, monkeypatch
):
    monkeypatch.setattr("flashgen.compile.compiler_build_id", lambda: "CL-1")
    source, other = make_source(), make_source(text="__global__ void g() {}")
    assert not cache.holds(source)
    cache.get_or_compile(source, lambda source: make_binary())
    assert cache.holds(source)
    assert Cache(cache.root).holds(source)
    assert not cache.holds(other)


def test_info_counts_what_is_on_disk(cache: Cache, make_binary, make_key):
    for i in range(3):
        cache.put(make_key(i), make_binary(i, 20_000), "CL-7")
    info = cache.info()
    assert (info.root, info.entries, info.bad, info.compilers) == (cache.root, 3, 0, ("CL-7",))
    assert info.bytes == sum(p.stat().st_size for p in (cache.root / "entries").iterdir()) > 60_000


def test_a_very_long_log_is_kept_in_part(cache: Cache, make_binary, make_key):
    import dataclasses

    cache.put(make_key(1), dataclasses.replace(make_binary(), log="x" * 10**6), "CL-7")
    found = Cache(cache.root).get(make_key(1))
    assert found is not None
    assert len(found.log) == 65536
    assert cache.info().compilers == ("CL-7",)


def test_verify_reports_and_clears_out_damage(cache: Cache, make_binary, make_key):
    for i in range(4):
        cache.put(make_key(i), make_binary(i))
    path = cache._store.path(make_key(2))
    path.write_bytes(path.read_bytes()[:-1])
    report = cache.verify()
    assert (report.good, [b.name for b in report.bad]) == (3, [path.name])
    assert "bytes" in report.bad[0].reason
    assert cache.verify().ok
    assert cache.info().bad == 1


def test_clear_forgets_memory_and_disk(cache: Cache, make_binary, make_key):
    for i in range(3):
        cache.put(make_key(i), make_binary(i))
    assert cache.clear() == 3
    assert cache.get(make_key(0)) is None
    assert cache.info().entries == 0
    assert cache.obtain(make_key(0), make_binary) == (make_binary(), False)


def test_a_rejected_binary_is_compiled_anew(cache: Cache, make_binary, make_key, warnings_of):
    cache.put(make_key(1), make_binary(1))
    cache.discard(make_key(1))
    assert cache.obtain(make_key(1), lambda: make_binary(2)) == (make_binary(2), False)
    assert cache.info().bad == 1
    assert len(warnings_of()) == 1
    cache.discard(make_key(9))


def test_threads_share_one_compile(cache: Cache, make_binary, make_key):
    compiled, results = [], []
    barrier = threading.Barrier(32)

    def make():
        compiled.append(1)
        time.sleep(0.1)
        return make_binary()

    def work():
        barrier.wait()
        results.append(cache.obtain(make_key(1), make))

    threads = [threading.Thread(target=work) for _ in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(compiled) == 1
    assert Counter(cached for _, cached in results) == {True: 31, False: 1}
    assert all(binary == make_binary() for binary, _ in results)


def test_a_failed_compile_reaches_every_waiting_thread_and_is_tried_again_later(cache, make_binary, make_key):
    started, errors, compiled = threading.Event(), [], []

    def fail():
        compiled.append(1)
        started.set()
        time.sleep(0.1)
        raise CompileError("line 3 is wrong")

    def work():
        try:
            cache.obtain(make_key(1), fail)
        except CompileError as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    threads[0].start()
    started.wait()
    for thread in threads[1:]:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(errors), len(compiled)) == (4, 1)
    assert cache.info().entries == 0
    assert cache.obtain(make_key(1), make_binary) == (make_binary(), False)


def test_ctrl_c_in_one_threads_compile_leaves_it_to_another(cache: Cache, make_binary, make_key):
    started, outcome = threading.Event(), []

    def interrupted():
        started.set()
        time.sleep(0.1)
        raise KeyboardInterrupt

    def first():
        with pytest.raises(KeyboardInterrupt):
            cache.obtain(make_key(1), interrupted)
        outcome.append("interrupted")

    thread = threading.Thread(target=first)
    thread.start()
    started.wait()
    assert cache.obtain(make_key(1), make_binary) == (make_binary(), False)
    thread.join()
    assert outcome == ["interrupted"]


@pytest.mark.parametrize(("processes", "keys"), [(32, 1), (12, 6)])
def test_processes_that_start_together_compile_each_key_once(
    cache: Cache, make_binary, make_key, children, signal, tmp_path: Path, processes, keys
):
    start, tally = signal(), tmp_path / "compiled"

    def make(seed):
        with tally.open("a") as file:
            file.write(f"{seed}\n")
        time.sleep(0.1)
        return make_binary(seed, 50_000)

    def work():
        mine = Cache(cache.root)
        start.wait()
        for seed in range(keys):
            binary, _ = mine.obtain(make_key(seed << 244), partial(make, seed))
            assert binary == make_binary(seed, 50_000)

    for _ in range(processes):
        children.run(work)
    start.fire()
    assert children.wait_all() == [0] * processes
    assert Counter(tally.read_text().split()) == {str(seed): 1 for seed in range(keys)}
    assert cache.verify().good == keys


def test_when_the_compiling_process_is_killed_another_one_compiles(
    cache: Cache, make_binary, make_key, children, signal
):
    compiling = signal()

    def hang():
        compiling.fire()
        time.sleep(60)

    pid = children.run(lambda: Cache(cache.root).obtain(make_key(1), hang))
    compiling.wait()
    waiter = children.run(lambda: Cache(cache.root).obtain(make_key(1), make_binary))
    time.sleep(0.05)
    children.kill(pid)
    start = time.monotonic()
    assert children.wait(waiter) == 0
    assert time.monotonic() - start < 1.0
    assert Cache(cache.root).get(make_key(1)) == make_binary()


def test_a_child_forked_during_a_compile_does_not_wait_for_the_parents_thread(
    cache: Cache, make_binary, make_key, children
):
    compiling, finish = threading.Event(), threading.Event()

    def make():
        compiling.set()
        finish.wait()
        return make_binary(1)

    thread = threading.Thread(target=lambda: cache.obtain(make_key(1), make))
    thread.start()
    compiling.wait()

    def in_child():
        # The thread that would land this flight does not exist here; the lock is still the parent's.
        os.environ["FLASHGEN_LOCK_TIMEOUT"] = "0.1"
        assert cache.obtain(make_key(1), lambda: make_binary(2)) == (make_binary(2), False)

    start = time.monotonic()
    with cache._mutex:
        pid = children.run(in_child)
    assert children.wait(pid) == 0
    assert time.monotonic() - start < 2.0
    finish.set()
    thread.join()


def test_a_forked_child_still_has_what_its_parent_had(cache: Cache, make_binary, make_key, children):
    cache.put(make_key(1), make_binary())

    def in_child():
        assert cache.obtain(make_key(1), pytest.fail) == (make_binary(), True)

    assert children.wait(children.run(in_child)) == 0


def test_the_default_cache_follows_the_environment(tmp_path: Path, monkeypatch, make_binary, make_key):
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path / "one"))
    first = default_cache()
    assert default_cache() is first
    assert first.root == tmp_path / "one"
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path / "two"))
    assert default_cache().root == tmp_path / "two"
    assert not (tmp_path / "one").exists()


def test_asking_for_the_compiler_first_leaves_the_root_private(tmp_path: Path, monkeypatch, make_key, children):
    # The compiler's build id is remembered below the root, and may be what makes the root.
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path / "fresh"))

    def under_a_permissive_umask():
        os.umask(0o002)
        flashgen.compile.compiler_build_id.cache_clear()
        flashgen.compile.compiler_build_id()
        assert default_cache().get(make_key(1)) is None

    assert children.wait(children.run(under_a_permissive_umask)) == 0
    assert (tmp_path / "fresh").stat().st_mode & 0o077 == 0


def test_a_relative_root_does_not_move_with_the_working_directory(tmp_path: Path, monkeypatch, make_binary, make_key):
    monkeypatch.chdir(tmp_path)
    cache = Cache(Path("here"))
    monkeypatch.chdir("/")
    cache.put(make_key(1), make_binary())
    assert (tmp_path / "here" / "entries").is_dir()


def test_importing_the_cache_loads_no_heavy_module_and_writes_nothing(tmp_path: Path):
    program = (
        "import sys, flashgen.cache\n"
        "heavy = {'numpy', 'jinja2', 'cuda', 'torch', 'pickle', 'logging', 'tempfile', 'rich'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env={"HOME": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONDONTWRITEBYTECODE": "1"},
    )
    assert done.stdout.strip() == "[]"
    assert list(tmp_path.rglob("*")) == [tmp_path / "run"]


def test_the_binary_of_a_source_can_be_discarded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import flashgen as fg
    from flashgen.plan import plan
    from flashgen.render import render

    source = render(plan(fg.AttentionSpec(16, direction="forward"), None, "sm_80").kernels[0])
    cache, made = Cache(tmp_path), []

    def compile_source(_: object) -> Binary:
        made.append(binary := Binary(source.name, "sm_80", b"image", Resources(1, 0, 0, 0), 0.1, "test"))
        return binary

    for _ in range(2):
        cache.get_or_compile(source, compile_source)
    assert len(made) == 1
    cache.discard_source(source)
    _, cached = cache.get_or_compile(source, compile_source)
    assert (len(made), cached) == (2, False)
