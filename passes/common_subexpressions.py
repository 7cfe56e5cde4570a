"""Equal computations done once."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils import _pytree as pytree

from .base import Pass
from .constraint import Constraint
from .effects import Effects, is_pure, is_uninitialised, is_view, returned_objects, written_inputs
from .facts import tensors_of, value_of
from .verify import AtenLevel, HasFakeValues

# Constants that are told apart by how they print; 0.0 and -0.0 are equal, and so are 1, 1.0 and True.
_BY_TEXT = (
    *(int, float, bool, complex, str, type(None), type(...)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)


@dataclass(frozen=True)
class MergeCommonSubexpressions(Pass):
    """Let one node stand for all that compute the same from the same, and drop the others.

    Never merged are random operators, those that write, uninitialised memory, sizes that come from the data, custom and
    higher-order operators; nodes between which an input of theirs is written; nodes whose own memory is written; and
    two nodes that are both returned, since the outputs would then share memory. torch's ``fx_graph_cse`` keeps fewer of
    these apart (its list of random operators is not complete, ``0.0`` equals ``-0.0``).

    Values and random numbers stay the same, bit by bit, where an operator gives the same bits twice. The graph is taken
    as one below autograd: a value that was computed twice and is now used twice would get its gradients summed in
    another order.
    """

    requires: ClassVar[tuple[Constraint[GraphModule], ...]] = (AtenLevel(), HasFakeValues())

    def rewrite(self, gm: GraphModule) -> bool:
        """Merge and return whether there was anything to merge."""
        effects, returned = Effects.of(gm), returned_objects(gm.graph)
        versions: Counter[int] = Counter()  # how often each storage has been written so far
        known: dict[Hashable, Node] = {}
        changed = False
        for node in list(gm.graph.nodes):
            for storage in {one for source in written_inputs(node) for one in effects.storages(source)}:
                versions[effects.key(storage)] += 1
            if not _is_candidate(node):
                continue
            key = _key(node, effects, versions)
            first = known.setdefault(key, node)
            if first is node:
                continue
            if not _may_merge(first, node, effects, returned):
                known[key] = node  # the later one is nearer to what follows
                continue
            _follow(first, node, effects)
            if node in returned:
                returned.add(first)
            node.replace_all_uses_with(first)
            gm.graph.erase_node(node)
            changed = True
        return changed


def _is_candidate(node: Node) -> bool:
    if node.op == "get_attr":
        return True
    if node.op != "call_function" or not is_pure(node) or is_uninitialised(node):
        return False
    value = value_of(node)
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)) and free_unbacked_symbols(value):
        return False
    return not any(free_unbacked_symbols(tensor) for tensor in tensors_of(node))


def _key(node: Node, effects: Effects, versions: Counter[int]) -> Hashable:
    """What two nodes must share to compute the same value."""

    def leaf(value: Any) -> Hashable:
        if isinstance(value, Node):
            written = sorted(versions[effects.key(storage)] for storage in effects.storages(value))
            return value, tuple(written)
        return (type(value), repr(value)) if isinstance(value, _BY_TEXT) else (type(value), id(value))

    leaves, spec = pytree.tree_flatten((node.args, dict(sorted(node.kwargs.items()))))
    return node.op, node.target, tuple(leaf(value) for value in leaves), repr(spec)


def _may_merge(first: Node, second: Node, effects: Effects, returned: set[Node]) -> bool:
    if first in returned and second in returned:
        return False
    if is_view(first) or first.op == "get_attr":
        return True  # both lie on the same memory already
    if not tensors_of(first):
        return True  # numbers
    if effects.is_written(first) or effects.is_written(second):
        return False
    return not (effects.escapes(first) and effects.escapes(second))


def _follow(first: Node, second: Node, effects: Effects) -> None:
    """Record that what lay on the memory of ``second`` will lie on that of ``first``."""
    effects.aliases.join(first, second)
    for user in second.users:
        if user.target is operator.getitem:
            effects.aliases.join(user, ("element", first, user.args[1]))
