"""Which backwards may come after one without ``retain_graph``: as in eager, node by node.

Note [A second backward]

A backward without ``retain_graph`` frees what the nodes that it comes to have saved, and autograd refuses a second one
that comes to such a node. In eager these are the nodes of single ops: two heads without a common op can go backward one
after the other. With us both are outputs of one node. So after a backward of some outputs a call goes on to keep its
slot where eager has saved something that is still to be had, and a second backward is let through where eager's would
come to no node that has been freed.

Which nodes eager has, what they lead to and which of them save tensors is found out from eager's own graph: the
torch-level graph is run on fake tensors, once per capture, when it is first asked for. A single op that is freed is a
bit of a number.

What keeps nothing of the slot (``x + 1``) can go backward as often as one likes, whatever has been freed.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence

import torch
from torch import fx

from ._torch_compat.autograd import saves_tensors
from .plan import Plan


def has_plain_nodes(graph: fx.GraphModule, plan: Plan) -> bool:
    """Whether a torch-level graph that runs by itself has eager's nodes, and the plan's node outputs are among them.

    Higher-order ops (checkpoints, ``torch.autograd.Function``) have nodes of their own. The update of an input that is
    changed in place is an output which eager's graph does not have.
    """
    inside = any(isinstance(node.target, torch._ops.HigherOrderOperator) for node in graph.graph.nodes)
    return not inside and not plan.updates


class EagerNodes:
    """The autograd nodes of an eager run, children first. Sets of nodes, and of inputs, are the bits of a number.

    Args:
        outputs: what the run has given, by the index of the output.
        inputs: the run's inputs, none of which is a leaf that requires grad.

    Attributes:
        saving: the nodes that save tensors.
    """

    def __init__(self, outputs: Mapping[int, torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
        roots = {k: out.grad_fn for k, out in outputs.items() if out.grad_fn is not None}
        ends = {tensor.grad_fn: 1 << i for i, tensor in enumerate(inputs) if tensor.grad_fn is not None}
        order = _children_first(list(roots.values()), ends)
        number = {node: n for n, node in enumerate(order)}
        self._roots = {k: number[node] for k, node in roots.items()}
        self._children: list[list[int]] = []
        self._leads_to: list[int] = []
        self.saving = 0
        for n, node in enumerate(order):
            children = [] if node in ends else [number[child] for child, _ in node.next_functions if child is not None]
            self._children.append(children)
            self._leads_to.append(_union([self._leads_to[c] for c in children], ends.get(node, 0)))
            if node not in ends and saves_tensors(node):
                self.saving |= 1 << n
        self._visited: dict[tuple[tuple[int, ...], int], int] = {}
        self._left: dict[int, bool] = {}

    def visited(self, outputs: tuple[int, ...], inputs: int) -> int:
        """The nodes that save tensors and that a backward from these outputs, for these inputs, comes to."""
        key = outputs, inputs
        if key not in self._visited:
            waiting = [self._roots[k] for k in outputs if k in self._roots]
            seen = 0
            while waiting:
                n = waiting.pop()
                if self._leads_to[n] & inputs and not seen >> n & 1:
                    seen |= 1 << n
                    waiting += self._children[n]
            self._visited[key] = seen & self.saving
        return self._visited[key]

    def left(self, freed: int) -> bool:
        """Whether a backward is still possible that reads something saved: from one output, for one input."""
        if freed not in self._left:
            kept: list[int] = []  # for each node, the inputs to which it leads over one that saves
            blocked: list[int] = []  # and over one that is freed
            for n, (children, leads_to) in enumerate(zip(self._children, self._leads_to, strict=True)):
                own = leads_to if self.saving >> n & 1 else 0
                kept.append(_union([kept[c] for c in children], own))
                own = leads_to if freed >> n & 1 else 0
                blocked.append(_union([blocked[c] for c in children], own))
            self._left[freed] = any(kept[root] & ~blocked[root] for root in self._roots.values())
        return self._left[freed]


def _union(sets: Sequence[int], more: int) -> int:
    return functools.reduce(operator.or_, sets, more)


def _children_first(
    roots: Sequence[torch.autograd.graph.Node], ends: Mapping[torch.autograd.graph.Node, int]
) -> list[torch.autograd.graph.Node]:
    """All nodes that the roots lead to, as far as the ends, each after those that it leads to."""
    order: dict[torch.autograd.graph.Node, None] = {}
    waiting = [(root, False) for root in roots]
    while waiting:
        node, children_done = waiting.pop()
        if node in order:
            continue
        if children_done:
            order[node] = None
            continue
        waiting.append((node, True))
        if node not in ends:
            waiting += [(child, False) for child, _ in node.next_functions if child is not None]
    return list(order)
