"""What a node of an ATen graph does besides computing its value: memory it writes, random numbers it draws.

Note [What may be removed or merged]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Only operators of torch's own namespaces are taken as pure, and only by their schema and tags: a custom operator may do
things that nothing declares. Random operators are never pure, since drawing moves the generator. What a schema does not
declare is listed here: batch norm in training writes its running statistics. Two inputs of a graph may lie on one
storage when it is called, whatever they did when it was traced, so a write into one counts as a write into all.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._ops import OperatorBase, OpOverload
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree

from .aliasing import Aliases, shared_with_return
from .constraint import graphs_given_to
from .facts import schema_argument, value_of
from .op_lists import CONTROL_FLOW

PURE_NAMESPACES = frozenset({"aten", "prims"})
_METADATA = frozenset({"set_", "resize_", "resize_as_", "resize", "set"})
_TRAINING = ("training", "train", "use_input_stats")  # what the schemas of batch and instance norm call it
_OUTSIDE = -1


def written_inputs(node: Node) -> list[Node]:
    """Return the inputs whose memory ``node`` writes: by its schema, by what is known, or all if neither tells."""
    if node.op in ("placeholder", "get_attr", "output") or _is_python(node):
        return []
    op = node.target
    if not isinstance(op, OpOverload):
        return [] if _branches_write_nothing(node) else list(node.all_input_nodes)

    def given(name: str) -> Any:
        return schema_argument(node, op, name)

    return [
        leaf
        for name in written_arguments(op, given)
        for leaf in pytree.tree_leaves(given(name))
        if isinstance(leaf, Node)
    ]


def _branches_write_nothing(node: Node) -> bool:
    """Whether ``node`` is control flow that only runs graphs which it is given, and no op of these writes."""
    given = graphs_given_to(node, CONTROL_FLOW, node.graph.owning_module)
    return bool(given) and not any(written_inputs(inner) for one in given for inner in one.graph.nodes)


def written_arguments(op: OpOverload, given: Callable[[str], Any]) -> list[str]:
    """Return the names of the arguments that a call of ``op`` writes; ``given`` tells what it was given for a name."""
    if op._schema.name == "aten::detach_":
        return []  # it writes autograd's record only
    names = {argument.name for argument in op._schema.arguments if argument.alias_info and argument.alias_info.is_write}
    return sorted(names | _undeclared_writes(op, given))


def changes_metadata(node: Node) -> bool:
    """Return whether ``node`` changes size, strides, storage or autograd's record of a tensor that exists."""
    return reshapes(node.target)


def reshapes(op: object) -> bool:
    """Return whether an operator does what `changes_metadata` says."""
    if not isinstance(op, OpOverload):
        return False
    return torch.Tag.inplace_view in op.tags or op._schema.name.partition("::")[2] in _METADATA


def draws(op: object) -> bool:
    """Return whether an operator draws random numbers."""
    return isinstance(op, OpOverload) and torch.Tag.nondeterministic_seeded in op.tags


def is_random(node: Node) -> bool:
    """Return whether ``node`` may draw from a generator: by torch's own tag."""
    return draws(node.target)


def is_uninitialised(node: Node) -> bool:
    """Return whether the value of ``node`` is memory as it was found (``empty`` and its kin)."""
    name = node.target._schema.name.partition("::")[2] if isinstance(node.target, OpOverload) else ""
    return name.startswith(("empty", "new_empty"))


def is_pure(node: Node) -> bool:
    """Return whether ``node`` gives a value that follows from its inputs, and does nothing else.

    See Note [What may be removed or merged].
    """
    if node.op == "get_attr" or _is_python(node):
        return True
    op = node.target
    if not isinstance(op, OpOverload) or op.namespace not in PURE_NAMESPACES or not op._schema.returns:
        return False
    if op._schema.is_mutable or changes_metadata(node) or is_random(node) or node.is_impure():
        return False
    return not _undeclared_writes(op, lambda name: schema_argument(node, op, name))


def is_view(node: Node) -> bool:
    """Return whether the value of ``node`` certainly lies on the memory of an input, by its schema."""
    op = node.target
    if node.target is operator.getitem:
        return True
    if not isinstance(op, OpOverload) or op.namespace not in PURE_NAMESPACES or op._schema.is_mutable:
        return False
    if is_composite(node):
        return False  # reshape views or copies
    return bool(op._schema.returns) and all(result.alias_info is not None for result in op._schema.returns)


def returned_objects(graph: Graph) -> set[Node]:
    """Return the nodes whose value may be the very tensor that the graph returns, rather than a view of it.

    In-place operators return their argument, and operators that are written in terms of others may.
    """
    found: set[Node] = set()
    waiting = list(graph.output_node().all_input_nodes)
    while waiting:
        node = waiting.pop()
        if node in found:
            continue
        found.add(node)
        if is_composite(node):
            waiting.extend(node.all_input_nodes)
        elif isinstance(node.target, OpOverload) and node.target._schema.is_mutable:
            waiting.extend(written_inputs(node))
        elif changes_metadata(node):
            waiting.extend(node.all_input_nodes)
        if node.target is operator.getitem and isinstance(node.args[0], Node):
            waiting.append(node.args[0])
    return found


def is_composite(node: Node) -> bool:
    """Return whether ``node`` calls an operator that is written in terms of others, as ``reshape`` and ``to`` are."""
    op = node.target
    return isinstance(op, OpOverload) and torch._C._dispatch_has_kernel_for_dispatch_key(
        op.name(), "CompositeImplicitAutograd"
    )


@dataclass
class Effects:
    """Writes and lifetimes in one graph, by storage.

    Attributes:
        aliases: which nodes may share memory.
        position: place of each node in the graph's order, from 0.
        writers: storage -> the nodes that write it, in order; those into inputs stand under one key (see the Note).
    """

    aliases: Aliases
    position: dict[Node, int] = field(default_factory=dict)
    writers: dict[int, list[Node]] = field(default_factory=dict)
    _last_use: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, gm: GraphModule) -> Effects:
        """Return the effects within ``gm``."""
        effects = cls(Aliases.of(gm))
        for position, node in enumerate(gm.graph.nodes):
            effects.position[node] = position
            for storage in {one for source in written_inputs(node) for one in effects.storages(source)}:
                effects.writers.setdefault(effects.key(storage), []).append(node)
            for source in (node, *node.all_input_nodes):
                for storage in effects.storages(source):
                    effects._last_use[storage] = position
        return effects

    def key(self, storage: int) -> int:
        """Return ``storage``, or one number for all storages of inputs and attributes."""
        return _OUTSIDE if storage in self.aliases.outside else storage

    def storages(self, node: Node) -> set[int]:
        """Return the storages of the tensors in the value of ``node``; several for a tuple."""
        found = {self.aliases.storage(node)}
        if isinstance(value_of(node), (tuple, list)):
            found |= {self.aliases.storage(user) for user in node.users if user.target is operator.getitem}
            for position in range(len(value_of(node))):
                found |= {self.aliases.storage(source) for source in shared_with_return(node, position)}
        return found

    def is_written(self, node: Node) -> bool:
        """Return whether anything in the graph writes memory of ``node``'s value."""
        return any(self.key(storage) in self.writers for storage in self.storages(node))

    def written_between(self, node: Node, first: int, last: int) -> bool:
        """Return whether a node behind position ``first``, up to and with ``last``, writes memory of ``node``."""
        return any(
            first < self.position[writer] <= last
            for storage in self.storages(node)
            for writer in self.writers.get(self.key(storage), ())
        )

    def last_use(self, node: Node) -> int:
        """Return the position of the last node that touches memory of ``node``'s value."""
        return max(self._last_use[storage] for storage in self.storages(node))

    def follow(self, node: Node, source: Node) -> None:
        """Record that what lay on the memory of ``node`` lies on that of ``source`` from now on."""
        last = max(self.last_use(node), self.last_use(source))
        self.aliases.join(node, source)
        for storage in self.storages(source):
            self._last_use[storage] = last

    def escapes(self, node: Node) -> bool:
        """Return whether memory of ``node``'s value is returned or was there before the call."""
        mine = self.storages(node)
        return bool(mine & self.aliases.outside) or any(mine & self.storages(one) for one in self.outputs(node))

    def outputs(self, node: Node) -> Iterator[Node]:
        """Yield the nodes that the graph of ``node`` returns."""
        yield from node.graph.output_node().all_input_nodes


def _is_python(node: Node) -> bool:
    """Whether a call is Python arithmetic or indexing, as tracers leave it in ATen graphs (see `AtenLevel`)."""
    return node.op == "call_function" and not isinstance(node.target, OperatorBase)


def _undeclared_writes(op: OpOverload, given: Callable[[str], Any]) -> set[str]:
    """The arguments that an op writes although its schema does not say so: running statistics, in training."""
    arguments = {argument.name for argument in op._schema.arguments}
    if not {"running_mean", "running_var"} <= arguments or op._schema.name.endswith(("_functional", "_backward")):
        return set()
    training = [given(name) for name in _TRAINING if name in arguments]
    return {"running_mean", "running_var"} if training and training[0] is not False else set()
