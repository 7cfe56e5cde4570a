"""The driver's side of worker processes: start, ask with a time limit, notice a death, end."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
from pathlib import Path
from typing import Any

import worker

NO_ANSWER = "no answer within"
"""How the message of a process that took too long begins."""

_SPAWN = multiprocessing.get_context("spawn")  # a fork would take over CUDA's and OpenMP's state


class WorkerProcess:
    """A process that holds some contestants of a workload.

    Args:
        workload: name of the workload.
        device_type: ``cuda`` or ``cpu``.
        log: file for all that the process prints.
        cache: empty folder for compilers' caches.
    """

    def __init__(self, workload: str, device_type: str, log: Path, cache: Path) -> None:
        self._log = log
        self._connection, theirs = _SPAWN.Pipe()
        self._process = _SPAWN.Process(
            target=worker.serve, args=(theirs, workload, device_type, str(log), str(cache)), name=log.stem
        )
        self._process.start()
        theirs.close()  # so that the end of the process ends the pipe

    def ask(self, *command: Any, timeout_s: float) -> dict[str, Any]:
        """Send a command and wait for the reply.

        A process that died or took too long is ended; the reply has ``error`` and ``lost`` then.
        """
        try:
            self._connection.send(command)
        except (BrokenPipeError, OSError):
            return self._died()
        return self.reply(timeout_s)

    def reply(self, timeout_s: float) -> dict[str, Any]:
        """The next reply; see :meth:`ask`."""
        try:
            if not self._connection.poll(max(0.0, timeout_s)):
                self.end(grace_s=0)
                return {"error": f"{NO_ANSWER} {timeout_s:.0f} s", "lost": "ended"}
            reply: dict[str, Any] = self._connection.recv()
        except (EOFError, OSError):
            return self._died()
        return reply

    def end(self, grace_s: float = 5) -> None:
        """End the process, kindly first."""
        if grace_s:
            with contextlib.suppress(OSError):
                self._connection.send(("stop",))
            self._process.join(grace_s)
        if self._process.is_alive():
            self._process.kill()
        self._process.join()
        self._connection.close()

    def _died(self) -> dict[str, Any]:
        self._process.join(5)
        code = self._process.exitcode
        how = f"exit status {code}"
        if code is not None and code < 0:
            how = f"signal {signal.Signals(-code).name}"
        lines = [line.strip() for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        return {"error": f"the process died ({how}); last line: {lines[-1] if lines else ''}"[:200], "lost": how}
