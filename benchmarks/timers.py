"""Timers around functions: how long each takes without those inside it that are timed too."""

from __future__ import annotations

import collections
import functools
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any


class Timers:
    """Exclusive host time by label, per step.

    A timed function that runs in another thread (autograd runs CUDA backwards in a thread per device) counts as inside
    what the main thread is doing, for that one waits.

    Attributes:
        ns: nanoseconds by label in the step that runs, without timed functions inside.
        steps: the same for each step that has ended.
        calls: calls by label, all steps.
        inside: calls of timed functions directly inside, by the outer label, all steps.
    """

    def __init__(self) -> None:
        self.ns: collections.Counter[str] = collections.Counter()
        self.steps: list[collections.Counter[str]] = []
        self.calls: collections.Counter[str] = collections.Counter()
        self.inside: collections.Counter[str] = collections.Counter()
        self._local = threading.local()
        self._main: list[list[Any]] = self._stack()

    def _stack(self) -> list[list[Any]]:
        """Running timed functions of this thread, each as [label, nanoseconds of those inside]."""
        try:
            stack: list[list[Any]] = self._local.stack
        except AttributeError:
            stack = self._local.stack = []
        return stack

    def wrap(self, label: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function with a timer. ``{}`` in a label stands for ``forward`` or ``backward``, whichever runs."""
        filled = {False: label.format("forward"), True: label.format("backward")}

        @functools.wraps(function, updated=())
        def timed(*args: Any, **kwargs: Any) -> Any:
            stack = self._stack()
            frame: list[Any] = [filled[bool(stack) and stack[0][0].startswith("backward")], 0]
            outer = stack[-1] if stack else self._main[-1] if self._main else None
            if outer is not None and outer[0].startswith("backward"):
                frame[0] = filled[True]
            stack.append(frame)
            begin = time.perf_counter_ns()
            try:
                return function(*args, **kwargs)
            finally:
                took = time.perf_counter_ns() - begin
                stack.pop()
                self.ns[frame[0]] += took - frame[1]
                self.calls[frame[0]] += 1
                if outer is not None:
                    outer[1] += took
                    self.inside[outer[0]] += 1

        return timed

    def end_step(self) -> None:
        """What comes now belongs to the next step."""
        self.steps.append(self.ns)
        self.ns = collections.Counter()

    def median_us(self, label: str) -> float:
        """Microseconds of a label in the median step, less what the timers themselves cost; see
        :func:`cost_of_a_timer`."""
        own, around = cost_of_a_timer()
        timers_ns = (self.calls[label] * own + self.inside[label] * around) / len(self.steps)
        return max(0.0, statistics.median(step[label] for step in self.steps) - timers_ns) / 1e3


@functools.cache
def cost_of_a_timer(calls: int = 20_000) -> tuple[float, float]:
    """Nanoseconds that a timer adds to the time of the function itself, and to that of the timed function around it."""
    timers = Timers()

    def nothing(*args: Any) -> None:
        pass

    timed = timers.wrap("nothing", nothing)

    def around() -> None:
        for _ in range(calls):
            timed(1)

    begin = time.perf_counter_ns()
    for _ in range(calls):
        nothing(1)
    plain = (time.perf_counter_ns() - begin) / calls
    timers.wrap("around", around)()
    return timers.ns["nothing"] / calls - plain, timers.ns["around"] / calls
