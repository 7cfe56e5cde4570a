"""Where the host's time of a training step through fxgraph goes: ``python benchmarks/profile_call.py mlp6``.

Timers around fxgraph's own functions give microseconds in the median step for each part, without the parts inside it
and less the timers' own cost; then torch.profiler lists the ops of steps without timers. The device is idle when a step
begins, so that no full queue holds the host up.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from contestants import CONTESTANTS
from tabulate import tabulate
from timers import Timers, cost_of_a_timer
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from workloads import WORKLOADS, Task

import fxgraph

# Label, module, and the name in it. Labels without a timer inside are whole; the others are what is left of them.
# A name that is not there any more is reported and left out.
PARTS = [
    ("call: find the trace (rest)", "fxgraph.graphed", "GraphedCallable.__call__"),
    ("call: bind arguments to names", "fxgraph.graphed", "GraphedCallable._locals"),
    ("program (rest)", "fxgraph.program", "Program.called"),
    ("signature: key and look-up", "fxgraph.program", "Program._capture_for"),
    ("slot search: one more slot", "fxgraph.program", "Program._slot_for"),
    ("slot search: shared memory", "fxgraph.program", "Program._refuse_shared_writes"),
    ("slot search: free slot", "fxgraph.slots", "Capture.free_slot"),
    ("outputs put together", "fxgraph.replay", "run"),
    ("autograd node: apply", "fxgraph.replay", "_Node.apply"),
    ("autograd node: forward (rest)", "fxgraph.replay", "_Node.forward"),
    ("autograd node: what a call leaves", "fxgraph.replay", "Call.__init__"),
    ("autograd node: keep inputs and versions", "fxgraph.replay", "Call.keep"),
    ("hand out (rest of replaying the forward)", "fxgraph.replay", "_forward"),
    ("copy inputs in", "fxgraph.slots", "Slot.fill"),
    ("{}: replay launch", "fxgraph.engines.cuda", "CudaRegion.replay"),
    ("{}: replay on the CPU engine", "fxgraph.engines.cpu", "CpuRegion.replay"),
    ("backward: node (rest)", "fxgraph.replay", "_Node.backward"),
    ("backward: check versions", "fxgraph.replay", "Call.check_versions"),
    ("backward: hand out (rest)", "fxgraph.replay", "_backward"),
    ("backward: copy tangents in", "fxgraph.slots", "Slot.fill_tangents"),
    ("backward: give the slot back", "fxgraph.replay", "Call.end"),
]
ENTRIES = [name for name in CONTESTANTS if name.startswith("fxgraph")]


class TimedStep:
    """The plain training step of ``contestants.Loop`` in four pieces, so that each can have a timer."""

    def __init__(self, task: Task, parts: list[Any], timers: Timers | None = None) -> None:
        self._task, self._parts = task, parts
        self._optimizer = torch.optim.SGD(task.parameters())
        self._inputs = [tensor for batch in task.batches for tensor in batch if tensor.requires_grad]
        pieces: dict[str, Callable[..., Any]] = {
            "zero_grad": self._zero_grad,
            "module: nn.Module.__call__ or Dynamo": self._forward,
            "loss": self._loss,
            "backward(): autograd's engine": self._backward,
        }
        wrapped = [timers.wrap(label, piece) if timers else piece for label, piece in pieces.items()]
        self._pieces: list[Any] = wrapped

    def _zero_grad(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        for tensor in self._inputs:
            tensor.grad = None

    def _forward(self, i: int) -> Tensor:
        values = self._task.batches[i % len(self._task.batches)]
        for part in self._parts:
            values = (part(*values),)
        return values[0]

    def _loss(self, result: Tensor) -> Tensor:
        return self._task.distance(result)

    def _backward(self, loss: Tensor) -> None:
        loss.backward()

    def __call__(self, i: int) -> None:
        """One step on batch ``i`` modulo their number."""
        zero_grad, forward, loss, backward = self._pieces
        zero_grad()
        with self._task.context():
            value = loss(forward(i))
        backward(value)


@contextlib.contextmanager
def timed(timers: Timers) -> Iterator[list[str]]:
    """Timers around ``PARTS`` and around the guards of everything that is graphed; gives the names that are missing."""
    missing = []
    with contextlib.ExitStack() as stack:
        for label, module, name in PARTS:
            owner: Any = importlib.import_module(module)
            *path, attribute = name.split(".")
            for step in path:
                owner = getattr(owner, step, None)
            function = getattr(owner, attribute, None)
            if function is None:
                missing.append(f"{module}.{name}")
                continue
            static = attribute == "apply" or isinstance(vars(owner).get(attribute), staticmethod)
            wrapped: Any = timers.wrap(label, function)
            stack.enter_context(mock.patch.object(owner, attribute, staticmethod(wrapped) if static else wrapped))
        for graphed in list(getattr(fxgraph.graphed, "ALIVE", ())):
            if not hasattr(graphed, "_traced"):
                missing.append("fxgraph.graphed.GraphedCallable._traced")
            for traced in getattr(graphed, "_traced", ()):
                stack.enter_context(mock.patch.object(traced, "check", timers.wrap("guards", traced.check)))
                label = "traced bytecode: find inputs"
                stack.enter_context(mock.patch.object(traced, "call", timers.wrap(label, traced.call)))
        yield missing


def run(step: TimedStep, steps: int, cuda: bool, timers: Timers | None = None) -> list[float]:
    """Host microseconds of each step, with an idle device at its beginning."""
    gc.collect()
    gc.disable()
    try:
        times = []
        for i in range(steps):
            if cuda:
                torch.cuda.synchronize()
            begin = time.perf_counter_ns()
            step(i)
            times.append((time.perf_counter_ns() - begin) / 1e3)
            if timers is not None:
                timers.end_step()
        if cuda:
            torch.cuda.synchronize()
        return times
    finally:
        gc.enable()


def graph(entry: str, task: Task) -> list[Any]:
    """The task's parts, graphed as the contestant of this name does it."""
    if entry == "fxgraph-compile":
        return [torch.compile(part, backend="graphed") for part in task.parts]
    samples = task.samples()
    with task.context():
        graphed = fxgraph.make_graphed_callables(task.parts, samples, options=dict(CONTESTANTS[entry].options))
    return list(graphed)


def report(timers: Timers, plain_us: float) -> str:
    """The table of parts, longest first, and how much of a step they explain."""
    steps = len(timers.steps)
    found = [(timers.median_us(label), label) for label in timers.calls]
    total = sum(us for us, _ in found)
    rows = [
        [label, f"{timers.calls[label] / steps:g}", f"{us:.1f}", f"{us / total:.0%}"]
        for us, label in sorted(found, reverse=True)
    ]
    rows.append(["sum of the parts", "", f"{total:.1f}", ""])
    rows.append(["a step without timers, median", "", f"{plain_us:.1f}", ""])
    headers, sides = ["part", "calls/step", "host µs/step", "share"], ("left", "right", "right", "right")
    return str(tabulate(rows, headers, disable_numparse=True, colalign=sides))


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("workload", choices=list(WORKLOADS), metavar="workload", help=", ".join(WORKLOADS))
    parser.add_argument("--device", choices=["cuda", "cpu"], help="default: cuda if there is one, else cpu")
    parser.add_argument("--entry", choices=ENTRIES, default="fxgraph", help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=100, help="timed steps (default: %(default)s)")
    parser.add_argument("--ops", type=int, default=15, help="rows of torch.profiler's table (default: %(default)s)")
    arguments = parser.parse_args()
    arguments.device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if arguments.steps < 1:
        parser.error("--steps must be at least 1")
    reason = CONTESTANTS[arguments.entry].not_available()
    if reason:
        parser.error(f"--entry {arguments.entry}: not available: {reason}")
    return arguments


def main() -> int:
    """Profile one workload and print both tables."""
    arguments = parse_arguments()
    cuda = arguments.device == "cuda"
    task = WORKLOADS[arguments.workload].make(torch.device(arguments.device))
    parts = graph(arguments.entry, task)
    plain = TimedStep(task, parts)
    run(plain, 3 * len(task.batches), cuda)  # captures what the entry captures at its first calls
    plain_us = statistics.median(run(plain, arguments.steps, cuda))
    timers = Timers()
    step = TimedStep(task, parts, timers)
    with timed(timers) as missing:
        run(step, arguments.steps, cuda, timers)
    where = torch.cuda.get_device_name(0) if cuda else "CPU engine"
    print(f"{arguments.workload}, {arguments.entry}, {where}, torch {torch.__version__}, {arguments.steps} steps\n")
    print(report(timers, plain_us))
    own, around = cost_of_a_timer()
    print(f"\na timer costs {own / 1e3:.2f} µs inside and {around / 1e3:.2f} µs around, which the table leaves out")
    if missing:
        print("no such names any more, so their time is in the part around them: " + ", ".join(missing))
    counts = fxgraph.stats()
    if counts.eager_calls:
        print(f"{counts.eager_calls} calls ran eagerly: {counts.eager_reasons}")
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with profile(activities=activities) as profiled:
        run(plain, min(arguments.steps, 20), cuda)
    print(f"\ntorch.profiler, {min(arguments.steps, 20)} steps without timers\n")
    print(profiled.key_averages().table(sort_by="self_cpu_time_total", row_limit=arguments.ops))
    return 0


if __name__ == "__main__":
    sys.exit(main())
