"""How one contestant is measured: set-up, gradients against float64, and rounds of timed steps.

Nothing here knows of processes or of other contestants; ``worker.py`` calls it.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from contestants import Contestant, Loop, Runner
from torch import Tensor
from torch.utils.checkpoint import checkpoint_sequential
from workloads import Task, Workload

MIB = 2**20
SETUP_CYCLES = 3
"""Passes over all batches that belong to the set-up: CUDA graph trees warm up, record and replay at the first three."""

SLOW_SETUP_S = 30.0
"""No further pass once the set-up has taken so long: who compiles or captures at every call would never end."""

SMALL_GRADIENT = 1e-3
"""An error is relative to the norm of the tensor's own gradient, but at least to this share of the largest norm: some
gradients are zero in exact arithmetic (a key's bias in attention), and of these only rounding is left."""


@dataclasses.dataclass(frozen=True)
class SetUp:
    """What setting up a contestant has shown.

    Attributes:
        setup_s: seconds for graphing or compiling and the first ``SETUP_CYCLES`` passes over the batches.
        step_s: seconds per step afterwards, roughly; for planning the rounds.
        gradient_error: see :func:`gradient_error`; infinite for a NaN or a missing gradient.
        reserved_mib: what torch's CUDA allocator holds for the task after steps, parameters and batches included.
        peak_mib: the most that it held from the beginning of the set-up on.
    """

    setup_s: float
    step_s: float
    gradient_error: float
    reserved_mib: float | None
    peak_mib: float | None


@dataclasses.dataclass(frozen=True)
class Round:
    """Microseconds per step in one round. ``host_us`` is None on the CPU, where it is the same as ``wall_us``."""

    wall_us: float
    host_us: float | None


class Measured:
    """A contestant on a workload.

    Raises:
        Exception: whatever the contestant raises, from the constructor and from each method.
    """

    def __init__(self, workload: Workload, contestant: Contestant, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        contestant.load()
        before = self._reserved()
        self._task = workload.make(device)
        self._expected = reference_gradients(self._task)
        _load_libraries(self._task)
        self._clean()
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        self._runner: Runner = contestant.prepare(self._task)
        for _ in range(SETUP_CYCLES):
            self._run(self.cycle)
            self._wait()
            if time.perf_counter() - start > SLOW_SETUP_S:
                break
        setup_s = time.perf_counter() - start
        self._clean()
        start = time.perf_counter()
        self._run(self.cycle)
        self._wait()
        step_s = (time.perf_counter() - start) / self.cycle
        held: tuple[float | None, float | None] = (None, None)
        if self._cuda:  # before the comparison of gradients, which takes memory too
            held = (self._reserved() - before) / MIB, (torch.cuda.max_memory_reserved() - before) / MIB
        self.set_up = SetUp(setup_s, step_s, self.gradient_error(), *held)
        gc.collect()
        gc.freeze()  # what torch and the compilers have left need not be looked through before every round

    @property
    def cycle(self) -> int:
        """After so many steps the batches come again."""
        return len(self._task.batches)

    def gradient_error(self) -> float:
        """The largest error over the checked batches, each in a step of its own."""
        found = [gradient_error(self._runner.checked_step(i), expected) for i, expected in enumerate(self._expected)]
        return max(found)

    def round(self, warm_steps: int, steps: int, host_steps: int) -> Round:
        """Time steps, after some that are not timed.

        Wall: CUDA events around ``steps`` of them, so that host and device overlap as they do in training. Host: for
        each of ``host_steps`` steps the time until all of it is launched, with an idle device at its beginning, so that
        no full queue holds the host up; the median of these.
        """
        gc.collect()
        gc.disable()  # a collection in one contestant's round and not in another's would be noise
        try:
            self._run(warm_steps)
            self._wait()
            if not self._cuda:
                begin = time.perf_counter()
                self._run(steps)
                return Round((time.perf_counter() - begin) / steps * 1e6, None)
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            self._run(steps)
            end.record()
            end.synchronize()
            wall_us = start.elapsed_time(end) / steps * 1e3
            return Round(wall_us, self._host_us(host_steps))
        finally:
            gc.enable()

    def notes(self) -> list[str]:
        """What a reader has to know about a figure: parts that ran eagerly, graph breaks, skipped CUDA graphs."""
        found = []
        if "fxgraph" in sys.modules:
            counts = sys.modules["fxgraph"].stats()
            if counts.eager_calls:
                reasons = "; ".join(f"{count} × {reason}" for reason, count in counts.eager_reasons.items() if count)
                found.append(f"{counts.eager_calls} calls ran eagerly: {reasons}")
            found += [f"set aside: {reason}" for reason, count in counts.eager_reasons.items() if not count]
        if "torch._dynamo" not in sys.modules:
            return found
        counters: Any = sys.modules["torch._dynamo"].utils.counters
        breaks, skips = sum(counters["graph_break"].values()), counters["inductor"]["cudagraph_skips"]
        if breaks:
            found.append(f"{breaks} graph break(s)")
        if skips:
            found.append(f"CUDA graphs skipped {skips} time(s)")
        return found

    def _run(self, steps: int) -> None:
        step: Callable[[int], None] = self._runner.step
        for i in range(steps):
            step(i)

    def _host_us(self, steps: int) -> float:
        times = []
        for i in range(steps):
            torch.cuda.synchronize()
            begin = time.perf_counter_ns()
            self._runner.step(i)
            times.append(time.perf_counter_ns() - begin)
        torch.cuda.synchronize()
        return statistics.median(times) / 1e3

    def _wait(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()

    def _clean(self) -> None:
        gc.collect()
        if self._cuda:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    def _reserved(self) -> int:
        return torch.cuda.memory_reserved() if self._cuda else 0


def reference_gradients(task: Task) -> list[list[Tensor | None]]:
    """For each checked batch the gradients of all leaves, computed in float64, kept on the CPU.

    Layers of a sequence are checkpointed: in float64 twelve large blocks at once would fill the card.
    """
    exact = task.in_float64()
    parts = [
        functools.partial(checkpoint_sequential, part, len(part), use_reentrant=False)
        if isinstance(part, torch.nn.Sequential)
        else part
        for part in exact.parts
    ]
    loop = Loop(exact, parts)
    return [
        [None if gradient is None else gradient.cpu() for gradient in loop.checked_step(i)]
        for i in range(len(exact.batches))
    ]


def gradient_error(found: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> float:
    """The largest error of a tensor's gradient: norm of the difference by norm (2-norms); see ``SMALL_GRADIENT``.

    Infinite where one is missing, is there though none is expected, or is NaN. Norms rather than largest elements,
    since a ReLU that falls to the other side by rounding, as many do in bfloat16, moves single elements by much.
    """
    if [gradient is None for gradient in found] != [gradient is None for gradient in expected]:
        return float("inf")
    pairs = [(f, e) for f, e in zip(found, expected, strict=True) if f is not None and e is not None]
    if not pairs:
        return 0.0
    scales = [e.norm().item() for _, e in pairs]
    least = SMALL_GRADIENT * max(scales) or 1.0
    worst = 0.0
    for (f, e), scale in zip(pairs, scales, strict=True):
        error = (f.double() - e.to(f.device)).norm().item() / max(scale, least)
        if not error <= worst:  # so that a NaN stays
            worst = error
        if worst != worst:
            return float("inf")
    return worst


def _load_libraries(task: Task) -> None:
    """One eager step on a copy: kernels, cuBLAS and cuDNN are loaded at their first use, whoever comes first."""
    copied = dataclasses.replace(task, parts=tuple(copy.deepcopy(part) for part in task.parts))
    Loop(copied, copied.parts).step(0)
    for batch in task.batches:
        for tensor in batch:
            tensor.grad = None
