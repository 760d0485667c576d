"""Stand-ins for sources and binaries, a private lock directory, and children that tests can fork and kill."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flashgen.cache import Cache
from flashgen.compile.binary import Binary, Resources


def _binary(seed: int = 0, size: int = 400) -> Binary:
    image = bytes((seed + 7 * i) % 256 for i in range(256)) * (size // 256 + 1)
    return Binary(
        name=f"forward_{seed}",
        arch="sm_80",
        image=image[:size],
        resources=Resources(registers=128 + seed, spill_bytes=0, stack_bytes=16, static_smem_bytes=1024),
        compile_seconds=1.25,
        log="ptxas info: 128 registers\n",
    )


def _source(text: str = "__global__ void f() {}", arch: str = "sm_80", name: str = "f") -> Any:
    plan = SimpleNamespace(
        arch=SimpleNamespace(name=arch), algorithm="FlashAttention-3", role="forward", refuses_spills=True
    )
    return SimpleNamespace(text=text, code=text, name=name, plan=plan)


class Children:
    """Forked processes; ``run`` starts one, and none outlives the test."""

    def __init__(self) -> None:
        self.pids: list[int] = []

    def run(self, body: Callable[[], object]) -> int:
        """Fork a child that runs ``body`` and exits with 0, or with 70 when ``body`` raises."""
        pid = os.fork()
        if pid == 0:
            status = 70
            try:
                body()
                status = 0
            except BaseException:
                traceback.print_exc(file=sys.__stderr__)
            finally:
                os._exit(status)
        self.pids.append(pid)
        return pid

    def kill(self, pid: int) -> None:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
        self.pids.remove(pid)

    def wait(self, pid: int) -> int:
        self.pids.remove(pid)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def wait_all(self) -> list[int]:
        return [self.wait(pid) for pid in list(self.pids)]


class Signal:
    """A pipe: one process fires, any number of others wait."""

    def __init__(self) -> None:
        self.reader, self.writer = os.pipe()

    def fire(self) -> None:
        os.write(self.writer, b"x" * 256)

    def wait(self) -> None:
        assert os.read(self.reader, 1) == b"x"


@pytest.fixture(autouse=True)
def lock_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Locks of a test are its own, and no setting of the caller's leaks in."""
    for name in [n for n in os.environ if n.startswith("FLASHGEN_")]:
        monkeypatch.delenv(name)
    runtime = tmp_path / "run"
    runtime.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    return runtime / "flashgen"


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache")


@pytest.fixture
def make_binary() -> Callable[..., Binary]:
    return _binary


@pytest.fixture
def make_source() -> Callable[..., Any]:
    return _source


@pytest.fixture
def make_key() -> Callable[[int], str]:
    return lambda seed: f"{seed:064x}"


@pytest.fixture
def signal() -> Callable[[], Signal]:
    return Signal


@pytest.fixture
def children() -> Iterator[Children]:
    running = Children()
    yield running
    for pid in list(running.pids):
        running.kill(pid)


@pytest.fixture
def warnings_of(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    return lambda: [r.getMessage() for r in caplog.records if r.name == "flashgen.cache" and r.levelno >= 30]
