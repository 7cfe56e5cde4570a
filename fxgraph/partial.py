"""The backward for the case that only some outputs of a call have a gradient."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

import torch
from torch import fx

from passes.effects import is_random
from passes.facts import output_args

from ._torch_compat import aot
from .effects import CannotPlan, random_nodes
from .plan import Plan, drop_forward_draws, for_real_tensors, needed_for, own_memory
from .trace import JointGraph, OutputKind


@dataclasses.dataclass(frozen=True)
class PartialBackward:
    """A backward for the case that only some tangents are defined.

    ``graph`` takes the saved values with the indices ``saved``, then the defined tangents; its outputs are the
    gradients of the inputs ``gradient_of``.
    """

    graph: fx.GraphModule
    saved: tuple[int, ...]
    gradient_of: tuple[int, ...]

    def needed_for(self, inputs: Collection[int]) -> set[int]:
        """The saved values that eager reads for the gradients of these inputs."""
        wanted = [k for k, i in enumerate(self.gradient_of) if i in inputs]
        positions = needed_for(self.graph, wanted)
        return {k for position, k in enumerate(self.saved) if position in positions}


def outputs_without_gradient(joint: JointGraph, defined: tuple[bool, ...]) -> list[int]:
    """The user outputs to which no gradient flows, where only some tangents are defined.

    Raises:
        CannotPlan: if the update of a mutated input has no gradient.
    """
    infos = joint.metadata.output_info
    bases = (aot.OutputType.alias_of_intermediate, aot.OutputType.alias_of_intermediate_save_as_output)
    found: set[int] = set()
    for k, is_defined in enumerate(defined):
        spec = joint.outputs[joint.tangent_of[k]]
        if is_defined:
            continue
        if spec.kind is OutputKind.USER_OUTPUT:
            found.add(spec.index)
            kinds: tuple[Any, ...] = (aot.OutputType.alias_of_intermediate_base_is_user_output,)
        elif spec.kind is OutputKind.INTERMEDIATE_BASE:
            kinds = bases
        else:
            raise CannotPlan("no gradient flows into an input that was changed in place")
        found.update(i for i, info in enumerate(infos) if info.output_type in kinds and info.base_idx == spec.index)
    return sorted(found)


def partial_backward(plan: Plan, narrowed: JointGraph) -> PartialBackward:
    """A backward over the plan's saved values for fewer outputs.

    ``narrowed`` is the joint graph of the same program with some outputs detached. Its forward part computes the same
    values in the same way, so its backward can start from the values that the plan's forward has saved.

    Raises:
        CannotPlan: if it needs a value that was not saved.
    """
    numbers = _Numbering()
    original = {node.name: number for node, number in numbers.of(plan.joint.gm.graph).items()}
    found: dict[int, fx.Node] = {}
    numbered = numbers.of(narrowed.gm.graph)
    for node, number in numbered.items():
        found.setdefault(number, node)
    tangents = narrowed.gm.graph.find_nodes(op="placeholder")[len(plan.inputs) :]
    gradients = output_args(narrowed.gm)[narrowed.num_forward :]
    gradient_of = tuple(i for i, value in enumerate(gradients) if value is not None)
    first_of: dict[fx.Node, int] = {}  # two saved values can be one value under two names
    for k, name in enumerate(plan.saved_names):
        if original[name] in found:  # else it was for another output
            first_of.setdefault(found[original[name]], k)
    for node, number in numbered.items():  # and what was saved stands for every node that computes it
        if found[number] in first_of and node is not found[number]:
            node.replace_all_uses_with(found[number])
    try:
        graph = aot.extract(narrowed.gm, [*first_of, *tangents], [gradients[i] for i in gradient_of])
    except AssertionError as error:
        raise CannotPlan(f"the backward of some of the outputs needs more than was saved: {error}") from error
    graph = own_memory(graph)
    drawn = {original[node.name] for node in random_nodes(plan.forward)}
    drop_forward_draws(graph, {node.name for node in random_nodes(narrowed.gm) if numbered[node] in drawn})
    for_real_tensors(graph)
    return PartialBackward(graph, tuple(first_of.values()), gradient_of)


class _Numbering:
    """Numbers values: nodes of two graphs with the same inputs get the same number if they compute the same value.

    The k-th random op of one graph is the k-th of the other; detaching a value does not change it.
    """

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}

    def of(self, graph: fx.Graph) -> dict[fx.Node, int]:
        numbers: dict[fx.Node, int] = {}
        inputs = randoms = 0
        for node in graph.nodes:
            key: Any
            if node.op == "placeholder":
                key, inputs = ("input", inputs), inputs + 1
            elif node.target is torch.ops.aten.detach.default:
                numbers[node] = numbers[node.args[0]]
                continue
            elif is_random(node):
                key, randoms = ("random", randoms), randoms + 1
            else:
                key = (
                    node.op,
                    node.target,
                    *(repr(fx.map_arg(a, lambda n: f"%{numbers[n]}")) for a in (node.args, node.kwargs)),
                )
            numbers[node] = self._numbers.setdefault(key, len(self._numbers))
        return numbers
