"""Plans shared by callables that are alike: twelve equal blocks are lowered once.

Note [When a plan is shared]

Dynamo reads a method once for all objects of which its guards say that what it has read is true, as ``torch.compile``
does with the instances of a class; each other callable is read by itself. What comes after (AOTAutograd, the rules, the
plan) follows from the torch-level graph, from what is to be seen of its inputs, and from the state of torch. So within
one call of ``make_graphed_callables``, in which no code of the user's runs between one callable and the next, a plan
serves every graph that has the same :func:`key_of`. The key is an account of everything that tracing may look at; a
graph or an input of which that cannot be said has none, and is planned by itself. A plan is data: it holds no memory of
anybody's.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import fx

from . import likeness
from .plan import Plan
from .trace import InputSpec, PythonTrace


class Plans:
    """The plans that the callables of one ``make_graphed_callables`` share."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Plan] = {}
        self.read: dict[Callable[..., Any], list[PythonTrace]] = {}
        """What has been read of each function; a method counts as its ``__func__``."""

    def find(self, key: Hashable | None) -> Plan | None:
        """The plan for a key, if one has been kept."""
        return None if key is None else self._known.get(key)

    def keep(self, key: Hashable | None, plan: Plan) -> None:
        """Have the plan found by its key."""
        if key is not None:
            self._known[key] = plan


def key_of(
    graph: fx.GraphModule, specs: Sequence[InputSpec], tensors: Sequence[torch.Tensor], for_inductor: bool = False
) -> Hashable | None:
    """What two torch-level graphs must have in common to have the same plan; None where that cannot be said.

    Args:
        graph: all of its inputs are tensors.
        specs: what they are.
        tensors: the inputs.
        for_inductor: whether the plan is of the ops that inductor wants to be given.
    """
    try:
        return for_inductor, likeness.state(), tuple(specs), _nodes(graph.graph), likeness.looks(tensors)
    except likeness.Unknown:
        return None


def _nodes(graph: fx.Graph) -> Hashable:
    place: dict[fx.Node, int] = {}
    found = []
    for node in graph.nodes:
        if node.op not in ("placeholder", "call_function", "call_method", "output") or not likeness.is_torchs(node):
            raise likeness.Unknown
        # With the name, which leads from an op of the plan back to the node, and the user's line, for messages.
        args = _frozen(node.args, place), _frozen(node.kwargs, place)
        found.append((node.op, node.target, node.name, node.stack_trace, *args))
        place[node] = len(place)
    return tuple(found)


def _frozen(value: Any, place: dict[fx.Node, int]) -> Hashable:
    if isinstance(value, fx.Node):
        return "node", place[value]
    if type(value) in likeness.PLAIN or isinstance(value, torch.memory_format):
        return type(value), repr(value)  # 0.0 and -0.0 are equal, and so are 1, 1.0 and True
    if isinstance(value, slice):
        return slice, _frozen((value.start, value.stop, value.step), place)
    if isinstance(value, (tuple, list)):  # FX has lists and tuples of its own
        return isinstance(value, tuple), tuple([_frozen(one, place) for one in value])
    if isinstance(value, dict):
        return dict, tuple([(_frozen(name, place), _frozen(one, place)) for name, one in value.items()])
    raise likeness.Unknown
