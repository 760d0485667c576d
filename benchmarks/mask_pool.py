"""Many processes prepare what is to be timed, side by side, and keep it; then each times its own, one after another.

So nothing is traced or compiled twice, nor while something is timed. A contest is made in one process and stays
there: ``contest(cell, libraries)`` has ``prepare()``, which returns what is odd, and ``time()``, which returns a Row.
Of a cell that fails with both libraries flashgen alone is timed. Where it raises ``LostContextError`` its process is
of no more use, and another one takes over.
"""

from __future__ import annotations

import multiprocessing
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol

from mask_rows import DIRECTIONS, LIBRARIES, Cell, Row


class LostContextError(Exception):
    """A process cannot use its GPU any more."""


class Contest(Protocol):
    """What one cell is timed by."""

    def prepare(self) -> str:
        """Compiles everything; says what is odd."""

    def time(self) -> Row:
        """The figures."""


MakeContest = Callable[[Cell, Sequence[str]], Contest]


@dataclass(frozen=True)
class Job:
    """A cell, by which libraries it is timed, and why not by all."""

    cell: Cell
    libraries: tuple[str, ...] = LIBRARIES
    note: str = ""

    def without_flex(self, reason: str) -> Job | None:
        """What is left of it where it failed with both."""
        if len(self.libraries) == 1:
            return None
        return replace(self, libraries=("flashgen",), note=f"flex: {reason}")

    def without_figures(self, reason: str) -> Row:
        """The row of a job that came to nothing."""
        return Row(self.cell, notes=dict.fromkeys(DIRECTIONS, self.note or reason))


@dataclass(eq=False)
class Worker:
    """A process, what it was given last, and what it has prepared."""

    process: Any
    connection: Connection
    job: Job | None = None
    prepared: list[Job] = field(default_factory=list)

    @classmethod
    def start(cls, make: MakeContest) -> Worker:
        """A new process."""
        spawn = multiprocessing.get_context("spawn")
        here, there = spawn.Pipe()
        process = spawn.Process(target=serve, args=(there, make), daemon=True)
        process.start()
        there.close()
        return cls(process, here)

    def give(self, job: Job) -> None:
        """Has it prepare a job."""
        self.job = job
        self.connection.send(("prepare", job.cell, job.libraries))

    def answer(self) -> Any:
        """What it says; an exception is one that it met."""
        try:
            return self.connection.recv()
        except (EOFError, OSError):
            return LostContextError("the process ended")

    def stop(self) -> None:
        """Ends it."""
        self.connection.close()
        self.process.terminate()
        self.process.join()


def serve(connection: Connection, make: MakeContest) -> None:
    """A worker's loop: prepares and times the calls it receives."""
    contests: dict[Cell, Contest] = {}
    while True:
        try:
            order, cell, libraries = connection.recv()
        except EOFError:
            return
        try:
            if order == "prepare":
                contests[cell] = make(cell, libraries)
                connection.send(contests[cell].prepare())
            else:
                connection.send(contests.pop(cell).time())
        except Exception as error:
            kind = LostContextError if isinstance(error, LostContextError) else RuntimeError
            connection.send(kind(str(error)))


class Pool:
    """All workers."""

    def __init__(self, make: MakeContest, workers: int) -> None:
        self._make = make
        self._wanted = workers
        self._workers: list[Worker] = []
        #: Rows that came to nothing.
        self.failed: list[Row] = []

    def prepare(self, cells: Sequence[Cell], deadline: float) -> Iterator[str]:
        """Prepares cells, none of them begun after the deadline; tells how it goes."""
        pending = deque(Job(cell) for cell in cells)
        while True:
            for _ in range(len(pending)):
                if time.perf_counter() > deadline or not (worker := self._idle()):
                    break
                worker.give(pending.popleft())
            busy = [worker for worker in self._workers if worker.job]
            if not busy:
                break
            for connection in wait([worker.connection for worker in busy], timeout=1.0):
                worker = next(worker for worker in busy if worker.connection is connection)
                yield from self._heard(worker, pending)
        if pending:
            yield f"the time is up; {len(pending)} cells are not prepared, first of them {pending[0].cell}"

    def _idle(self) -> Worker | None:
        """A worker with nothing to do: a new one while there are not enough."""
        if len(self._workers) < self._wanted:
            self._workers.append(Worker.start(self._make))
            return self._workers[-1]
        return next((worker for worker in self._workers if not worker.job), None)

    def _heard(self, worker: Worker, pending: deque[Job]) -> Iterator[str]:
        """What follows from a worker's answer."""
        job, worker.job = worker.job, None
        assert job is not None, "who is not busy says nothing"
        answer = worker.answer()
        if isinstance(answer, LostContextError):
            self._drop(worker)
            pending.extend(worker.prepared)
        if not isinstance(answer, Exception):
            worker.prepared.append(replace(job, note=job.note or answer))
            return
        yield f"{job.cell}: {answer}"
        if (rest := job.without_flex(str(answer))) is not None:
            pending.append(rest)
        else:
            self.failed.append(job.without_figures(str(answer)))

    def _drop(self, worker: Worker) -> None:
        self._workers.remove(worker)
        worker.stop()

    def rows(self, cells: Sequence[Cell], deadline: float) -> Iterator[Row]:
        """The prepared cells' rows in that order, none of them begun after the deadline, and then what failed."""
        found = {job.cell: (worker, job) for worker in self._workers for job in worker.prepared}
        for cell in cells:
            if cell not in found or time.perf_counter() > deadline:
                continue
            worker, job = found[cell]
            worker.connection.send(("time", cell, job.libraries))
            answer = worker.answer()
            row = job.without_figures(str(answer)) if isinstance(answer, Exception) else answer
            for direction in DIRECTIONS if job.note else ():
                row.notes.setdefault(direction, job.note)
            yield row
        yield from self.failed

    def close(self) -> None:
        """Ends all workers."""
        for worker in list(self._workers):
            self._drop(worker)
