"""What every test run shares: which tests can run on this machine, and where kernels are cached."""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import os
import zlib
from collections.abc import Generator
from typing import Any

import pytest

# Two pytest workers with a BLAS thread pool each would only fight over the cores.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# For workers, which glibc reads it in as they start. Else it hands memory of each matrix that the oracle is done with
# back to the kernel, to ask for it again with the next one: a tenth of all time, and more with large expressions.
for name in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_"):
    os.environ.setdefault(name, str(2**25))


def gpu_count() -> int:
    """How many devices the driver reports, if it is there (no context is made)."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    return count.value if driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 else 0


def gpus_for(worker: str) -> str:
    """What CUDA_VISIBLE_DEVICES says in a worker: each begins with the next GPU, and sees the others behind it."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(number) for number in range(gpu_count())]
    names = names[: gpu_count()]
    first = int(worker.removeprefix("gw")) % max(len(names), 1)
    return ",".join(names[first:] + names[:first])


def has_torch() -> bool:
    """Whether torch is installed, found out without importing it."""
    return importlib.util.find_spec("torch") is not None


def missing() -> dict[str, str]:
    """Marker -> why tests that carry it cannot run here."""
    reasons = {}
    if not gpu_count():
        reasons["gpu"] = "no NVIDIA GPU found"
    if not has_torch():
        reasons["torch"] = "torch is not installed"
    return reasons


def pytest_configure(config: pytest.Config) -> None:
    """Keep kernels compiled by tests out of the user's cache, but warm from one test run to the next."""
    if "FLASHGEN_CACHE_DIR" not in os.environ and hasattr(config, "cache"):
        directory = config.cache.mkdir("flashgen-kernels")
        directory.chmod(0o700)
        os.environ["FLASHGEN_CACHE_DIR"] = str(directory)
    if gpus := getattr(config, "workerinput", {}).get("gpus"):
        # Before anybody here asks the driver, which reads it once.
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus
    config.stash[DESELECTED] = {}
    config.stash[SAMPLED] = 0
    config.stash[UNSELECTED] = 0


DESELECTED = pytest.StashKey[dict[str, int]]()
#: Tests that were found before -k, -m or names selected some of them.
SAMPLED = pytest.StashKey[int]()
#: The same where these select none.
UNSELECTED = pytest.StashKey[int]()


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Count what a file or a class holds, of which a name on the command line takes a part."""
    report = yield
    collector.config.stash[SAMPLED] += sum(isinstance(found, pytest.Item) for found in report.result or ())
    return report


def pytest_report_header() -> list[str]:
    return [f"{marker} tests are deselected: {why}" for marker, why in missing().items()]


def parameters(nodeid: str) -> str:
    return nodeid.partition("[")[2].partition("]")[0]


def is_out_of_turn(item: pytest.Item) -> bool:
    """Whether another DRAWN_TURN runs this test: each runs one in N of those marked ``in_turns(N)``.

    The parameters alone say which, so that tests of the same kernel have the same turn.
    """
    turn, marker = os.environ.get("DRAWN_TURN"), item.get_closest_marker("in_turns")
    if turn is None or marker is None or not parameters(item.nodeid):
        return False
    return (zlib.crc32(parameters(item.nodeid).encode()) - int(turn)) % marker.args[0] != 0


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    reasons = missing()
    kept, dropped = [], []
    for item in items:
        marker = next((m for m in reasons if item.get_closest_marker(m)), None)
        if marker is None and is_out_of_turn(item):
            marker = "in_turns"
        if marker is None:
            kept.append(item)
        else:
            dropped.append(item)
            config.stash[DESELECTED][marker] = config.stash[DESELECTED].get(marker, 0) + 1
    if dropped:
        items[:] = kept
        config.hook.pytest_deselected(items=dropped)


def pytest_collection_finish() -> None:
    """Thousands of tests stay to the end: the garbage collector need not look through them again and again."""
    gc.collect()
    gc.freeze()


#: For many more kernels, each of which has tests of its own.
GROUPS = 64


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """``--dist loadgroup`` has one worker do all tests whose parameters are called the same, and some others.

    xdist's own goes by marks, and xdist 3.8 writes them where pytest 9.2 does not read a test's name any more.
    """
    if config.getvalue("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class InGroups(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            named = parameters(nodeid)
            return str(zlib.crc32(named.encode()) % GROUPS) if named else nodeid

    return InGroups(config, log)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker process tells the controller what it left out (every worker collects every test)."""
    stash = session.config.stash
    if not session.testscollected and not session.testsfailed and stash[SAMPLED] > sum(stash[DESELECTED].values()):
        stash[UNSELECTED] = stash[SAMPLED]
    output: dict[str, Any] | None = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["deselected"] = stash[DESELECTED]
        output["unselected"] = stash[UNSELECTED]


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    if gpu_count() > 1:
        node.workerinput["gpus"] = gpus_for(node.gateway.id)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: Any) -> None:
    output = getattr(node, "workeroutput", {})
    node.config.stash[DESELECTED].update(output.get("deselected", {}))
    node.config.stash[UNSELECTED] = output.get("unselected", 0)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    reasons = {**missing(), "in_turns": f"DRAWN_TURN={os.environ.get('DRAWN_TURN')} runs others"}
    for marker, count in sorted(config.stash[DESELECTED].items()):
        terminalreporter.write_line(f"{count} {marker} tests deselected: {reasons[marker]}")
    if unselected := config.stash[UNSELECTED]:
        level = os.environ.get("DRAWN_CASES", "sample")
        remedy = "DRAWN_CASES=ci draws all" if level == "sample" else f"DRAWN_CASES={level} draws no others"
        terminalreporter.write_line(f"0 selected of {unselected} sampled; {remedy}")
