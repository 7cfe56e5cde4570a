"""A torch-level graph cut into stages: captured regions, with the ops between them that no CUDA graph can hold.

A stage is a number; even ones are captured, odd ones run eagerly. Nodes move across a break where the data flow allows
it, so that there are as few stages as the longest chain of breaks demands. What has an order beside the data flow keeps
it: ops that may draw random numbers, and ops on memory that some op changes in place. A graph that switches autocast or
grad mode inside is cut in its original order only (``torch.fx.passes.split_module`` switches them on again in each
part).
"""

from __future__ import annotations

import operator
import re
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.passes.split_module import split_module
from torch.utils import _pytree as pytree

from .effects import is_random, written_inputs
from .facts import describe_call, name_of, ops_of, overload_of, tensors_of, value_of
from .modes import SWITCHES, put_switches_around
from .observed import Observed, observe


def assign_stages(
    gm: GraphModule, eager: Collection[Node], cut_after: Collection[Node] = (), facts: Facts | None = None
) -> dict[Node, int]:
    """The stage of each op of a torch-level graph.

    Args:
        gm: with ``example_value`` (or ``val``) fakes on its nodes, as Dynamo and make_fx leave them; where they lack,
            every op keeps its place.
        eager: ops that must not be captured.
        cut_after: captured ops whose result must leave its stage before it is used.
        facts: of this graph, where they are known.
    Returns:
        Stages without gaps in each kind: 0, 1, 2, ...; an even one may be empty at the beginning.
    """
    nodes = ops_of(gm)
    in_order = any(_switches_state(node) for node in nodes) or not all(map(_is_described, nodes))
    in_order |= any(not _has_storage(tensor) for node in nodes for tensor in tensors_of(node))
    facts = Facts(gm) if facts is None else facts
    changed = {storage for node in nodes for storage in facts.changed(node)}
    final = set(_uses_of_final_values(gm, facts))
    stages: dict[Node, int] = {}
    last_of: dict[Any, int] = {}  # what keeps its order -> the stage of the last op on it
    for node in nodes:
        least = 0
        for source in node.all_input_nodes:
            if source in stages:
                leaves = source in cut_after and (source, node) in final and node not in eager
                least = max(least, stages[source] + (leaves and _differentiable(node)))
        ordered: list[Any] = [*facts.touched(node) & changed]
        if in_order:
            ordered.append("every op")
        if facts.draws(node):
            ordered.append("random numbers")
        least = max([least, *(last_of.get(key, 0) for key in ordered)])
        runs_eagerly = node in eager or _takes_apart_what_runs_eagerly(node, stages)
        stages[node] = least + (least % 2 == 0) if runs_eagerly else least + least % 2
        last_of.update({key: max(stages[node], last_of.get(key, 0)) for key in ordered})
    return stages


def _takes_apart_what_runs_eagerly(node: Node, stages: dict[Node, int]) -> bool:
    """Whether the node gives an element of an eager op's tuple; captured regions take tensors only."""
    source = node.args[0] if node.target is operator.getitem else None
    if not isinstance(source, Node) or not isinstance(value_of(source), (tuple, list)):
        return False
    return stages.get(source, 0) % 2 == 1


def split(gm: GraphModule, stages: dict[Node, int]) -> GraphModule:
    """The graph as calls of one submodule per stage, ``submod_<stage>``, in the order of the stages.

    Each submodule returns a tuple. Its placeholders are values of the graph that is given back.
    """
    ordered, renamed = _sorted(gm, stages)
    stage_of = {renamed[node]: stage for node, stage in stages.items()}
    glue = split_module(ordered, ordered, stage_of.__getitem__, keep_original_order=True)
    for node, submodule in calls_of_stages(glue):
        put_switches_around(submodule)
        output = submodule.graph.output_node()
        if isinstance(output.args[0], Node):
            output.args = ((output.args[0],),)
            submodule.recompile()
            with glue.graph.inserting_after(node):
                first = glue.graph.call_function(operator.getitem, (node, 0))
            for user in [user for user in node.users if user is not first]:
                user.replace_input_with(node, first)
    glue.recompile()
    return glue


def _sorted(gm: GraphModule, stages: dict[Node, int]) -> tuple[GraphModule, dict[Node, Node]]:
    """A copy of the graph with its ops in the order of their stages, and the copies of its nodes."""
    copied = Graph()
    renamed: dict[Node, Node] = {}
    nodes = sorted(gm.graph.nodes, key=lambda node: stages.get(node, len(stages) if node.op == "output" else -1))
    for node in nodes:
        renamed[node] = copied.node_copy(node, renamed.__getitem__)
    return GraphModule(gm, copied), renamed


def feeding_outputs(gm: GraphModule) -> list[Node]:
    """Outputs from which a gradient flows back that comes from another output, other than a view of theirs.

    Autograd lets users hook such an output, or ask for the other output's gradient with respect to it.
    """
    returned = [node for node in pytree.tree_leaves(gm.graph.output_node().args) if isinstance(node, Node)]
    outputs = {node for node in returned if node.op != "placeholder" and _differentiable(node)}
    if len(outputs) < 2:
        return []
    final = _uses_of_final_values(gm, Facts(gm))
    uses: dict[Node, list[Node]] = {}
    for source, user in final:
        uses.setdefault(source, []).append(user)
    reaches: dict[Node, bool] = {}  # does an output depend on it, by ops that have a gradient and make new memory
    found = []
    for node in reversed(gm.graph.nodes):
        users = [user for user in (uses.get(node, ()) if node in outputs else node.users) if user.op != "output"]
        users = [user for user in users if _differentiable(user)]
        reaches[node] = any(reaches[user] or (user in outputs and not _is_view(user, node)) for user in users)
        if node in outputs and reaches[node]:
            found.append(node)
    return found[::-1]


def _differentiable(node: Node) -> bool:
    return any(tensor.requires_grad for tensor in tensors_of(node))


def _is_view(node: Node, base: Node) -> bool:
    return bool(_storages_of_value(node) & _storages_of_value(base))


def _is_described(node: Node) -> bool:
    return value_of(node) is not None or _switches_state(node) or not node.users


def _storages_of_value(node: Node) -> set[int]:
    return {tensor.untyped_storage()._cdata for tensor in tensors_of(node) if _has_storage(tensor)}


class Facts:
    """What the ops of a torch-level graph touch, write and draw."""

    def __init__(self, gm: GraphModule) -> None:
        self.memory = _memory(gm)
        self._observed: dict[Node, Observed | None] = {}

    def touched(self, node: Node) -> set[int]:
        """The storages that an op may read or write."""
        return self.memory[node].union(*[self.memory[source] for source in node.all_input_nodes])

    def changed(self, node: Node) -> set[int]:
        """The storages that an op may write."""
        seen = self._observe(node)
        if seen is None:
            written = _written_by_name(node)
            return self.touched(node) if written is None else set().union(*[self.memory[one] for one in written])
        return self._of_sources(node, seen.written)

    def reshaped(self, node: Node) -> set[int]:
        """The storages of tensors whose sizes, strides or storage an op changes in place."""
        seen = self._observe(node)
        return set() if seen is None else self._of_sources(node, seen.reshaped)

    def draws(self, node: Node) -> bool:
        """Whether an op may draw random numbers."""
        return _may_draw(node, self._observe(node))

    def _of_sources(self, node: Node, storages: set[int]) -> set[int]:
        """The storages that inputs of an op may lie in which, by their fakes, lie in some of these."""
        return set().union(*[self.memory[one] for one in node.all_input_nodes if _storages_of_value(one) & storages])

    def _observe(self, node: Node) -> Observed | None:
        if node not in self._observed:
            self._observed[node] = observe(node)
        return self._observed[node]


def _memory(gm: GraphModule) -> dict[Node, set[int]]:
    """The storages that each node's value may lie in.

    By the fake values, and by the schemas of ATen ops: where make_fx traces real tensors, views have other fakes.
    """
    memory: dict[Node, set[int]] = {}
    for node in gm.graph.nodes:
        memory[node] = _storages_of_value(node)
        overload = overload_of(node)
        may_alias = overload is not None and any(result.alias_info is not None for result in overload._schema.returns)
        if may_alias or node.target is operator.getitem:
            memory[node] = memory[node].union(*[memory[source] for source in node.all_input_nodes])
    return memory


def _uses_of_final_values(gm: GraphModule, facts: Facts) -> list[tuple[Node, Node]]:
    """(value, user) pairs but those that come before the value's last change in place: they use another value."""
    place = {node: i for i, node in enumerate(gm.graph.nodes)}
    last_change: dict[int, int] = {}
    for node in ops_of(gm):
        last_change.update(dict.fromkeys(facts.changed(node), place[node]))
    return [
        (node, user)
        for node in gm.graph.nodes
        for user in node.users
        if place[user] > max((last_change.get(storage, -1) for storage in facts.memory[node]), default=-1)
    ]


def changed_memory(gm: GraphModule) -> set[Node]:
    """Return the nodes whose memory some op of a torch-level graph may change in place."""
    facts = Facts(gm)
    changed = {storage for node in ops_of(gm) for storage in facts.changed(node)}
    return {node for node in gm.graph.nodes if facts.memory[node] & changed}


def _has_storage(tensor: torch.Tensor) -> bool:
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor(tensor)  # inside of vmap or torch.func.grad
    return tensor.layout is torch.strided and not tensor.is_nested and not wrapped


def _switches_state(node: Node) -> bool:
    return node.op == "call_function" and node.target in SWITCHES


IN_PLACE = {
    operator.setitem, operator.iadd, operator.isub, operator.imul, operator.imatmul, operator.itruediv,
    operator.ifloordiv, operator.imod, operator.ipow, operator.iand, operator.ior, operator.ixor, operator.ilshift,
    operator.irshift,
}  # fmt: skip


def _written_by_name(node: Node) -> list[Node] | None:
    """What an op writes that cannot be observed because its result depends on data; None where that is not known."""
    written: list[Any] = [node.kwargs.get("out")]
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if overload_of(node) is not None:
        written += written_inputs(node) if isinstance(node.target, torch._ops.OpOverload) else node.all_input_nodes
    elif node.op == "call_module" or name_of(node) is None:
        return None
    elif node.target in IN_PLACE or node.kwargs.get("inplace") or (name.endswith("_") and not name.endswith("__")):
        written += [node.args[:1], node.kwargs.get("input")]
    elif any(arg is True for arg in node.args[1:]):
        written.append(node.args[0])  # `inplace` can be given by position: F.relu(x, True)
    return [leaf for leaf in pytree.tree_leaves(written) if isinstance(leaf, Node)]


_DRAWS = re.compile("rand|drop|bernoulli|normal|uniform|multinomial|poisson|exponential|geometric|cauchy|rrelu|gumbel")
_DRAWS_INSIDE = re.compile("attention|lstm|gru|rnn")


def may_draw(node: Node) -> bool:
    """Return whether an op of a torch-level graph may draw random numbers."""
    return _may_draw(node, observe(node))


def _may_draw(node: Node, seen: Observed | None) -> bool:
    if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "aten":
        return is_random(node)
    if seen is not None:
        return seen.draws
    if overload_of(node) is not None or name_of(node) is None:
        return True
    name = describe_call(node).lower()
    return bool(_DRAWS.search(name) or _DRAWS_INSIDE.search(name))


def calls_of_stages(glue: GraphModule) -> Iterator[tuple[Node, GraphModule]]:
    """The calls of submodules in a graph that :func:`split` gave, in order."""
    for node in list(glue.graph.nodes):
        if node.op == "call_module":
            submodule = glue.get_submodule(str(node.target))
            assert isinstance(submodule, GraphModule), "split_module makes graph modules"
            yield node, submodule
