"""What engines capture of a plan: its graphs as they are, or with ``kernels="inductor"`` what inductor makes of them.

Forward and backward are compiled together, before anything is captured, for the layouts that the buffers will have:
saved values come in the strides that inductor chose for the forward, handed outputs and gradients in eager's. What
runs op by op (a backward of some of the outputs, a batch of tangents, a gradient buffer that somebody holds) runs the
plan's own graphs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import fx

from passes.aliasing import Aliases
from passes.facts import output_args

from ._torch_compat import inductor
from ._torch_compat.autograd import kernels_only
from .engines import Region
from .plan import Plan

CannotCompile = inductor.CannotCompile


@dataclasses.dataclass(frozen=True)
class Regions:
    """Functions of tensors for an engine, with the inputs and outputs of the plan's graphs.

    Attributes:
        any_layout: whether tangents may be copied into buffers of another layout; else the backward is captured anew
            for each, see Note [Tangents] in ``slots.py``.
    """

    forward: Region
    backward: Region | None
    any_layout: bool = False


def as_they_are(plan: Plan) -> Regions:
    """The kernels that eager runs."""
    return Regions(plan.forward, plan.backward)


def compiled(plan: Plan, inputs: Sequence[torch.Tensor]) -> Regions:
    """Inductor's kernels.

    Args:
        plan: of a joint graph that was traced for inductor.
        inputs: the program's; where they are live, the regions will run on them.
    Raises:
        CannotCompile: with inductor's reason.
    """
    if len(inputs) != len(plan.inputs):  # some lie in the memory of others; such calls are refused before any capture
        return as_they_are(plan)
    with kernels_only():
        fakes = [node.meta["val"] for node in plan.forward.graph.find_nodes(op="placeholder")]
        handed = [out.position for out in plan.handed]
        aligned = [not spec.live or _aligned(value) for spec, value in zip(plan.inputs, inputs, strict=True)]
        forward, strides = _compile(plan.forward, fakes, handed, False, aligned)
        if plan.backward is None:
            return Regions(forward, None, any_layout=True)
        values = [node.meta["val"] for node in output_args(plan.forward)]
        outputs = [value.new_empty_strided(value.size(), stride) for value, stride in zip(values, strides, strict=True)]
        tangents = list(plan.layouts) or [outputs[plan.handed[k].position] for k in plan.tangents]
        places = {"input": fakes, "forward": outputs, "tangent": tangents}
        given = [places[source.kind][source.index] for source in plan.backward_inputs]
        begins = [
            value.storage_offset() * value.element_size() % _ALIGNMENT == 0 for value in values
        ]  # views do not all
        fixed_in = {"input": aligned, "forward": begins, "tangent": [True] * len(tangents)}
        fixed = [fixed_in[source.kind][source.index] for source in plan.backward_inputs]
        every = range(len(output_args(plan.backward)))
        backward, _ = _compile(plan.backward, given, every, True, fixed)
        return Regions(forward, backward, any_layout=True)


def _compile(
    graph: fx.GraphModule, inputs: Sequence[Any], visible: Collection[int], backward: bool, aligned: Sequence[bool]
) -> tuple[Region, Sequence[tuple[int, ...]]]:
    if not any(node.op == "call_function" for node in graph.graph.nodes):  # inductor makes no function of it
        return graph, [tuple(node.meta["val"].stride()) for node in output_args(graph)]
    aliases = Aliases.of(graph)
    groups = [aliases.storage(node) for node in (*graph.graph.find_nodes(op="placeholder"), *output_args(graph))]
    fixed = [i for i, is_aligned in enumerate(aligned) if is_aligned]
    return inductor.compile_graph(graph, inputs, groups, visible, backward, fixed)


def _aligned(tensor: torch.Tensor) -> bool:
    return tensor.data_ptr() % _ALIGNMENT == 0


_ALIGNMENT = 16  # bytes, of vectorised loads in Triton kernels
