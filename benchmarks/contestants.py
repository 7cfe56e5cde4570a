"""Who is measured: each contestant turns a task into something that takes training steps.

Nothing here imports fxgraph or Dynamo before a contestant asks for it, so that eager and the bare replay are measured
in processes that have seen neither.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from workloads import Batch, Task, like


class Runner(Protocol):
    """Takes steps. A step is forward, loss and backward on one of the task's batches."""

    def step(self, i: int) -> None:
        """One step on batch ``i`` modulo their number. This is what is timed."""

    def checked_step(self, i: int) -> Sequence[Tensor | None]:
        """A step that is not timed, and the gradients that it gave, in the order of ``Task.leaves``."""


class Loop:
    """The plain training loop: ``zero_grad(set_to_none=True)``, forward, loss, backward."""

    def __init__(
        self, task: Task, parts: Sequence[Callable[..., Tensor]], before_forward: Callable[[], None] | None = None
    ) -> None:
        self._task, self._parts, self._before_forward = task, tuple(parts), before_forward
        self._optimizer = torch.optim.SGD(task.parameters())  # for its zero_grad; it takes no step
        self._inputs_with_gradient = [t for batch in task.batches for t in batch if t.requires_grad]

    def step(self, i: int) -> None:
        """See :class:`Runner`."""
        batch = self._task.batches[i % len(self._task.batches)]
        self._optimizer.zero_grad(set_to_none=True)
        for tensor in self._inputs_with_gradient:
            tensor.grad = None
        if self._before_forward is not None:
            self._before_forward()
        with self._task.context():
            loss = self._task.loss(self._parts, batch)
        loss.backward()

    def checked_step(self, i: int) -> Sequence[Tensor | None]:
        """See :class:`Runner`."""
        self.step(i)
        return [leaf.grad for leaf in self._task.leaves(self._task.batches[i % len(self._task.batches)])]


@dataclasses.dataclass(frozen=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    inputs: Batch
    gradients: list[Tensor | None]


class Bare:
    """The floor: eager's forward, loss and backward in one CUDA graph per shape, with static inputs and gradients.

    A timed step is one replay: no input is copied, no gradient reset, no Python of the model or of autograd runs.
    Capture as torch's notes on CUDA graphs have it (whole-network capture): warm-up on a side stream, gradients None
    before the capture so that the backward makes them in the graph's pool. Warm-up and capture use the same stream, so
    that nodes which accumulate gradients belong to it.
    """

    def __init__(self, task: Task) -> None:
        self._task = task
        self._stream = torch.cuda.Stream()
        by_shape: dict[tuple[torch.Size, ...], _Captured] = {}
        for batch in task.batches:
            key = tuple(tensor.shape for tensor in batch)
            if key not in by_shape:
                by_shape[key] = self._capture(like(batch))
        self._captured = [by_shape[tuple(tensor.shape for tensor in batch)] for batch in task.batches]

    def _capture(self, inputs: Batch) -> _Captured:
        leaves = self._task.leaves(inputs)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(3):
                self._forward_backward(inputs, leaves)
        torch.cuda.current_stream().wait_stream(self._stream)
        for leaf in leaves:
            leaf.grad = None
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._stream):
            self._forward_backward(inputs, leaves)
        captured = _Captured(graph, inputs, [leaf.grad for leaf in leaves])
        for leaf in leaves:
            leaf.grad = None  # the next capture makes its own
        return captured

    def _forward_backward(self, inputs: Batch, leaves: Sequence[Tensor]) -> None:
        for leaf in leaves:
            leaf.grad = None
        with self._task.context():
            loss = self._task.loss(self._task.parts, inputs)
        loss.backward()

    def step(self, i: int) -> None:
        """See :class:`Runner`."""
        self._captured[i % len(self._captured)].graph.replay()

    def checked_step(self, i: int) -> Sequence[Tensor | None]:
        """See :class:`Runner`."""
        captured = self._captured[i % len(self._captured)]
        with torch.no_grad():
            for static, given in zip(captured.inputs, self._task.batches[i % len(self._captured)], strict=True):
                static.copy_(given)
        captured.graph.replay()
        return captured.gradients


@dataclasses.dataclass(frozen=True)
class Contestant:
    """A way to run a task.

    Attributes:
        name: how tables and the JSON call it; names of fxgraph's own begin with ``fxgraph``.
        devices: kinds of device on which it takes part.
        prepare: makes the runner.
        modules: what it imports; not part of the set-up that is timed.
        options: options of fxgraph that it needs.
    """

    name: str
    description: str
    devices: tuple[str, ...]
    prepare: Callable[[Task], Runner]
    modules: tuple[str, ...] = ()
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def load(self) -> None:
        """Import what the contestant needs."""
        for name in self.modules:
            importlib.import_module(name)

    def not_available(self) -> str | None:
        """Why this contestant cannot take part, if ``fxgraph.Options`` does not accept its options."""
        if not self.options:
            return None
        import fxgraph

        try:
            fxgraph.Options.of(dict(self.options))
        except fxgraph.OptionError:
            return "no " + ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        return None


def _eager(task: Task) -> Runner:
    return Loop(task, task.parts)


def _torch_graphed(task: Task) -> Runner:
    return _graphed(task, torch.cuda.make_graphed_callables)


def _fxgraph(task: Task, options: Mapping[str, Any] | None = None) -> Runner:
    import fxgraph

    return _graphed(task, functools.partial(fxgraph.make_graphed_callables, options=options))


def _graphed(task: Task, graph: Callable[..., Any]) -> Runner:
    samples = task.samples()
    with task.context():
        return Loop(task, graph(task.parts, samples) if len(samples) > 1 else (graph(task.parts[0], samples[0]),))


def _compiled(task: Task, before_forward: Callable[[], None] | None = None, **how: Any) -> Runner:
    return Loop(task, [torch.compile(part, **how) for part in task.parts], before_forward)


def _in_trees(task: Task, **how: Any) -> Runner:
    # CUDA graph trees must know where a step begins: torch.compiler.cudagraph_mark_step_begin's own page.
    return _compiled(task, torch.compiler.cudagraph_mark_step_begin, **how)


def _with_options(name: str, **options: Any) -> Contestant:
    description = "fxgraph.make_graphed_callables, " + ", ".join(f"{key}={value!r}" for key, value in options.items())
    modules = (*_FXGRAPH, *(_COMPILE if options.get("kernels") == "inductor" else ()))
    return Contestant(name, description, _BOTH, functools.partial(_fxgraph, options=options), modules, options)


_GPU, _CPU, _BOTH = ("cuda",), ("cpu",), ("cuda", "cpu")
_FXGRAPH = ("fxgraph",)  # imports Dynamo, and registers the backend "graphed" where fxgraph is not installed
_COMPILE = ("torch._dynamo", "torch._inductor.compile_fx")

CONTESTANTS = {
    contestant.name: contestant
    for contestant in (
        Contestant("bare", "a CUDAGraph of the whole step, replayed", _GPU, Bare),
        Contestant("eager", "eager", _BOTH, _eager),
        Contestant("torch-graphed", "torch.cuda.make_graphed_callables", _GPU, _torch_graphed),
        Contestant(
            "cudagraphs",
            'torch.compile(backend="cudagraphs")',
            _GPU,
            functools.partial(_in_trees, backend="cudagraphs"),
            _COMPILE,
        ),
        Contestant(
            "reduce-overhead",
            'torch.compile(mode="reduce-overhead")',
            _GPU,
            functools.partial(_in_trees, mode="reduce-overhead"),
            _COMPILE,
        ),
        Contestant(
            "inductor",
            'torch.compile(backend="inductor")',
            _CPU,
            functools.partial(_compiled, backend="inductor"),
            _COMPILE,
        ),
        Contestant("fxgraph", "fxgraph.make_graphed_callables", _BOTH, _fxgraph, _FXGRAPH),
        Contestant(
            "fxgraph-compile",
            'torch.compile(backend="graphed")',
            _BOTH,
            functools.partial(_compiled, backend="graphed"),
            _FXGRAPH,
        ),
        _with_options("fxgraph-inductor", kernels="inductor"),
        Contestant(
            "fxgraph-compile-inductor",
            'torch.compile(backend="graphed", options={"kernels": "inductor"})',
            _BOTH,
            functools.partial(_compiled, backend="graphed", options={"kernels": "inductor"}),
            (*_FXGRAPH, *_COMPILE),
            {"kernels": "inductor"},
        ),
        _with_options("fxgraph-in_graph", grads="in_graph"),
        _with_options("fxgraph-inductor-in_graph", kernels="inductor", grads="in_graph"),
    )
}
