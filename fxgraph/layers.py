"""Equal layers of one torch-level graph: a few of them are lowered, the others are copies of what that gave.

Note [When layers are copied]

A run of layers qualifies where they stand one behind the other, call for call the same (``passes.find_repeats``), each
reads what the one before gives, inputs of its own that look alike, and what all of them read; nobody but the next one
reads what a layer gives. Of such a run four are lowered: the first, two from the middle and the last. Then the layers
in the middle are compared in the joint graph (``stitching.py``). Each has a block of calls in the forward and one in
the backward, for autograd's engine takes the nodes that are ready in the reverse order of their making, so all of a
layer's before any of the one before. If both blocks are the same, call for call, and so is what they read of their
neighbours, then a layer more would be one more of the same: what a layer's lowering depends on is what it is given, and
it has given its successor what it was given itself. So the second of them is copied as often as layers are missing, and
each copy gets the metadata of its own layer: names and lines of the user's code, autograd's numbers, fake values in
memory of their own. The result is the graph that lowering all of them gives, which ``tests/test_layers.py`` compares
node by node.

Where anything is otherwise the whole graph is lowered. Not even tried are layers that write in place, draw their
arguments from somewhere else, or call what is not torch's own.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

import passes
from passes.facts import CALLS, name_of, value_of
from passes.repeats import Region

from . import likeness

FEWEST = 6
"""So many layers a run has at least, for four of them are lowered."""
FEWEST_CALLS = 12
"""So many calls of the torch-level graph are saved at least."""
KEPT = 4
"""So many layers are lowered: the first three of a run and its last one."""


@dataclasses.dataclass(frozen=True)
class Short:
    """A torch-level graph with four layers of a run only.

    Attributes:
        graph: takes the inputs ``taken``.
        taken: indices of inputs of the whole graph.
        layers: of the whole graph, all of the run.
        own: for each layer the indices of the inputs that it alone reads; position by position they stand for each
            other.
    """

    graph: fx.GraphModule
    taken: tuple[int, ...]
    layers: tuple[Region, ...]
    own: tuple[tuple[int, ...], ...]


def shorten(graph: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Short | None:
    """The graph with four layers of the longest run that qualifies; see Note [When layers are copied].

    Args:
        graph: all of its inputs are tensors.
        inputs: the tensors.
    """
    calls = sum(node.op in CALLS for node in graph.graph.nodes)
    if calls < FEWEST + FEWEST_CALLS:
        return None
    try:
        likeness.state()
        looks = [likeness.looks([tensor]) for tensor in inputs]
    except likeness.Unknown:
        return None
    memory = collections.Counter(tensor.untyped_storage()._cdata for tensor in inputs)
    placeholders = graph.graph.find_nodes(op="placeholder")
    alone = {
        node: look
        for node, look, tensor in zip(placeholders, looks, inputs, strict=True)
        if memory[tensor.untyped_storage()._cdata] == 1
    }
    runs = [
        run
        for repeat in passes.find_repeats(graph, min_size=1, max_size=max(1, calls // FEWEST))
        if repeat.count >= FEWEST and all(map(_may_be_copied, repeat.regions[0].nodes))
        for run in _runs(repeat.regions, alone)
    ]
    layers = max(runs, key=_saved, default=())
    return _short(graph, placeholders, layers) if layers and _saved(layers) >= FEWEST_CALLS else None


def _saved(run: Sequence[Region]) -> int:
    """Calls that need not be lowered."""
    return (len(run) - KEPT) * len(run[0].nodes)


def _runs(regions: Sequence[Region], alone: dict[fx.Node, Hashable]) -> Iterable[Sequence[Region]]:
    """Runs of at least :data:`FEWEST` layers."""
    first = 0
    for steps, group in itertools.groupby(_step(one, two, alone) for one, two in itertools.pairwise(regions)):
        end = first + len(list(group)) + 1
        if steps is not None:
            own = [
                (node, look) for node, (kind, look) in zip(regions[first].inputs, steps, strict=True) if kind == "own"
            ]
            run = regions[first if all(alone.get(node) == look for node, look in own) else first + 1 : end]
            if len(run) >= FEWEST:
                yield run
        first = end - 1


def _step(before: Region, layer: Region, alone: dict[fx.Node, Hashable]) -> tuple[tuple[str, Hashable], ...] | None:
    """What a layer reads, in terms that are the same for all layers of a run; None if it is none of a run."""
    if before.nodes[-1].next is not layer.nodes[0]:
        return None
    inside, given = set(layer.nodes), {node: position for position, node in enumerate(before.nodes)}
    if any(user not in inside for node in before.outputs for user in node.users if user not in given):
        return None
    found: list[tuple[str, Hashable]] = []
    for node in layer.inputs:
        if node in given:
            found.append(("before", given[node]))
        elif node in alone and inside.issuperset(node.users):
            found.append(("own", alone[node]))
        else:
            found.append(("all", node))
    return tuple(found)


def _may_be_copied(node: fx.Node) -> bool:
    """Whether a call gives tensors, calls torch's own, with plain constants, and writes nothing."""
    name = name_of(node)
    if node.op not in ("call_function", "call_method") or not likeness.is_torchs(node) or name is None:
        return False
    values = value_of(node) if isinstance(value_of(node), (tuple, list)) else (value_of(node),)
    if not values or not all(isinstance(value, torch.Tensor) for value in values):
        return False  # a switch of grad mode or autocast, a number
    constants = [leaf for leaf in pytree.tree_leaves((node.args, node.kwargs)) if not isinstance(leaf, fx.Node)]
    if not all(type(leaf) in likeness.PLAIN or isinstance(leaf, (slice, torch.memory_format)) for leaf in constants):
        return False
    if isinstance(node.target, torch._ops.OpOverload):
        return not node.target._schema.is_mutable
    in_place = _position_of_inplace(node.target) if node.op == "call_function" else None
    return not (
        (name.endswith("_") and not name.endswith("__"))
        or name.startswith("__i")
        or name in _WRITING
        or (name in _STATISTICS and any(leaf is True for leaf in constants))
        or node.kwargs.get("out") is not None
        or node.kwargs.get("inplace", False) is not False
        or (in_place is not None and len(node.args) > in_place and node.args[in_place] is not False)
    )


_WRITING = {"setitem", "__setitem__", "resize", "set", "data"} | {
    f"i{name}" for name in ("add", "sub", "mul", "truediv", "floordiv", "pow", "mod", "and", "or", "xor", "matmul")
}
_STATISTICS = {"batch_norm", "instance_norm", "native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"}


@functools.cache
def _position_of_inplace(function: Callable[..., Any]) -> int | None:
    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # built in: those have an underscore
        return None
    return names.index("inplace") if "inplace" in names else None


def _short(graph: fx.GraphModule, placeholders: Sequence[fx.Node], layers: Sequence[Region]) -> Short:
    index = {node: i for i, node in enumerate(placeholders)}
    own_at = [
        j for j, node in enumerate(layers[1].inputs) if node in index and node is not layers[2].inputs[j]
    ]  # what each reads of its own
    dropped = layers[KEPT - 1 : -1]
    gone = {node for layer in dropped for node in (*layer.nodes, *(layer.inputs[j] for j in own_at))}
    stands = dict(zip(layers[-2].nodes, layers[KEPT - 2].nodes, strict=True))  # for what the last layer reads
    copied = fx.Graph()
    renamed: dict[fx.Node, fx.Node] = {}
    for node in graph.graph.nodes:
        if node not in gone:
            renamed[node] = copied.node_copy(node, lambda one: renamed[stands.get(one, one)])
    return Short(
        fx.GraphModule(graph, copied),
        tuple(i for node, i in index.items() if node not in gone),
        tuple(layers),
        tuple(tuple(index.get(layer.inputs[j], -1) for j in own_at) for layer in layers),
    )
