"""A process that measures contestants of one workload and does what the driver says, over a pipe.

Each command is a tuple ``(what, contestant's name, ...)``, each reply a dict: with ``error`` (one line) where the
contestant failed, with ``lost`` too where the CUDA context is lost and the process ends, with ``not available`` where
it needs options that fxgraph does not have.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import os
import platform
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any


def serve(connection: Connection, workload: str, device_type: str, log: str, cache: str) -> None:
    """Answer commands until ``stop`` or the end of the pipe.

    Args:
        connection: to the driver.
        workload: name of the workload.
        device_type: ``cuda`` or ``cpu``.
        log: file that gets all output of this process.
        cache: empty folder for compilers' caches, so that every set-up is a cold one.
    """
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    faulthandler.enable()
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(cache, "inductor"))
    os.environ["TRITON_CACHE_DIR"] = str(Path(cache, "triton"))
    worker = Worker(workload, device_type)
    connection.send({"ready": True})
    while True:
        try:
            command, *arguments = connection.recv()
        except (EOFError, KeyboardInterrupt):
            return
        if command == "stop":
            return
        reply = worker.answer(command, *arguments)
        connection.send(reply)
        if "lost" in reply:
            return


class Worker:
    """Contestants of one workload that live in this process."""

    def __init__(self, workload: str, device_type: str) -> None:
        import torch
        from workloads import WORKLOADS

        self._workload = WORKLOADS[workload]
        self._device = torch.device(device_type, 0) if device_type == "cuda" else torch.device(device_type)
        self._measured: dict[str, Any] = {}

    def answer(self, command: str, *arguments: Any) -> dict[str, Any]:
        """Do what a command says; an exception becomes a reply."""
        commands: dict[str, Callable[..., dict[str, Any]]] = {
            "machine": lambda: machine(self._device.type),
            "set_up": self.set_up,
            "round": self.round,
            "finish": self.finish,
        }
        try:
            return commands[command](*arguments)
        except Exception as error:  # a contestant may raise anything, and that is its result
            traceback.print_exc()
            return {"error": first_line(error), **self._whether_lost()}

    def set_up(self, name: str) -> dict[str, Any]:
        """Set a contestant up and check its gradients."""
        from contestants import CONTESTANTS
        from measure import Measured

        reason = CONTESTANTS[name].not_available()
        if reason is not None:
            return {"not available": reason}
        measured = Measured(self._workload, CONTESTANTS[name], self._device)
        self._measured[name] = measured
        version = {"fxgraph": sys.modules["fxgraph"].__version__} if "fxgraph" in sys.modules else {}
        return {**dataclasses.asdict(measured.set_up), "cycle": measured.cycle, "machine": version}

    def round(self, name: str, *steps: int) -> dict[str, Any]:
        """One round of a contestant."""
        return dataclasses.asdict(self._measured[name].round(*steps))

    def finish(self, name: str) -> dict[str, Any]:
        """Check the gradients once more, now that many steps have been taken."""
        measured = self._measured[name]
        return {"gradient_error": measured.gradient_error(), "notes": measured.notes()}

    def _whether_lost(self) -> dict[str, Any]:
        """After most CUDA errors (an illegal address, say) every later call of the process fails."""
        if self._device.type != "cuda":
            return {}
        import torch

        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            return {"lost": first_line(error)}
        return {}


def first_line(error: BaseException) -> str:
    """``Class: first line of the message``, short enough for a table."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:200]


def machine(device_type: str) -> dict[str, Any]:
    """Versions and hardware that a figure belongs to."""
    import torch

    found: dict[str, Any] = {
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": sys.version.split()[0],
        "torch": torch.__version__,
    }
    if device_type == "cuda":
        properties = torch.cuda.get_device_properties(0)
        found |= {
            "card": properties.name,
            "memory_mib": properties.total_memory // 2**20,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
        }
    return found


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
