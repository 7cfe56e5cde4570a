"""What a graph does beyond computing its outputs: inputs that it writes, random numbers that it draws, memory that it
reads around its inputs.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from passes.aliasing import Aliases
from passes.effects import is_random

from ._torch_compat import aot
from .trace import InputSpec, JointGraph


class CannotPlan(Exception):
    """The joint graph is right but its calling convention does not fit a replay; the program runs eagerly."""


def random_nodes(graph: fx.GraphModule) -> list[fx.Node]:
    """The nodes that draw random numbers."""
    return [node for node in graph.graph.nodes if is_random(node)]


_BATCH_NORMS = (
    torch.ops.aten._native_batch_norm_legit_functional.default,
    torch.ops.aten._batch_norm_with_update_functional.default,
)


def statistics(forward: fx.GraphModule) -> set[int]:
    """Inputs that receive the running statistics of a batch norm."""
    index_of = {node: i for i, node in enumerate(forward.graph.find_nodes(op="placeholder"))}
    found = set()
    for node in forward.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default):
        target, value = node.args[:2]
        source = value.args[0] if isinstance(value, fx.Node) and value.target is operator.getitem else None
        if getattr(source, "target", None) in _BATCH_NORMS:
            found.add(index_of[target])
    return found


_STATISTICS_AND_SWITCH = {
    torch.ops.aten._native_batch_norm_legit_functional.default: ((3, 4), 5),
    **aot.UNDECLARED_WRITES,
}
"""Batch norms -> their running statistics, and the argument that says whether they are only written (training)."""


def value_matters(forward: fx.GraphModule, index: int, results: Sequence[Any]) -> bool:
    """Whether one of these values depends on what input ``index`` holds when the forward begins."""
    dependent = {forward.graph.find_nodes(op="placeholder")[index]}
    norms: dict[fx.Node, set[int]] = {}  # batch norms in training -> the statistics that depend on it, and only they
    for node in forward.graph.nodes:
        given = dependent.intersection(node.all_input_nodes)
        if node.target is operator.getitem and node.args[0] in norms:
            if node.args[1] in norms[node.args[0]]:  # the new statistics stand where the old ones are given
                dependent.add(node)
        elif given and node.target in _STATISTICS_AND_SWITCH:
            positions, switch = _STATISTICS_AND_SWITCH[node.target]
            others = [arg for k, arg in enumerate(node.args) if k not in positions]
            if not node.args[switch] or given.intersection(others):
                dependent.add(node)
            else:
                norms[node] = {k for k in positions if node.args[k] in given}
        elif given:
            dependent.add(node)
    return not dependent.isdisjoint([value for value in results if isinstance(value, fx.Node)])


def undeclared_writes(forward: fx.GraphModule) -> set[int]:
    """Inputs that ops write in place although their schema does not say so.

    Raises:
        CannotPlan: if what is written is not an input, or nobody uses the op's result (it would be removed as dead).
    """
    index_of = {node: i for i, node in enumerate(forward.graph.find_nodes(op="placeholder"))}
    written: set[int] = set()
    for node in forward.graph.nodes:
        if node.target in aot.UNDECLARED_WRITES:
            positions, switch = aot.UNDECLARED_WRITES[node.target]
            targets = [node.args[k] for k in positions if node.args[switch] and node.args[k] is not None]
            if targets and (not node.users or any(target not in index_of for target in targets)):
                raise CannotPlan(f"{node.target} writes something that is not an input")
            written.update(index_of[target] for target in targets)
    return written


_AS_STRIDED = {
    torch.ops.aten.as_strided.default,
    torch.ops.aten.as_strided_copy.default,
    torch.ops.aten.as_strided_scatter.default,
}


def refuse_reads_beyond(joint: JointGraph, specs: Sequence[InputSpec]) -> None:
    """``as_strided`` counts from the beginning of a storage, of which a static buffer holds the input's elements only.

    Raises:
        CannotPlan: if it is done to an input that is not all of its storage.
    """
    aliases = Aliases.of(joint.gm)
    partial = {}
    for node, spec in zip(joint.gm.graph.find_nodes(op="placeholder"), specs, strict=False):
        value = node.meta["val"]
        if not spec.live and (value.storage_offset() or _extent(value) < _elements(value)):
            partial[aliases.storage(node)] = spec
    for node in joint.gm.graph.nodes:
        if node.target in _AS_STRIDED and aliases.storage(node.args[0]) in partial:
            raise CannotPlan(f"as_strided reads the memory around the {partial[aliases.storage(node.args[0])]}")


def _extent(tensor: torch.Tensor) -> int:
    """Elements from the first to the last."""
    if 0 in tensor.size():
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(tensor.size(), tensor.stride(), strict=True))


def _elements(tensor: torch.Tensor) -> int:
    """Elements in a tensor's storage."""
    return tensor.untyped_storage().nbytes() // tensor.element_size()


_FILLS = {
    getattr(torch.ops.aten, name).default
    for name in ("normal_functional", "uniform", "exponential", "geometric", "cauchy", "log_normal", "random")
    if hasattr(torch.ops.aten, name)
} | {torch.ops.aten.random.to, getattr(torch.ops.aten.random, "from")}
"""What functionalisation makes of random ops that fill a tensor."""


def refuse_other_draws(graph: fx.GraphModule) -> None:
    """Eager fills a tensor with random numbers in the order of its memory. Their functional forms make a tensor without
    gaps first, and that of ``bernoulli_`` a contiguous one.

    Raises:
        CannotPlan: if the numbers would come to lie in other places.
    """
    for node in random_nodes(graph):
        if not node.all_input_nodes:
            continue
        filled = node.all_input_nodes[0].meta["val"]
        if node.target in _FILLS and _extent(filled) != filled.numel():
            raise CannotPlan(f"{node.target} fills a tensor that has gaps in memory")
        if node.target is torch.ops.aten.bernoulli.p and not filled.is_contiguous():
            raise CannotPlan(f"{node.target} fills a tensor that is not contiguous")
