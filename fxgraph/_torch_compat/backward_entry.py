"""Where every backward that Python asks for enters the engine: ``torch.autograd._engine_run_backward``.

torch has no hook there. ``torch.compiler`` wraps the same function while it traces (torch 2.13). The wrapper here is
installed when it is first needed, stays, and does nothing to a backward that accumulates into all leaves.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch.autograd import graph


class Engine(Protocol):
    """Runs the backward that was asked for."""

    def __call__(self, more_inputs: Sequence[torch.Tensor], allow_unused: bool) -> tuple[torch.Tensor | None, ...]:
        """With more inputs than were given; gives the gradients of all of them, or nothing where they accumulate."""


Around = Callable[[Sequence[Any], Sequence[Any], bool, bool, bool, Engine], Any]
"""``around(outputs, inputs, create_graph, allow_unused, accumulates, engine)`` -> what the backward gives. ``outputs``
and ``inputs`` are tensors or gradient edges; ``accumulates`` tells ``backward(inputs=...)`` from ``autograd.grad``."""

_installed: list[Around] = []


def around_restricted(around: Around) -> None:
    """From now on, every backward that is asked for the gradients of some inputs goes through this. Idempotent."""
    if around in _installed:
        return
    _installed.append(around)
    plain = graph._engine_run_backward

    @functools.wraps(plain)
    def run(
        t_outputs: Sequence[Any],
        grad_tensors: Sequence[Any],
        keep_graph: bool,
        create_graph: bool,
        inputs: Sequence[Any] = (),
        allow_unreachable: bool = False,
        accumulate_grad: bool = False,
    ) -> Any:
        if not inputs:
            return plain(t_outputs, grad_tensors, keep_graph, create_graph, (), allow_unreachable, accumulate_grad)

        def engine(more_inputs: Sequence[torch.Tensor], allow_unused: bool) -> Any:
            every = (*inputs, *more_inputs)
            return plain(
                t_outputs,
                grad_tensors,
                keep_graph,
                create_graph,
                every,
                allow_unreachable=allow_unused,
                accumulate_grad=accumulate_grad,
            )

        return around(t_outputs, inputs, create_graph, allow_unreachable, accumulate_grad, engine)

    for module in (graph, torch.autograd):  # which has imported it
        module._engine_run_backward = run  # type: ignore[attr-defined]
