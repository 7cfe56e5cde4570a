"""Cases in processes of their own: a crash or a hang costs one case, not the run."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import gc
import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import connection
from multiprocessing.context import BaseContext
from typing import Any

from .outcomes import Outcome, Row, describe

CASES_PER_PROCESS = 150
"""After so many cases a process is replaced: what a case leaves behind (caches, memory) must not add up."""

START_SECONDS = 300.0
"""A process must say that it is ready within this time; it imports torch and the op database."""

FAILED_STARTS = 5
"""So many processes may die at their start, if others have started: a busy device may refuse one now and then."""

Runner = Callable[[Any, Callable[[str], None]], Row]
"""Runs a case; is told where to say how far it is. Must be picklable."""


def _serve(pipe: connection.Connection, runner: Runner, prepare: Callable[[], object]) -> None:
    """The other process: cases in, rows out."""
    import torch

    torch.set_num_threads(1)  # as many processes as there are cores run beside each other
    prepare()
    gc.collect()
    gc.freeze()  # what is imported stays: collections between cases need not look at it
    pipe.send(("ready", None))
    while (case := pipe.recv()) is not None:
        try:
            row = runner(case, lambda stage: pipe.send(("stage", stage)))
        except Exception as error:  # one case's fault must not end the worker: the parent records it
            pipe.send(("failed", describe(error)))
        else:
            pipe.send(("row", row))


@dataclasses.dataclass
class _Worker:
    process: Any
    pipe: connection.Connection
    case: Any = None
    stage: str = "start"
    deadline: float = 0.0
    done: int = 0
    ready: bool = False
    broken: bool = False

    def end(self) -> None:
        """Let an idle process go, kill one that is at a case, does not go or has a broken device."""
        if self.ready and self.case is None and not self.broken and self.process.is_alive():
            with contextlib.suppress(BrokenPipeError):
                self.pipe.send(None)
            self.process.join(5)
        if self.process.is_alive():
            self.process.kill()
        self.process.join(30)  # one that hangs in the driver cannot be waited for
        self.pipe.close()


def run(
    cases: Iterable[Any],
    runner: Runner,
    prepare: Callable[[], object],
    *,
    jobs: int,
    timeout: float,
    row_of: Callable[[Any], Row],
    stop_starting_after: float | None = None,
    preload: str | None = None,
) -> Iterator[Row]:
    """Run cases, ``jobs`` at a time; rows come as they are ready.

    A process that dies, hangs or says that the device is broken gives a row of its own and is replaced; so is one
    whose row has a true value for ``retire``.

    Args:
        cases: picklable.
        runner: see :data:`Runner`.
        prepare: called once in each process, before the first case.
        jobs: number of processes.
        timeout: seconds that a case may take.
        row_of: the row of a case that gave none, without an outcome.
        stop_starting_after: seconds after which no further case is begun.
        preload: a module; processes are then forks of one that has imported it, and start at once. It must not
            initialise CUDA, which does not survive a fork; ``prepare`` should raise where it has.
    Raises:
        RuntimeError: if a process dies before it is ready.
    """
    began = time.monotonic()
    context: BaseContext = multiprocessing.get_context("spawn" if preload is None else "forkserver")
    if preload is not None:
        context.set_forkserver_preload([preload])
    waiting = collections.deque(cases)
    workers: list[_Worker] = []
    broken: list[_Worker] = []
    started = failed_starts = 0
    try:
        while waiting or any(worker.case is not None for worker in workers):
            if stop_starting_after is not None and time.monotonic() - began > stop_starting_after:
                waiting.clear()
            while waiting and len(workers) < min(jobs, len(waiting) + sum(w.case is not None for w in workers)):
                workers.append(_start(context, runner, prepare))
            ready = connection.wait([worker.pipe for worker in workers], timeout=1.0)
            for worker in list(workers):
                row, over = None, False
                if worker.pipe in ready:
                    was_ready = worker.ready
                    try:
                        row, over = _hear(worker, row_of)
                    except RuntimeError:
                        failed_starts += 1
                        if not started or failed_starts > FAILED_STARTS:
                            raise
                        over = True
                    started += worker.ready and not was_ready
                elif time.monotonic() > worker.deadline:
                    row, over = _row_for(worker, row_of, Outcome.TIMEOUT, f"no end after {timeout:g} s"), True
                    worker.broken = True
                if worker.ready and worker.case is None and not over:
                    if waiting and worker.done < CASES_PER_PROCESS:
                        worker.case, worker.stage = waiting.popleft(), "start"
                        worker.deadline = time.monotonic() + timeout
                        try:
                            worker.pipe.send(worker.case)
                        except OSError:  # it died between two cases
                            waiting.appendleft(worker.case)
                            worker.case, over = None, True
                    else:
                        over = True
                if over:
                    workers.remove(worker)
                    if worker.broken:
                        worker.process.kill()
                        broken.append(worker)  # the driver takes its time to clean up: nobody has to wait for it now
                    else:
                        worker.end()
                if row is not None:
                    yield row
    finally:
        for worker in (*workers, *broken):
            worker.end()


def _start(context: Any, runner: Runner, prepare: Callable[[], object]) -> _Worker:
    mine, its = context.Pipe()
    process = context.Process(target=_serve, args=(its, runner, prepare), daemon=True)
    process.start()
    its.close()
    return _Worker(process, mine, deadline=time.monotonic() + START_SECONDS)


def _hear(worker: _Worker, row_of: Callable[[Any], Row]) -> tuple[Row | None, bool]:
    """One message of a worker: a row, if that is what it is, and whether the worker is at its end.

    Raises:
        RuntimeError: if a worker dies before it is ready: the next one would, too.
    """
    try:
        kind, content = worker.pipe.recv()
    except (EOFError, ConnectionResetError):
        worker.process.join()
        if not worker.ready:
            raise RuntimeError(f"a worker died at its start, exit code {worker.process.exitcode}") from None
        return _row_for(worker, row_of, Outcome.CRASH, f"the process died, exit code {worker.process.exitcode}"), True
    if kind == "ready":
        worker.ready = True
        return None, False
    if kind == "stage":
        worker.stage = content
        return None, False
    row = content if kind == "row" else _row_for(worker, row_of, Outcome.CRASH, content)
    worker.case = None
    worker.done += 1
    reasons = row.get("reasons", {})
    worker.broken = any("CUDA error" in reason or "device-side assert" in reason for reason in reasons)
    worker.broken |= bool(row.get("retire"))
    return row, worker.broken


def _row_for(worker: _Worker, row_of: Callable[[Any], Row], outcome: Outcome, what: str) -> Row | None:
    if worker.case is None:
        if not worker.ready:
            raise RuntimeError(f"a worker did not start: {what}")
        return None
    if worker.stage.endswith("eager"):
        outcome = Outcome.SKIPPED
    return {**row_of(worker.case), "outcome": outcome.value, "reasons": {f"{what}, at: {worker.stage}": 1}}
