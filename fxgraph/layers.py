"""Equal layers of one torch-level graph: a few of them are lowered, the others are copies of what that gave.

Note [When layers are copied]

A run of layers qualifies where they stand one behind the other, call for call the same (``passes.find_repeats``), each
reads what the one before gives, inputs of its own that look alike, and what all of them read; nobody but the next one
reads what a layer gives. Of such a run four are lowered: the first, two from the middle and the last. Then the layers
in the middle are compared in the joint graph. Each has a block of calls in the forward and one in the backward, for
autograd's engine takes the nodes that are ready in the reverse order of their making, so all of a layer's before any of
the one before. If both blocks are the same, call for call, and so is what they read of their neighbours, then a layer
more would be one more of the same: what a layer's lowering depends on is what it is given, and it has given its
successor what it was given itself. So the second of them is copied as often as layers are missing, and each copy gets
the metadata of its own layer: names and lines of the user's code, autograd's numbers, fake values in memory of their
own. The result is the graph that lowering all of them gives, which ``tests/test_layers.py`` compares node by node.

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
from ._torch_compat import joint as meta
from ._torch_compat.fx import lazy_graph_module

FEWEST = 6
"""So many layers a run has at least, for four of them are lowered."""
FEWEST_CALLS = 12
"""So many calls of the torch-level graph are saved at least."""


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

    def lengthen(self, joint: fx.GraphModule, metadata: Any) -> tuple[fx.GraphModule, Any] | None:
        """The joint graph of the whole, from that of the short graph; None where its layers are not as they should be.

        Args:
            joint: it is not changed.
            metadata: AOTAutograd's.
        """
        try:
            return _Stitching(self, joint, metadata).result()
        except _Differs:
            return None


class _Differs(Exception):
    """Layers of a joint graph are not the same, or more than layers."""


# -- the torch-level graph --------------------------------------------------------------------------------------------


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


_KEPT = 4


def _saved(run: Sequence[Region]) -> int:
    """Calls that need not be lowered."""
    return (len(run) - _KEPT) * len(run[0].nodes)


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
    dropped = layers[_KEPT - 1 : -1]
    gone = {node for layer in dropped for node in (*layer.nodes, *(layer.inputs[j] for j in own_at))}
    stands = dict(zip(layers[-2].nodes, layers[_KEPT - 2].nodes, strict=True))  # for what the last layer reads
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


# -- the joint graph --------------------------------------------------------------------------------------------------


class _Stitching:
    """Blocks of the lowered layers (0 to 3), and the copies of the third; a layer is called by its place in the run."""

    def __init__(self, short: Short, joint: fx.GraphModule, metadata: Any) -> None:
        if meta.touches_inputs(metadata):
            raise _Differs
        self.short, self.joint, self.metadata = short, joint, metadata
        self.count = len(short.layers)
        placeholders = joint.graph.find_nodes(op="placeholder")
        self.inputs = dict(zip(short.taken, placeholders, strict=False))
        self.tangents = placeholders[len(short.taken) :]
        places = [meta.is_input(node.meta["desc"], i) for i, node in enumerate(self.inputs.values())]
        if not all(places) or len(places) != len(short.taken):
            raise _Differs
        self.own = [[self.inputs[i] for i in short.own[layer]] for layer in (1, 2)]
        calls = [node for node in joint.graph.nodes if node.op not in ("placeholder", "output")]
        backward = next((i for i, node in enumerate(calls) if _is_backward(node)), len(calls))
        self.calls = calls[:backward], calls[backward:]
        self.kept = [short.layers[i] for i in (0, 1, 2, -1)]
        self.origin = {node.name: (k, t) for k, layer in enumerate(self.kept) for t, node in enumerate(layer.nodes)}
        self.forward = _blocks(self.calls[0], [self._layer_of(node) for node in self.calls[0]], [0, 1, 2, 3])
        self.numbers = [_span(block) for block in self.forward]
        # Layers without parameters that require grad have no backward, and so has one that stands behind such.
        self.backward = _blocks(self.calls[1], self._layers_of_backward(), [3, 2, 1, 0], [3, 2, 1], [])
        self.middle = {*self.forward[2], *self.backward[2], *self.own[1]}  # what is copied
        self.step = self.numbers[2][0] - self.numbers[1][0]
        self._compare()

    def _layer_of(self, node: fx.Node) -> int | None:
        sources = node.meta.get("from_node")
        return self.origin.get(sources[0].name, (None, 0))[0] if sources else None

    def _layers_of_backward(self) -> list[int | None]:
        """By the numbers that autograd gave the nodes of the forward.

        An op that autograd does not follow carries the number that the next one is going to get. Sums of gradients,
        which the engine makes, have none of their own: they follow what has just run.
        """
        last = {node.meta["seq_nr"]: self._layer_of(node) for node in self.calls[0] if "seq_nr" in node.meta}
        found: list[int | None] = []
        for node in self.calls[1]:
            number = node.meta.get("seq_nr")
            if number is None or node.meta.get("is_gradient_acc"):
                found.append(found[-1] if found else None)
            elif number in last:
                found.append(last[number])
            else:
                found.append(next((k for k, (low, high) in enumerate(self.numbers) if low <= number <= high), None))
        return found

    def _compare(self) -> None:
        """The two layers in the middle are the same, and nobody reads them who should not.

        Raises:
            _Differs: if it is not so.
        """
        if [len(blocks[1]) - len(blocks[2]) for blocks in (self.forward, self.backward)] != [0, 0]:
            raise _Differs
        pairs = [*zip(self.forward[1], self.forward[2], strict=True)]
        pairs += zip(self.backward[1], self.backward[2], strict=True)
        self.next_to = {**dict(pairs), **dict(zip(*self.own, strict=True))}  # layer 1 -> layer 2
        self.after: dict[fx.Node, fx.Node] = {}  # layer 3's backward -> layer 2's: what layers read of the one after
        first = next((node for node in self.calls[0] if self._layer_of(node) == 0), None)
        head = set(itertools.takewhile(lambda node: node is not first, self.calls[0]))
        shared = head | {*self.inputs.values(), *self.tangents, *self.calls[1]} - self.middle - set(self.next_to)
        forward, backward = [set(block) for block in self.forward], [set(block) for block in self.backward]
        of_before: dict[fx.Node, fx.Node] = {}

        def read_alike(one: fx.Node, two: fx.Node) -> bool:
            if one is two:
                return two in shared  # of the backward it is a gradient that layers hand on as they get it
            if two in forward[1]:
                return one in forward[0] and of_before.setdefault(two, one) is one
            if two in backward[3]:
                return one in backward[2] and self.after.setdefault(two, one) is one
            return self.next_to.get(one) is two

        for one, two in pairs:
            mine, yours = (pytree.tree_flatten((node.args, node.kwargs)) for node in (one, two))
            if one.target is not two.target or mine[1] != yours[1] or not self._marked_alike(one, two):
                raise _Differs
            for a, b in zip(mine[0], yours[0], strict=True):
                if isinstance(a, fx.Node) and isinstance(b, fx.Node):
                    if not read_alike(a, b):
                        raise _Differs
                elif (type(a), repr(a)) != (type(b), repr(b)):
                    raise _Differs
        for links in (of_before, self.after):
            if len(set(links.values())) != len(links):
                raise _Differs
            if any(not _same_look(one, two) for two, one in links.items()):
                raise _Differs
        for one, two in zip(*self.own, strict=True):
            if not _same_look(one, two):
                raise _Differs
        self._nobody_else_reads(forward, backward)
        read_of_2 = {node for node in forward[2] for user in node.users if user in forward[3] or user in backward[3]}
        if read_of_2 != {self.next_to[node] for node in of_before}:
            raise _Differs

    def _marked_alike(self, one: fx.Node, two: fx.Node) -> bool:
        if one.op != "call_function" or one.meta.keys() != two.meta.keys() or not _same_look(one, two):
            return False
        if [source.name for source in one.meta.get("from_node", ())[1:]]:
            return False
        places = [self.origin.get(node.meta["from_node"][0].name) for node in (one, two) if "from_node" in node.meta]
        if places and (None in places or places[0][1] != places[1][1]):  # type: ignore[index]  # mypy sees no `in`
            return False
        low, high = self.numbers[1]
        number = one.meta.get("seq_nr")
        moved = number + self.step if number is not None and low <= number <= high else number
        return bool(two.meta.get("seq_nr") == moved)

    def _nobody_else_reads(self, forward: list[set[fx.Node]], backward: list[set[fx.Node]]) -> None:
        results = _results(self.joint)
        gradients = results[self._num_forward() :]
        output = self.joint.graph.output_node()
        allowed: list[tuple[Iterable[fx.Node], set[fx.Node]]] = [
            (forward[1], forward[1] | backward[1] | forward[2] | backward[2]),
            (forward[2], forward[2] | backward[2] | forward[3] | backward[3]),
            (backward[2], backward[2] | backward[1] | {output}),
            (self.own[0], forward[1] | backward[1]),
            (self.own[1], forward[2] | backward[2]),
        ]
        if any(user not in readers for nodes, readers in allowed for node in nodes for user in node.users):
            raise _Differs
        if not gradients:
            return
        of_input = dict(zip(self.inputs, gradients, strict=True))
        mine = [[of_input.pop(i) for i in self.short.own[layer]] for layer in (1, 2)]
        for one, two in zip(*mine, strict=True):
            if (one, two) != (None, None) and (two not in backward[2] or self.next_to.get(one) is not two):
                raise _Differs
        if any(value in backward[2] for value in of_input.values()):
            raise _Differs

    def _num_forward(self) -> int:
        results = _results(self.joint)
        return int(self.metadata.num_forward_returns) if self.tangents else len(results)

    # -- the whole graph ----------------------------------------------------------------------------------------------

    def result(self) -> tuple[fx.GraphModule, Any]:
        """The joint graph of the whole, and its metadata."""
        graph = fx.Graph()
        copies = range(_KEPT - 1, self.count - 1)  # layers of the run that are missing
        made: dict[fx.Node, fx.Node] = {}
        of_layer: dict[int, dict[fx.Node, fx.Node]] = {2: made, **{k: {} for k in copies}}
        memory = {k: meta.Memory() for k in copies}
        sources: dict[tuple[int, int], Any] = {}
        owner = {k: dict(zip(self.short.own[k], self.own[1], strict=True)) for k in copies}
        copied_inputs = {i: (k, template) for k in copies for i, template in owner[k].items()}
        total = len(self.short.taken) + len(copied_inputs)
        for i in range(total):
            node = graph.placeholder(f"primals_{i + 1}")
            k, template = copied_inputs.get(i, (None, self.inputs.get(i)))
            assert template is not None, "an input is taken, or a copy's own"
            node.meta = {**template.meta, "desc": meta.input_desc(i)}
            if k is None:
                made[template] = node
            else:
                of_layer[k][template] = node
                node.meta["val"] = memory[k].like(template.meta["val"])
        for tangent in self.tangents:
            made[tangent] = graph.node_copy(tangent)

        last = self.count - 2  # the last of the copies
        two, before = self.middle, set(self.forward[1])

        def source_of(node: fx.Node, k: int) -> fx.Node:
            """What the copy ``k`` of a node in layer 2 that reads ``node`` reads."""
            if node in two:
                return of_layer[k][node]
            if node in before:
                return of_layer[k - 1][self.next_to[node]]
            if node in self.after and k != last:
                return of_layer[k + 1][self.after[node]]
            return made[node]

        def of_last(node: fx.Node) -> fx.Node:
            return of_layer[last][node] if node in two else made[node]

        def of_next(node: fx.Node) -> fx.Node:
            return of_layer[_KEPT - 1][self.after[node]] if node in self.after else made[node]

        def keep(nodes: Iterable[fx.Node], read: Callable[[fx.Node], fx.Node], moved: meta.Memory) -> None:
            for node in nodes:
                new = made[node] = graph.node_copy(node, read)
                for one in node.all_input_nodes:
                    if read(one) is not made[one]:
                        moved.identify(one.meta.get("val"), read(one).meta.get("val"))
                if moved.moves(node.meta.get("val")):
                    new.meta["val"] = moved.like(node.meta["val"])
                if "seq_nr" in node.meta:
                    new.meta["seq_nr"] = self._number(node, 2)

        def copy(nodes: Iterable[fx.Node], k: int) -> None:
            for node in nodes:
                new = of_layer[k][node] = graph.node_copy(node, lambda one: source_of(one, k))
                for one in node.all_input_nodes:
                    memory[k].identify(one.meta.get("val"), source_of(one, k).meta.get("val"))
                new.meta["val"] = memory[k].like(node.meta.get("val"))
                if "seq_nr" in node.meta:
                    new.meta["seq_nr"] = self._number(node, k)
                self._mark(node, new, k, sources)

        # What reads a copy where it read the template lies in the copy's memory, if it is a view.
        behind, beneath = meta.Memory(), meta.Memory()
        head, tail = _around(self.calls[0], self.forward[0], self.forward[3])
        for nodes in (head, *self.forward[:3]):
            keep(nodes, made.__getitem__, behind)
        for k in copies:
            copy(self.forward[2], k)
        keep(self.forward[3], of_last, behind)
        keep(tail, made.__getitem__, behind)
        tail, head = _around(self.calls[1], self.backward[3], self.backward[0] or self.backward[1])
        keep(tail, made.__getitem__, behind)
        keep(self.backward[3], of_last, behind)
        for k in reversed(copies):
            copy(self.backward[2], k)
        keep(self.backward[2], of_next, beneath)
        for nodes in (self.backward[1], self.backward[0], head):
            keep(nodes, made.__getitem__, beneath)
        self._return(graph, made, of_layer, copied_inputs)
        infos = dict(zip(self.short.taken, self.metadata.input_info, strict=True))
        index_of = {node: i for i, node in self.inputs.items()}
        infos |= {i: infos[index_of[template]] for i, (_, template) in copied_inputs.items()}
        metadata = meta.with_inputs(self.metadata, [infos[i] for i in range(total)])
        return lazy_graph_module(self.joint, graph), metadata

    def _number(self, node: fx.Node, k: int) -> int:
        """Autograd's number for a node, or for its copy in layer ``k``."""
        number: int = node.meta["seq_nr"]
        low, high = self.numbers[2]
        if node in self.middle and low <= number <= high:
            return number + (k - 2) * self.step
        return number if number < self.numbers[3][0] else number + (self.count - _KEPT) * self.step

    def _mark(self, node: fx.Node, new: fx.Node, k: int, sources: dict[tuple[int, int], Any]) -> None:
        """Give a copy the metadata of the calls of its own layer instead of layer 2's."""
        place = self._place(node)
        if place is None:
            return
        template, own = self.short.layers[2].nodes[place], self.short.layers[k].nodes[place]
        for key, value in node.meta.items():
            name = key.removeprefix("fwd_")
            if key == "from_node":
                if (k, place) not in sources:
                    sources[k, place] = meta.traced_from(own, value)
                new.meta[key] = sources[k, place]
            elif name in _FROM_THE_CALL and name in own.meta and template.meta.get(name) == value:
                new.meta[key] = own.meta[name]

    @functools.cached_property
    def _by_number(self) -> dict[int, int]:
        """Autograd's number -> the place in the layer of the call that it belongs to."""
        found: dict[int, int] = {}
        for node in self.forward[2]:
            found.setdefault(node.meta.get("seq_nr", -1), self.origin[node.meta["from_node"][0].name][1])
        return found

    def _place(self, node: fx.Node) -> int | None:
        if "from_node" in node.meta:
            return self.origin[node.meta["from_node"][0].name][1]
        return None if node.meta.get("is_gradient_acc") else self._by_number.get(node.meta.get("seq_nr", -1))

    def _return(
        self,
        graph: fx.Graph,
        made: dict[fx.Node, fx.Node],
        of_layer: dict[int, dict[fx.Node, fx.Node]],
        copied_inputs: dict[int, tuple[int, fx.Node]],
    ) -> None:
        output = self.joint.graph.output_node()
        results, descs = _results(self.joint), list(output.meta["desc"])
        count = self._num_forward()
        returned = [made[value] if isinstance(value, fx.Node) else value for value in results[:count]]
        its_descs = descs[:count]
        if self.tangents:
            gradients = dict(zip(self.inputs.values(), zip(results[count:], descs[count:], strict=True), strict=True))
            for i in range(len(self.inputs) + len(copied_inputs)):
                k, template = copied_inputs.get(i, (2, self.inputs.get(i)))
                assert template is not None, "an input is taken, or a copy's own"
                gradient, desc = gradients[template]
                returned.append(of_layer[k][gradient] if isinstance(gradient, fx.Node) else gradient)
                its_descs.append(None if desc is None else meta.gradient_desc(i))
        as_before = type(output.args[0])
        graph.output(tuple(returned) if issubclass(as_before, tuple) else returned).meta = {
            **output.meta,
            "desc": its_descs,
        }


_FROM_THE_CALL = {"stack_trace", "nn_module_stack", "source_fn_stack", "custom"}


def _results(joint: fx.GraphModule) -> list[Any]:
    return list(joint.graph.output_node().args[0])  # type: ignore[arg-type]


def _is_backward(node: fx.Node) -> bool:
    return bool(node.meta.get("partitioner_tag") == "is_backward")


def _same_look(one: fx.Node, two: fx.Node) -> bool:
    look = meta.look_of(one.meta.get("val"))
    return look is not None and bool(look == meta.look_of(two.meta.get("val")))


def _span(block: Sequence[fx.Node]) -> tuple[int, int]:
    """The lowest and the highest of autograd's numbers in a block."""
    numbers = [node.meta["seq_nr"] for node in block if "seq_nr" in node.meta]
    return (min(numbers), max(numbers)) if numbers else (0, 0)


def _blocks(nodes: Sequence[fx.Node], layers: Sequence[int | None], *orders: list[int]) -> list[list[fx.Node]]:
    """The nodes of each layer, which have to stand together, and the layers in one of these orders.

    Raises:
        _Differs: if they do not.
    """
    seen = [layer for layer, _ in itertools.groupby(layers)]
    if seen[:1] == [None]:
        del seen[0]
    if seen[-1:] == [None]:
        del seen[-1]
    if seen not in orders:
        raise _Differs
    return [[node for node, layer in zip(nodes, layers, strict=True) if layer == k] for k in range(_KEPT)]


def _around(
    nodes: Sequence[fx.Node], first: Sequence[fx.Node], last: Sequence[fx.Node]
) -> tuple[Sequence[fx.Node], Sequence[fx.Node]]:
    """What stands before and behind the layers; all of it before them where they have nothing."""
    if not first:
        return nodes, ()
    return nodes[: nodes.index(first[0])], nodes[nodes.index(last[-1]) + 1 :]
