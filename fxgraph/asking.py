"""Backwards that are asked for some gradients only, where parameters are no inputs of the node (``grads="in_graph"``).

Note [Asking for the gradients of parameters]

A backward that is asked for some gradients only (``torch.autograd.grad``, ``backward(inputs=...)``) runs the nodes that
lead to these, and a node whose parameters are no inputs leads to none of them. So such a backward is looked at before
it starts: where its graph holds nodes of ours for a parameter that is asked for, the nodes' *anchors* are asked for
too, and what the nodes give for the parameter is added to what the engine gives. An anchor is an input without values
that each such node has; that the engine is going to come to it is also how a node knows that nothing in particular was
asked for, and that it is to accumulate.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

import torch

from ._torch_compat import backward_entry
from .accumulate import Request, is_accumulated
from .replay import Call


def look_at_backwards() -> None:
    """From now on ``torch.autograd.grad`` and ``backward(inputs=...)`` find parameters that are no inputs of a node."""
    backward_entry.around_restricted(_around)


def _around(
    outputs: Sequence[Any],
    inputs: Sequence[Any],
    create_graph: bool,
    allow_unused: bool,
    accumulates: bool,
    engine: backward_entry.Engine,
) -> Any:
    calls = _calls_asked(outputs, inputs)
    if not calls:
        return engine((), allow_unused)
    try:
        for call, places in calls:
            call.request = Request(list(places), accumulates)
        result = list(engine([call.anchor for call, _ in calls if call.anchor is not None], True) or ())
        if accumulates:
            return None
        result = result[: len(inputs)]
        with torch.set_grad_enabled(create_graph):
            for call, places in calls:
                found = call.request.found if call.request is not None else ()
                for k, where in places.items():
                    value = found[k] if found else None
                    for i in where:
                        result[i] = _sum(result[i], value)
    finally:
        for call, _ in calls:
            call.request = None
    if not allow_unused and any(value is None for value in result):
        raise RuntimeError(  # in torch's words
            "One of the differentiated Tensors appears to not have been used in the graph. "
            "Set allow_unused=True if this is the desired behavior."
        )
    return tuple(result)


def _sum(one: torch.Tensor | None, other: torch.Tensor | None) -> torch.Tensor | None:
    return one + other if one is not None and other is not None else one if other is None else other


def _calls_asked(outputs: Sequence[Any], inputs: Sequence[Any]) -> list[tuple[Call, dict[int, list[int]]]]:
    """The calls behind these outputs that have no edges to some of these inputs.

    With each of them, for those of ``plan.gradient_of`` that are asked for, where they are among the inputs.
    """
    asked: dict[int, list[int]] = collections.defaultdict(list)
    for i, given in enumerate(inputs):
        tensor = given if isinstance(given, torch.Tensor) else getattr(given.node, "variable", None)
        if tensor is not None and is_accumulated(tensor):
            asked[id(tensor)].append(i)
    found = []
    for call in _accumulating_calls(outputs) if asked else ():
        positions = call.accumulator.positions if call.accumulator is not None else ()
        pairs = zip(positions, call.parameters, strict=True)
        places = {k: asked[id(parameter)] for k, parameter in pairs if id(parameter) in asked}
        if places:
            found.append((call, places))
    return found


def _accumulating_calls(outputs: Sequence[Any]) -> list[Call]:
    """The calls of which a graph holds nodes without edges to their parameters."""
    waiting = [output.grad_fn if isinstance(output, torch.Tensor) else output.node for output in outputs]
    seen, found = set(waiting), []
    while waiting:
        node = waiting.pop()
        if node is None:
            continue
        call = getattr(node, "call", None)
        if isinstance(call, Call) and call.accumulator is not None:
            found.append(call)
        following = {node for node, _ in node.next_functions} - seen
        seen |= following
        waiting += following
    return found
