"""The joint graph of all layers from that of four of them: Note [When layers are copied] in ``layers.py``."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import fx
from torch.utils import _pytree as pytree

from passes.facts import output_args

from ._torch_compat import joint as meta
from ._torch_compat.fx import lazy_graph_module
from .layers import KEPT, Short


def lengthen(short: Short, joint: fx.GraphModule, metadata: Any) -> tuple[fx.GraphModule, Any] | None:
    """The joint graph of the whole and its metadata; None where its layers are not as they should be.

    Args:
        short: the graph that was lowered.
        joint: what came of it; it is not changed.
        metadata: AOTAutograd's.
    """
    try:
        lowered = _Lowered(short, joint, metadata)
    except _Differs:
        return None
    return _Whole(lowered).result()


class _Differs(Exception):
    """Layers of a joint graph are not the same, or more than layers."""


class _Lowered:
    """The joint graph of the short graph, taken apart. The lowered layers are 0 to 3; 2 is the one to be copied.

    Raises:
        _Differs: if it cannot be lengthened.
    """

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
        results = output_args(self.joint)
        gradients = results[self.num_forward() :]
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

    def num_forward(self) -> int:
        """How many of the results are the forward's."""
        results = output_args(self.joint)
        return int(self.metadata.num_forward_returns) if self.tangents else len(results)

    @functools.cached_property
    def _by_number(self) -> dict[int, int]:
        """Autograd's number -> the place in the layer of the call that it belongs to."""
        found: dict[int, int] = {}
        for node in self.forward[2]:
            found.setdefault(node.meta.get("seq_nr", -1), self.origin[node.meta["from_node"][0].name][1])
        return found

    def place(self, node: fx.Node) -> int | None:
        """The place in its layer of the torch-level call that a node of layer 2 belongs to, if that can be said."""
        if "from_node" in node.meta:
            return self.origin[node.meta["from_node"][0].name][1]
        return None if node.meta.get("is_gradient_acc") else self._by_number.get(node.meta.get("seq_nr", -1))


class _Whole:
    """Puts the joint graph of all layers together.

    A copy is called by its layer's place in the run, from 3 on; ``made`` has a node for each one of the short graph's,
    ``copies[k]`` for each one of layer 2.
    """

    def __init__(self, lowered: _Lowered) -> None:
        self.lowered, self.short = lowered, lowered.short
        self.count = len(self.short.layers)
        self.missing = range(KEPT - 1, self.count - 1)
        self.graph = fx.Graph()
        self.made: dict[fx.Node, fx.Node] = {}
        self.copies: dict[int, dict[fx.Node, fx.Node]] = {2: self.made, **{k: {} for k in self.missing}}
        self.memory = {k: meta.Memory() for k in self.missing}
        self.before = set(lowered.forward[1])
        self.sources: dict[tuple[int, int], Any] = {}
        # For each input of the whole graph the layer it is copied for (2: it is taken as it is), and what it is like.
        self.inputs = {i: (2, node) for i, node in lowered.inputs.items()}
        for k in self.missing:
            self.inputs |= {i: (k, like) for i, like in zip(self.short.own[k], lowered.own[1], strict=True)}

    def result(self) -> tuple[fx.GraphModule, Any]:
        """The joint graph and its metadata."""
        lowered = self.lowered
        for i in range(len(self.inputs)):
            self._input(i)
        for tangent in lowered.tangents:
            self.made[tangent] = self.graph.node_copy(tangent)
        # What reads a copy where it read layer 2 lies in the copy's memory, if it is a view; likewise in the backward.
        behind, beneath = meta.Memory(), meta.Memory()
        as_before = self.made.__getitem__
        head, tail = _around(lowered.calls[0], lowered.forward[0], lowered.forward[3])
        for nodes in (head, *lowered.forward[:3]):
            self._keep(nodes, as_before, behind)
        for k in self.missing:
            self._copy(lowered.forward[2], k)
        self._keep(lowered.forward[3], self._of_last_copy, behind)
        self._keep(tail, as_before, behind)
        tail, head = _around(lowered.calls[1], lowered.backward[3], lowered.backward[0] or lowered.backward[1])
        self._keep(tail, as_before, behind)
        self._keep(lowered.backward[3], self._of_last_copy, behind)
        for k in reversed(self.missing):
            self._copy(lowered.backward[2], k)
        self._keep(lowered.backward[2], self._of_first_copy, beneath)
        for nodes in (lowered.backward[1], lowered.backward[0], head):
            self._keep(nodes, as_before, beneath)
        self._return()
        infos = dict(zip(lowered.inputs.values(), lowered.metadata.input_info, strict=True))
        metadata = meta.with_inputs(lowered.metadata, [infos[self.inputs[i][1]] for i in range(len(self.inputs))])
        return lazy_graph_module(lowered.joint, self.graph), metadata

    def _input(self, index: int) -> None:
        k, like = self.inputs[index]
        node = self.copies[k][like] = self.graph.placeholder(f"primals_{index + 1}")
        node.meta = {**like.meta, "desc": meta.input_desc(index)}
        if k != 2:
            node.meta["val"] = self.memory[k].like(like.meta["val"])

    # What layers read instead of what they read in the short graph.

    def _of_last_copy(self, node: fx.Node) -> fx.Node:
        return self.copies[self.missing[-1]][node] if node in self.lowered.middle else self.made[node]

    def _of_first_copy(self, node: fx.Node) -> fx.Node:
        after = self.lowered.after.get(node)
        return self.made[node] if after is None else self.copies[self.missing[0]][after]

    def _of_neighbours(self, node: fx.Node, k: int) -> fx.Node:
        if node in self.lowered.middle:
            return self.copies[k][node]
        if node in self.before:
            return self.copies[k - 1][self.lowered.next_to[node]]
        if node in self.lowered.after and k != self.missing[-1]:
            return self.copies[k + 1][self.lowered.after[node]]
        return self.made[node]

    def _keep(self, nodes: Iterable[fx.Node], read: Callable[[fx.Node], fx.Node], moved: meta.Memory) -> None:
        for node in nodes:
            new = self.made[node] = self.graph.node_copy(node, read)
            for one in node.all_input_nodes:
                if read(one) is not self.made[one]:
                    moved.identify(one.meta.get("val"), read(one).meta.get("val"))
            if moved.moves(node.meta.get("val")):
                new.meta["val"] = moved.like(node.meta["val"])
            self._number(node, new, 2)

    def _copy(self, nodes: Iterable[fx.Node], k: int) -> None:
        for node in nodes:
            read = {one: self._of_neighbours(one, k) for one in node.all_input_nodes}
            new = self.copies[k][node] = self.graph.node_copy(node, read.__getitem__)
            for one, other in read.items():
                self.memory[k].identify(one.meta.get("val"), other.meta.get("val"))
            new.meta["val"] = self.memory[k].like(node.meta.get("val"))
            self._number(node, new, k)
            self._mark(node, new, k)

    def _number(self, node: fx.Node, new: fx.Node, k: int) -> None:
        """Autograd's number, as it is where layers before have been put in."""
        if "seq_nr" not in node.meta:
            return
        number, step, (low, high) = node.meta["seq_nr"], self.lowered.step, self.lowered.numbers[2]
        if node in self.lowered.middle and low <= number <= high:
            number += (k - 2) * step
        elif number >= self.lowered.numbers[3][0]:
            number += len(self.missing) * step
        new.meta["seq_nr"] = number

    def _mark(self, node: fx.Node, new: fx.Node, k: int) -> None:
        """Give a copy the metadata of the calls of its own layer instead of layer 2's."""
        place = self.lowered.place(node)
        if place is None:
            return
        template, own = self.short.layers[2].nodes[place], self.short.layers[k].nodes[place]
        for key, value in node.meta.items():
            name = key.removeprefix("fwd_")
            if key == "from_node":
                if (k, place) not in self.sources:
                    self.sources[k, place] = meta.traced_from(own, value)
                new.meta[key] = self.sources[k, place]
            elif name in _FROM_THE_CALL and name in own.meta and template.meta.get(name) == value:
                new.meta[key] = own.meta[name]

    def _return(self) -> None:
        output, results = self.lowered.joint.graph.output_node(), output_args(self.lowered.joint)
        count, descs = self.lowered.num_forward(), list(output.meta["desc"])
        returned = [self.made[value] if isinstance(value, fx.Node) else value for value in results[:count]]
        its_descs = descs[:count]
        if self.lowered.tangents:
            gradients = zip(results[count:], descs[count:], strict=True)
            of_input = dict(zip(self.lowered.inputs.values(), gradients, strict=True))
            for i in range(len(self.inputs)):
                k, like = self.inputs[i]
                gradient, desc = of_input[like]
                returned.append(self.copies[k][gradient] if isinstance(gradient, fx.Node) else gradient)
                its_descs.append(None if desc is None else meta.gradient_desc(i))
        is_tuple = isinstance(output.args[0], tuple)
        self.graph.output(tuple(returned) if is_tuple else returned).meta = {**output.meta, "desc": its_descs}


_FROM_THE_CALL = {"stack_trace", "nn_module_stack", "source_fn_stack", "custom"}


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
    return [[node for node, layer in zip(nodes, layers, strict=True) if layer == k] for k in range(KEPT)]


def _around(
    nodes: Sequence[fx.Node], first: Sequence[fx.Node], last: Sequence[fx.Node]
) -> tuple[Sequence[fx.Node], Sequence[fx.Node]]:
    """What stands before and behind the layers; all of it before them where they have nothing."""
    if not first:
        return nodes, ()
    return nodes[: nodes.index(first[0])], nodes[nodes.index(last[-1]) + 1 :]
