"""Data only: how the joint graph of a program becomes two regions, and where every buffer comes from.

Nothing here holds a real tensor or knows an engine.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import fx

import passes
from passes.aliasing import Aliases
from passes.facts import output_args

from ._torch_compat import aot
from ._torch_compat.attention import has_seed
from ._torch_compat.fx import compile_now
from ._torch_compat.layout import suggest_memory_format
from .effects import (
    CannotPlan,
    random_nodes,
    refuse_other_draws,
    refuse_reads_beyond,
    statistics,
    undeclared_writes,
    value_matters,
)
from .trace import InputSpec, JointGraph, OutputKind

Picker = Callable[[Sequence[Any]], tuple[Any, ...]]
"""Takes some elements of a sequence."""


def picker(indices: Collection[int]) -> Picker:
    """A function that takes these elements: quicker than a loop, at each call of a callable."""
    if len(indices) > 1:
        return operator.itemgetter(*indices)
    only = list(indices)
    return lambda sequence: tuple([sequence[i] for i in only])


@dataclasses.dataclass(frozen=True)
class Source:
    """Where an input of the backward region comes from: ``input`` i, output i of the ``forward`` region, ``tangent``
    i."""

    kind: str
    index: int


@dataclasses.dataclass(frozen=True)
class Meta:
    """Size, stride, offset and dtype of an output, enough to make a view of something else look like it."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    def like(self) -> torch.Tensor:
        """A tensor of this look without memory (device ``meta``), for torch's helpers that want an example."""
        reach = self.offset + 1 + sum((n - 1) * s for n, s in zip(self.size, self.stride, strict=True))
        with torch.inference_mode(False):
            base = torch.empty(max(reach, 0) if 0 not in self.size else self.offset, dtype=self.dtype, device="meta")
            return base.as_strided(self.size, self.stride, self.offset)


@dataclasses.dataclass(frozen=True)
class Handed:
    """An output of the autograd node: output ``position`` of the forward region."""

    position: int
    requires_grad: bool


@dataclasses.dataclass(frozen=True)
class Return:
    """How one output of the program is made.

    ``how`` is ``node`` (output ``index`` of the node), ``input`` (input ``index`` itself), ``view_of_node``,
    ``view_of_input`` or ``constant``.
    """

    how: str
    index: int = -1
    value: Any = None
    meta: Meta | None = None
    requires_grad: bool = False
    view_metas: Any = None


@dataclasses.dataclass
class Plan:
    """A program for one signature, cut into regions.

    Attributes:
        inputs: what the inputs are.
        forward: graph over all inputs; its outputs are buffers (handed out, saved, or both).
        handed: the autograd node's outputs.
        returns: the program's outputs.
        updates: (input, node output) pairs: inputs mutated under autograd's eyes, written after the call.
        mutated: inputs that the forward region itself writes.
        uncounted: those of them that eager writes without counting a version (BatchNorm's statistics).
        backward: graph over ``backward_inputs``; None without gradients. Its outputs are the gradients that exist.
        gradient_of: for each output of ``backward``, the input whose gradient it is.
        tangents: for each tangent, the node output that it belongs to.
        layouts: for each tangent a fake tensor laid out as the backward takes it, where it takes one layout only.
        saved_live: live inputs whose memory the backward reads (autograd checks their versions) -> the positions of its
            inputs that lie there.
        saved_static: other inputs whose memory the backward reads, which is a copy or the input's own (see
            ``places.py``) -> likewise.
        saved_handed: node outputs whose memory the backward reads -> likewise.
        overwritten: mutated inputs whose former values no output depends on (BatchNorm's statistics in training).
        repeatable: whether running the forward again, on copies of ``overwritten`` and from the same state of the
            random generator, gives the same values and no side effect.
        draws: whether the forward draws random numbers.
    """

    inputs: tuple[InputSpec, ...]
    joint: JointGraph
    forward: fx.GraphModule
    handed: tuple[Handed, ...]
    returns: tuple[Return, ...]
    updates: tuple[tuple[int, int], ...]
    mutated: tuple[int, ...]
    uncounted: frozenset[int]
    overwritten: frozenset[int]
    repeatable: bool
    draws: bool
    backward: fx.GraphModule | None = None
    backward_inputs: tuple[Source, ...] = ()
    gradient_of: tuple[int, ...] = ()
    tangents: tuple[int, ...] = ()
    layouts: tuple[torch.Tensor, ...] = ()
    saved_live: dict[int, frozenset[int]] = dataclasses.field(default_factory=dict)
    saved_static: dict[int, frozenset[int]] = dataclasses.field(default_factory=dict)
    saved_handed: dict[int, frozenset[int]] = dataclasses.field(default_factory=dict)
    saved_names: tuple[str, ...] = ()

    @property
    def unused(self) -> tuple[int, ...]:
        """Inputs that require grad in the trace but have no gradient."""
        wanted = [i for i, info in enumerate(self.joint.metadata.input_info) if info.requires_grad]
        return tuple(i for i in wanted if i not in self.gradient_of) if self.backward is not None else tuple(wanted)

    @functools.cached_property
    def frozen(self) -> frozenset[int]:
        """Inputs that do not require grad in the trace."""
        return frozenset(i for i, info in enumerate(self.joint.metadata.input_info) if not info.requires_grad)

    @functools.cached_property
    def written(self) -> tuple[int, ...]:
        """Inputs that a call writes."""
        return (*self.mutated, *[index for index, _ in self.updates])

    @functools.cached_property
    def constant(self) -> list[int]:
        """Inputs without a gradient that are not live."""
        return [i for i, spec in enumerate(self.inputs) if not spec.live and i not in self.gradient_of]

    @functools.cached_property
    def differentiable(self) -> Picker:
        """Takes, of a call's inputs, those that have a gradient."""
        return picker(self.gradient_of)

    @functools.cached_property
    def watched(self) -> Picker:
        """Takes, of a call's inputs or of something about each, those of ``saved_live``."""
        return picker(self.saved_live)

    @functools.cached_property
    def returned(self) -> Picker | None:
        """Takes the program's outputs of the node's, where no others are among them."""
        if any(ret.how != "node" for ret in self.returns):
            return None
        return picker([ret.index for ret in self.returns])

    @functools.cached_property
    def not_differentiable(self) -> list[int]:
        """Outputs of the autograd node that require no grad."""
        return [k for k, out in enumerate(self.handed) if not out.requires_grad]

    @functools.cached_property
    def keeps(self) -> bool:
        """Whether the backward needs anything of the slot's forward."""
        return any(source.kind != "tangent" for source in self.backward_inputs)

    def needed_for(self, gradients: Collection[int]) -> set[int]:
        """The positions of the backward's inputs that eager reads for these of its outputs."""
        assert self.backward is not None, "without a backward nothing has a gradient"
        return needed_for(self.backward, gradients)


def needed_for(backward: fx.GraphModule, gradients: Collection[int]) -> set[int]:
    """The positions of a backward's inputs that eager reads for these of its outputs.

    An autograd node unpacks all that it has saved, also where not all of its gradients are asked for. Ops of one node
    have the same ``seq_nr``.
    """
    results = output_args(backward)
    found: set[fx.Node] = set()
    waiting = [results[k] for k in gradients]
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += node.all_input_nodes
    run = {node.meta["seq_nr"] for node in found if "seq_nr" in node.meta and node.op == "call_function"}
    placeholders = backward.graph.find_nodes(op="placeholder")
    found.update(node for node in placeholders if any(user.meta.get("seq_nr") in run for user in node.users))
    return {position for position, node in enumerate(placeholders) if node in found}


def make(joint: JointGraph) -> Plan:
    """Cut a joint graph.

    Raises:
        CannotPlan: for mutated metadata (``t_()``, ``resize_``), or inputs that alias each other and are mutated.
    """
    metadata = joint.metadata
    num_tangents = len(joint.tangent_of)
    specs = joint.inputs[: len(joint.inputs) - num_tangents]
    if len(specs) != len(metadata.input_info):
        raise CannotPlan("an input that is mutated shares memory with another input")
    for spec, info in zip(specs, metadata.input_info, strict=True):
        if info.mutates_metadata or info.mutates_storage_metadata:
            raise CannotPlan(f"{spec} has its shape, strides or storage changed in place")
    if num_tangents:
        _forget_checkpoints(joint.gm)
        forward, backward = aot.partition(joint.gm, joint.num_forward, joint.for_inductor)
    else:
        forward, backward = joint.gm, None
    refuse_reads_beyond(joint, specs)
    forward = passes.DrawInPlace()(forward).graph_module
    refuse_other_draws(forward)
    results = output_args(forward)
    returned, saved = results[: joint.num_forward], results[joint.num_forward :]

    wanted: dict[fx.Node, int] = {}  # nodes that become buffers of the forward region -> position
    node_of: dict[int, int] = {}  # forward return -> node output
    handed: list[Handed] = []

    def hand(index: int, requires_grad: bool) -> int:
        if index not in node_of:
            value = returned[index]
            position = wanted.setdefault(value, len(wanted))
            node_of[index] = len(handed)
            handed.append(Handed(position, requires_grad))
        return node_of[index]

    num_updates = len(metadata.mutated_inp_runtime_indices)
    updates = tuple(
        (i, hand(k, metadata.input_info[i].requires_grad)) for k, i in enumerate(metadata.mutated_inp_runtime_indices)
    )
    returns: list[Return] = []
    num_outputs = len(metadata.output_info)
    if has_seed(returned[num_updates : num_updates + num_outputs]):
        raise CannotPlan("it returns the seed of attention's dropout, which lies elsewhere while a graph is captured")
    for k, info in enumerate(metadata.output_info):
        value = returned[num_updates + k]
        if not isinstance(value, fx.Node) or not isinstance(value.meta.get("val"), torch.Tensor):
            if isinstance(value, fx.Node):
                raise CannotPlan(f"output {k} is a number computed from data")
            returns.append(Return("constant", value=value))
            continue
        kind, requires_grad = info.output_type, info.requires_grad
        if kind in (aot.OutputType.non_alias, aot.OutputType.unsafe_view_alias, aot.OutputType.custom_function_view):
            returns.append(Return("node", hand(num_updates + k, requires_grad)))
        elif kind is aot.OutputType.is_input:
            returns.append(Return("input", info.base_idx))
        elif kind is aot.OutputType.alias_of_input:
            returns.append(_view("view_of_input", info.base_idx, value, info))
        else:
            if kind is aot.OutputType.alias_of_intermediate_base_is_user_output:
                base = hand(num_updates + info.base_idx, metadata.output_info[info.base_idx].requires_grad)
            else:
                base = hand(num_updates + num_outputs + info.base_idx, True)
            returns.append(_view("view_of_node", base, value, info))

    undeclared = undeclared_writes(forward)
    mutated = tuple(sorted({*metadata.mutated_graph_handled_indices, *undeclared}))
    overwritten = frozenset(i for i in mutated if not value_matters(forward, i, returned))
    plan = Plan(
        inputs=specs,
        joint=joint,
        forward=forward,
        handed=(),
        returns=tuple(returns),
        updates=updates,
        mutated=mutated,
        uncounted=frozenset(undeclared | statistics(forward) | joint.uncounted),
        overwritten=overwritten,
        repeatable=not updates and overwritten == set(mutated),
        draws=bool(random_nodes(forward)),
    )
    placeholders = forward.graph.find_nodes(op="placeholder")
    if backward is not None:
        drawn = {node.name for node in random_nodes(forward)}
        _plan_backward(plan, backward, placeholders, saved, wanted, node_of, drawn)
        if not plan.gradient_of and any(out.requires_grad for out in handed):
            raise CannotPlan("an output requires grad, but no input has a gradient")
        for k, info in enumerate(joint.outputs[: joint.num_forward]):
            if info.kind is OutputKind.INTERMEDIATE_BASE and k not in node_of and k in joint.tangent_of:
                raise AssertionError("a base of views has a tangent but no user")
    plan.handed = tuple(handed)
    buffers = list(wanted)
    aliases = Aliases.of(forward)
    saved_in: dict[Any, set[int]] = {}
    for position, node in enumerate(saved):
        saved_in.setdefault(aliases.storage(node), set()).add(position)
    for i, node in enumerate(placeholders):
        if aliases.storage(node) in saved_in:
            kind = plan.saved_live if specs[i].live else plan.saved_static
            kind[i] = frozenset(saved_in[aliases.storage(node)])
    plan.saved_handed = {
        k: frozenset(saved_in[aliases.storage(buffers[out.position])])
        for k, out in enumerate(handed)
        if aliases.storage(buffers[out.position]) in saved_in
    }
    if any(aliases.storage(buffers[out.position]) in aliases.outside for out in handed):
        raise CannotPlan("an output is an input's own memory in a way that cannot be made again outside of the graph")
    forward.graph.output_node().args = (tuple(buffers),)
    forward.graph.eliminate_dead_code()
    plan.forward = forward
    if not joint.for_inductor:  # which fuses writes itself, and takes one at a time
        plan.forward = passes.MergeInputCopies()(forward).graph_module  # BatchNorm's statistics and counters, mostly
    for_real_tensors(plan.forward)
    return plan


def _forget_checkpoints(joint: fx.GraphModule) -> None:
    """Save what a checkpoint would compute again, where computing it again is not the same or not possible.

    Random ops would draw again, and torch's partitioner recomputes in graphs without in-place writes only.
    """
    nodes = list(joint.graph.nodes)
    tagged = [node for node in nodes if "recompute" in node.meta]
    if tagged and (random_nodes(joint) or any(node.target is torch.ops.aten.copy_.default for node in nodes)):
        for node in tagged:
            del node.meta["recompute"]


def _plan_backward(
    plan: Plan,
    backward: fx.GraphModule,
    placeholders: list[fx.Node],
    saved: tuple[Any, ...],
    wanted: dict[fx.Node, int],
    node_of: dict[int, int],
    drawn: set[str],
) -> None:
    """Wire the backward region's inputs and drop the gradients that are None."""
    index_of = {node.name: i for i, node in enumerate(placeholders)}
    sources: list[Source] = []
    for node in saved:
        if node.op == "placeholder":
            sources.append(Source("input", index_of[node.name]))
        else:
            sources.append(Source("forward", wanted.setdefault(node, len(wanted))))
    plan.saved_names = tuple(node.name for node in saved)
    tangents = []
    for k, forward_output in enumerate(plan.joint.tangent_of):
        if forward_output not in node_of:
            raise CannotPlan("a gradient flows into an output that is not handed out")
        tangents.append(node_of[forward_output])
        sources.append(Source("tangent", k))
    if len(backward.graph.find_nodes(op="placeholder")) != len(sources):
        raise CannotPlan("the backward needs something besides saved tensors and tangents")
    gradients = output_args(backward)
    plan.gradient_of = tuple(i for i, value in enumerate(gradients) if value is not None)
    backward.graph.output_node().args = (tuple(value for value in gradients if value is not None),)
    backward = own_memory(backward)
    drop_forward_draws(backward, drawn)
    refuse_other_draws(backward)
    for_real_tensors(backward)
    plan.backward, plan.backward_inputs, plan.tangents = backward, tuple(sources), tuple(tangents)
    if plan.joint.one_layout:
        placeholders = plan.joint.gm.graph.find_nodes(op="placeholder")
        plan.layouts = tuple(node.meta["val"] for node in placeholders[len(plan.inputs) :])


def drop_forward_draws(backward: fx.GraphModule, drawn: set[str]) -> None:
    """Remove what the backward does not need, random ops of the forward included.

    The partitioner copies the forward's nodes into the backward and removes those without users, but never a random op.
    """

    def needed(node: fx.Node) -> bool:
        return node.op == "placeholder" or (bool(node.is_impure()) and node.name not in drawn)

    backward.graph.eliminate_dead_code(is_impure_node=needed)
    again = [node.name for node in random_nodes(backward) if node.name in drawn]
    if again:
        raise CannotPlan(f"the backward would draw the forward's random numbers again: {', '.join(again)}")


def for_real_tensors(region: fx.GraphModule) -> None:
    """What the trace could take for granted and a region on real tensors cannot.

    ``reshape`` for ``view``, which the trace took because its strides allowed it: real strides can differ from traced
    ones (a kernel whose fake implementation says otherwise, a tangent that is expanded), and eager's own ``reshape``
    would copy then. Autograd's formula for ``native_group_norm`` likewise makes the gradient contiguous, which its
    kernel takes for granted and the trace found it to be (``tools/autograd/derivatives.yaml``). ``zeros`` for
    ``_efficientzerotensor``, which has no memory that a replay could write.
    """
    for node in region.graph.find_nodes(op="call_function", target=torch.ops.aten._efficientzerotensor.default):
        node.target = torch.ops.aten.zeros.default
    for target in (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default):
        for node in region.graph.find_nodes(op="call_function", target=target):
            node.target = torch.ops.aten.reshape.default
    for node in region.graph.find_nodes(op="call_function", target=torch.ops.aten.native_group_norm_backward.default):
        gradient, value = node.args[0], node.args[1].meta["val"]
        layout = suggest_memory_format(value) if value.device.type == "cpu" else torch.contiguous_format
        with region.graph.inserting_before(node):
            contiguous = torch.ops.aten.contiguous.default
            dense = region.graph.call_function(contiguous, (gradient,), {"memory_format": layout})
        dense.meta = dict(gradient.meta)
        node.update_arg(0, dense)
    region.recompile()
    compile_now(region)


def own_memory(backward: fx.GraphModule) -> fx.GraphModule:
    """A gradient that is the tangent itself, a parameter's memory or another gradient's would change under its
    holder."""
    every = tuple(range(len(output_args(backward))))
    result: fx.GraphModule = passes.CloneAliasedOutputs(outputs=every)(backward).graph_module
    return result


def _view(how: str, index: int, value: fx.Node, info: Any) -> Return:
    fake = value.meta["val"]
    meta = Meta(tuple(fake.size()), tuple(fake.stride()), fake.storage_offset(), fake.dtype)
    return Return(how, index, meta=meta, requires_grad=info.requires_grad, view_metas=info.view_meta_sequence)
