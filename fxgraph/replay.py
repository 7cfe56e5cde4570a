"""One autograd node per call: copy in, replay, hand out; and the same backwards.

The node's inputs are the program's inputs that have a gradient, its outputs the plan's handed buffers. Everything that
eager would make outside of an op (inputs returned as they are, views of inputs, views of other outputs, in-place
updates of inputs that autograd follows) is made after the node, by ops that autograd sees.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import fx

from ._torch_compat import aot
from ._torch_compat.attention import outside_of_captures, seeds
from ._torch_compat.autograd import (
    aliases,
    autocast_is_on,
    hooks_of_saved,
    is_batched,
    keep_graph,
    kernels_only,
    plain_apply,
    preserve_versions,
    will_run,
)
from ._torch_compat.dynamo import never_read
from .accumulate import Accumulator, Request, refuse_hooks
from .again import EagerNodes
from .engines.base import compact, copy_laid_out, empty_like_layout
from .errors import DoubleBackwardError, ReplayError, add_note
from .partial import PartialBackward
from .plan import Plan
from .slots import Capture, Lease, Slot
from .trace import second_derivative_of_function


class Call:
    """What one forward leaves for its backward. It lives in the autograd node.

    Note [Inputs kept for a second derivative]

    ``create_graph=True`` runs the program again on the inputs as they were given, history included. Keeping a tensor
    that the user may update in place (``x += g(x)``) would close a cycle tensor -> grad_fn -> this node -> tensor that
    nothing frees. So inputs that require grad and have a history are kept by autograd (``save_for_backward`` keeps the
    edge, not the tensor's later life), leaves are kept as they are, and what does not require grad is kept detached.
    """

    live: Sequence[torch.Tensor] = ()  # for plan.saved_live; where they lay is the capture's to know
    live_versions: Sequence[int] = ()
    handed: Sequence[tuple[torch.Tensor, int, int]] = ()  # of plan.saved_handed: tensor, version, which
    lying: Sequence[tuple[torch.Tensor, int, int]] = ()  # of plan.saved_static, where the slot does not copy: likewise
    versions: Sequence[int] = ()
    with_history: Sequence[int] = ()
    random_state: torch.Tensor | None = None
    # With gradients in the graph: what the node has no edges to, and which of it the running backward accumulates.
    accumulator: Accumulator | None = None
    parameters: Sequence[torch.Tensor] = ()
    accumulated: Sequence[int] = ()
    request: Request | None = None
    anchor: torch.Tensor | None = None
    # See Note [A second backward], ``again.py``.
    freed: int | None = None  # of eager's nodes, where a backward without retain_graph has had some outputs only
    goes_on: bool = False  # whether something is left for another one, for which the slot is kept
    history: Sequence[torch.Tensor] | None = None  # what autograd had kept until then
    ended: bool = False
    reads_slot: bool = True  # does the backward that is running

    def __init__(
        self, program: Runner, capture: Capture, slot: Slot, inputs: tuple[torch.Tensor, ...], twin: Twin | None
    ) -> None:
        self.program, self.capture, self.slot, self.inputs, self.twin = program, capture, slot, inputs, twin
        self.lease = Lease(slot)
        if capture.plan.draws and capture.plan.repeatable:
            self.random_state = capture.engine.random_state(capture.device)
        if capture.accumulator is not None and (found := capture.accumulates(inputs)) is not None:
            self.accumulator, self.parameters = found
            self.anchor = self.accumulator.new_anchor()

    @property
    def edges(self) -> Sequence[int]:
        """To which of ``plan.gradient_of`` the node has edges."""
        return range(len(self.capture.plan.gradient_of)) if self.accumulator is None else self.accumulator.others

    def differentiable(self) -> Sequence[torch.Tensor]:
        """The inputs of the autograd node."""
        if self.accumulator is None:
            return self.capture.plan.differentiable(self.inputs)
        assert self.anchor is not None
        return [*self.accumulator.other_inputs(self.inputs), self.anchor]

    def begin_backward(self, ctx: Any) -> None:
        """Find out what becomes of the parameters' gradients in this backward."""
        if self.accumulator is None:
            return
        if self.request is not None:
            self.accumulated = self.request.wanted
        else:  # an anchor that was not asked for is come to if nothing in particular was
            anchor, _ = ctx.next_functions[len(self.edges)]
            self.accumulated = self.accumulator.positions if will_run(anchor) else ()

    def end_backward(self, result: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor | None, ...]:
        """Do with the parameters' gradients what is still to be done; gives those of the node's inputs."""
        if self.accumulator is None:
            return result
        if not self.accumulated:
            return (*[result[k] for k in self.edges], None)
        wanted = set(self.accumulated)
        values = [value if k in wanted else None for k, value in enumerate(result)]
        if self.request is not None and not self.request.accumulates:
            refuse_hooks([p for p, k in zip(self.parameters, self.accumulator.positions, strict=True) if k in wanted])
            self.request.found = values
        else:
            self.accumulator.add(self.parameters, values)
        return (*[result[k] for k in self.edges], None)

    def keep(self, handed: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Keep what the backward reads, as it is now, and what a second derivative needs.

        Returns:
            The tensors that autograd has to keep: one at least where the slot has to wait for the backward, so that
            autograd itself says when the graph has been freed.
        """
        plan, given = self.capture.plan, self.inputs
        versions = _versions(given) if plan.keeps or plan.repeatable else ()
        waits = []
        if plan.keeps:
            self.live, self.live_versions = plan.watched(given), plan.watched(versions)
            # Copies too, which the backward does not read: in eager a change of one is an error, whoever holds what.
            self.handed = [(handed[k].detach(), _version(handed[k]), k) for k in plan.saved_handed]
            if self.slot.where is not None:
                large = self.capture.places.large
                self.lying = [(given[i].detach(), _version(given[i]), i) for i in plan.saved_static if i in large]
            waits = [given[plan.gradient_of[0]] if self.anchor is None else self.anchor]
        else:
            self.lease.end()
        if not plan.repeatable:
            self.inputs = ()
            return waits
        self.versions = versions
        history = [i for i in self.capture.may_have_history if not given[i].is_leaf]
        if history or plan.constant:
            inputs = list(given)
            for i in (*history, *plan.constant):
                inputs[i] = given[i].detach()
            self.inputs, self.with_history = tuple(inputs), history
        return [given[i] for i in history] or waits

    def check_versions(self, ctx: Any, grads: Sequence[torch.Tensor | None]) -> None:
        """Raise what autograd raises where a tensor that the backward needs was changed in place.

        Raises:
            RuntimeError: in autograd's words.
            ReplayError: where a parameter was given other memory (``p.data = ...``). What eager gives then depends on
                whether the op has saved the parameter or a view of it.
        """
        live, addresses, plan = self.live, self.capture.saved_addresses, self.capture.plan
        same = tuple(map(_address, live)) == addresses and _versions(live) == self.live_versions
        others = [*self.handed, *self.lying]
        if same and (not others or all([_version(tensor) == version for tensor, version, _ in others])):  # noqa: C419  # quicker
            return
        if self.ended:
            if self.reads_slot:  # nothing that it can read is there, though autograd does not know
                raise RuntimeError("Trying to backward through the graph a second time, after an error in the first.")
            return
        watched = zip(live, self.live_versions, addresses, plan.saved_live.items(), strict=True)
        for tensor, version, address, (i, positions) in watched:
            if tensor.data_ptr() != address and self._needs(positions, ctx, grads):
                raise ReplayError(
                    "parameter-replaced",
                    "a parameter was given other memory between a forward and its backward",
                    where=str(plan.inputs[i]),
                    observed="another address than at the forward (p.data = ..., or the module was moved)",
                    expected="the memory that the forward has read",
                    hint="run the backward first, or change the values in place under torch.no_grad()",
                )
            if _version(tensor) != version and self._needs(positions, ctx, grads):
                raise _changed_in_place(tensor, version, f"the {plan.inputs[i]}")
        for tensor, version, k in self.handed:
            if _version(tensor) != version and self._needs(plan.saved_handed[k], ctx, grads):
                raise _changed_in_place(tensor, version, f"output {k}")
        for tensor, version, i in self.lying:
            if _version(tensor) != version and self._needs(plan.saved_static[i], ctx, grads):
                raise _changed_in_place(tensor, version, f"the {plan.inputs[i]}")

    def _needs(self, positions: frozenset[int], ctx: Any, grads: Sequence[torch.Tensor | None]) -> bool:
        """Whether a gradient that this backward was asked for depends on one of these inputs of the backward."""
        return not positions.isdisjoint(self._needed(ctx, grads))

    def _needed(self, ctx: Any, grads: Sequence[torch.Tensor | None]) -> set[int]:
        """The positions of the saved values that eager would read.

        ``torch.autograd.grad`` for some of the inputs would in eager not run the nodes that lead to the others, and a
        backward of some of the outputs not those that lead from the others.
        """
        plan, wanted = self.capture.plan, _wanted(self, ctx)
        defined = _defined(plan, grads)
        if all(defined):
            return {k for k in plan.needed_for(wanted) if plan.backward_inputs[k].kind != "tangent"}
        partial = self.program.partial_backward(self.capture, defined)
        return partial.needed_for([plan.gradient_of[k] for k in wanted])

    def may_run_again(self, ctx: Any, grads: Sequence[torch.Tensor | None]) -> bool:
        """Whether this backward may run although one has freed the graph; see Note [A second backward]."""
        self.goes_on = False
        nodes = self.program.eager_nodes(self.capture)
        if nodes is None:
            return False
        visited, freed = _visited(self, ctx, grads, nodes), nodes.saving if self.freed is None else self.freed
        if visited & freed or not self._has_what_it_reads(ctx, grads):
            return False
        if not keep_graph():
            self.freed = freed | visited
            self.goes_on = not self.ended and nodes.left(self.freed)
        return True

    def _has_what_it_reads(self, ctx: Any, grads: Sequence[torch.Tensor | None]) -> bool:
        if not self.ended:
            return True
        if torch.is_grad_enabled() or autocast_is_on():  # the forward would run again, on inputs that are not there
            return False
        self.reads_slot = bool(self._needed(ctx, grads))
        return not self.reads_slot

    def partly_done(self, ctx: Any, grads: Sequence[torch.Tensor | None]) -> None:
        """After a backward of some of the outputs: see whether to go on; see Note [A second backward]."""
        if keep_graph() or self.ended or self.freed is not None:
            return
        nodes = self.program.eager_nodes(self.capture)
        if nodes is None or hooks_of_saved(ctx):  # a checkpoint around it runs the forward again for each backward
            return
        self.freed = _visited(self, ctx, grads, nodes)
        self.goes_on = nodes.left(self.freed)
        if self.goes_on and all(_version(self.inputs[i]) == self.versions[i] for i in self.with_history):
            self.history = ctx.saved_tensors

    def end(self) -> None:
        """The graph is freed."""
        self.lease.end()
        self.inputs = self.live = self.handed = self.lying = ()
        self.live_versions = _NEVER  # so that the next backward is looked at
        self.twin = self.history = None
        self.ended = True


_NEVER = (-2,)
"""No versions of any tensors."""


def _defined(plan: Plan, grads: Sequence[torch.Tensor | None]) -> tuple[bool, ...]:
    """For each tangent of the plan whether there is one.

    An in-place update without a gradient cannot be traced apart; it gets zeros, as in AOTAutograd.
    """
    updates = {position for _, position in plan.updates}
    return tuple([grads[k] is not None or k in updates for k in plan.tangents])


def _visited(call: Call, ctx: Any, grads: Sequence[torch.Tensor | None], nodes: EagerNodes) -> int:
    """The nodes of eager's that this backward comes to."""
    plan, wanted = call.capture.plan, _wanted(call, ctx)
    inputs = -1 if len(wanted) == len(plan.gradient_of) else sum(1 << plan.gradient_of[k] for k in wanted)
    return nodes.visited(tuple([k for k in plan.tangents if grads[k] is not None]), inputs)


def _wanted(call: Call, ctx: Any) -> list[int]:
    """The gradients that this backward was asked for, as indices into ``plan.gradient_of``."""
    edges = zip(call.edges, ctx.next_functions, strict=False)
    return [*[k for k, (node, _) in edges if node is not None and will_run(node)], *call.accumulated]


def _changed_in_place(tensor: torch.Tensor, version: int, what: str) -> RuntimeError:
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{tensor.type()} {list(tensor.shape)}], which is {what} of a graphed callable, is at version "
        f"{tensor._version}; expected version {version} instead."
    )


_address = torch.Tensor.data_ptr


def _versions(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    try:
        return tuple([tensor._version for tensor in tensors])
    except RuntimeError:  # an inference tensor has none
        return tuple([_version(tensor) for tensor in tensors])


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


class Twin(Protocol):
    """Compares a call with eager; see :mod:`fxgraph.verifying`."""

    def check_gradients(
        self,
        call: Call,
        tangents: Sequence[torch.Tensor | None],
        gradients: Sequence[torch.Tensor | None],
        wanted: Sequence[int],
        added_to: Mapping[int, torch.Tensor | None],
    ) -> None:
        """Raise where a gradient differs, or what it was added to together with it."""


class Runner(Protocol):
    """What a node needs of the program that it replays."""

    lock: threading.RLock
    autocasts: bool

    def partial_backward(self, capture: Capture, defined: tuple[bool, ...]) -> PartialBackward:
        """Backward graph for the case that only some tangents are defined, and the inputs that its outputs belong
        to."""

    def eager_nodes(self, capture: Capture) -> EagerNodes | None:
        """The autograd nodes that eager has for a call; None where they are not to be had."""

    def recompute(self, capture: Capture, inputs: Sequence[torch.Tensor]) -> tuple[Any, ...]:
        """The program's outputs, run by autograd under the autocast state of the capture."""

    def say_eager(self, reason: str) -> None:
        """Count a call that ran eagerly for this reason, and warn at the first."""


def run(
    program: Runner, capture: Capture, slot: Slot, inputs: tuple[torch.Tensor, ...], twin: Twin | None = None
) -> tuple[Any, ...]:
    """Replay a slot's forward for these inputs and give the program's outputs."""
    plan = capture.plan
    capture.replays += 1
    if plan.backward is None:
        with torch.no_grad():
            handed = _forward(capture, slot, inputs)
        handed = _share(handed, slot)
    else:
        call = Call(program, capture, slot, inputs, twin)
        handed = _apply(call, *call.differentiable())
    for index, position in plan.updates:
        target = inputs[index]
        # A leaf can only have been written behind autograd's back (`weight.detach().mul_(2)`).
        (target.detach() if target.is_leaf and target.requires_grad else target).copy_(handed[position])
    if plan.returned is not None:
        return plan.returned(handed)
    return tuple([_make(ret, handed, inputs) for ret in plan.returns])


def _make(ret: Any, handed: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> Any:
    if ret.how == "node":
        return handed[ret.index]
    if ret.how == "constant":
        return ret.value
    if ret.how == "input":
        return inputs[ret.index]
    base = handed[ret.index] if ret.how == "view_of_node" else inputs[ret.index]
    return aot.view_again(base, ret.meta.like(), ret.requires_grad, ret.view_metas)


def _forward(capture: Capture, slot: Slot, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Copy in, replay, write back, hand out. Runs without grad mode."""
    plan = capture.plan
    slot.fill(inputs)
    if plan.mutated:
        # An engine may or may not count versions of what a region writes; here it is counted as in eager.
        with preserve_versions([inputs[index] for index in plan.mutated if slot.statics[index] is None]):
            slot.forward.replay()
    else:
        slot.forward.replay()
    for index in plan.mutated:
        static, counted = slot.statics[index], index not in plan.uncounted
        if static is None and counted:
            torch.autograd.graph.increment_version(inputs[index])  # the region wrote it behind autograd's back
        elif static is not None:
            with contextlib.nullcontext() if counted else preserve_versions([inputs[index]]):
                compact(inputs[index]).copy_(compact(static))
    inference = torch.is_inference_mode_enabled()
    if not inference and slot.separate:
        copied = capture.copied_outputs
        if not copied:
            return tuple(aliases(slot.handed))
        return tuple([copy_of(out) if k in copied else out for k, out in enumerate(aliases(slot.handed))])
    if not inference and not capture.copied_outputs:
        return tuple([buffer.detach() for buffer in slot.handed])
    copied = {slot.roots[k] for k in capture.copied_outputs}
    handed: list[torch.Tensor] = []
    for k, (buffer, root) in enumerate(zip(slot.handed, slot.roots, strict=True)):
        if root in copied and root != k:
            handed.append(_tensor_in(handed[root].untyped_storage(), buffer))
        elif root not in copied:
            handed.append(_tensor_in(buffer.untyped_storage(), buffer) if inference else buffer.detach())
        elif slot.roots.count(k) > 1:
            handed.append(_tensor_in(buffer.untyped_storage().clone(), buffer))
        else:
            handed.append(copy_of(buffer))
    return tuple(handed)


def _share(handed: tuple[torch.Tensor, ...], slot: Slot) -> tuple[torch.Tensor, ...]:
    """Outputs in one storage as views of the first of them, so that they share its memory and version counter."""
    return tuple(
        [
            out if root == k else handed[root].as_strided(out.size(), out.stride(), out.storage_offset())
            for k, (out, root) in enumerate(zip(handed, slot.roots, strict=True))
        ]
    )


def _tensor_in(storage: torch.UntypedStorage, like: torch.Tensor) -> torch.Tensor:
    """A new tensor in a storage; under inference mode an inference tensor, as eager's would be."""
    new = torch.empty(0, dtype=like.dtype, device=like.device)
    return new.set_(storage, like.storage_offset(), like.size(), like.stride())


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, *differentiable: torch.Tensor) -> tuple[torch.Tensor, ...]:
        plan = call.capture.plan
        ctx.call = call
        ctx.set_materialize_grads(False)
        handed = _forward(call.capture, call.slot, call.inputs)
        if plan.not_differentiable:
            ctx.mark_non_differentiable(*[handed[k] for k in plan.not_differentiable])
        ctx.save_for_backward(*call.keep(handed))
        return handed

    @staticmethod
    @never_read  # compiled autograd would read into the replay
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        call: Call = ctx.call
        keeps, keep = call.capture.plan.keeps, keep_graph()
        # Touch the saved tensors: autograd says here that the graph has been freed, and checkpoint runs the forward
        # again. That one of them was changed in place is no matter to a replay, which has its own copy; what matters is
        # watched.
        try:
            ctx.saved_tensors  # noqa: B018
        except RuntimeError as error:
            if "modified by an inplace operation" not in str(error) and not _goes_on(call, ctx, grads):
                if call.freed is None and len(call.capture.plan.tangents) > 1:
                    add_note(error, _ONE_NODE)
                raise
        with call.program.lock:
            try:
                if call.accumulator is not None:
                    call.begin_backward(ctx)
                call.check_versions(ctx, grads)
                if torch.is_grad_enabled():
                    result = _eager_backward(call, ctx, grads, "create_graph=True")
                elif autocast_is_on():
                    result = _backward_under_autocast(call, ctx, grads)
                elif call.twin is None:
                    result = _backward(call, ctx, grads)
                else:
                    result = _verified_backward(call, call.twin, ctx, grads)
                if call.accumulator is not None:
                    result = call.end_backward(result)
            finally:
                if keeps and not keep and not call.goes_on:
                    call.end()
        return (None, *result)


_apply = plain_apply(_Node)


def _goes_on(call: Call, ctx: Any, grads: Sequence[torch.Tensor | None]) -> bool:
    """Whether a backward of a graph that has been freed comes in eager to nothing that has been."""
    with call.program.lock:
        if call.accumulator is not None:
            call.begin_backward(ctx)
        return call.may_run_again(ctx, grads)


_ONE_NODE = (
    "fxgraph: the outputs of a graphed callable are outputs of one autograd node. Where the two backwards have no op "
    "in common, eager can do without, here the first one needs retain_graph=True."
)


def _backward(call: Call, ctx: Any, grads: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
    capture, slot = call.capture, call.slot
    plan = capture.plan
    given = [grads[k] for k in plan.tangents]
    if plan.layouts and not any(tangent is not None and is_batched(tangent) for tangent in given):
        given = [
            tangent if tangent is None or tangent.stride() == like.stride() else copy_laid_out(tangent, like.stride())
            for tangent, like in zip(given, plan.layouts, strict=True)
        ]
    tangents = [tangent for tangent in given if tangent is not None]
    if len(tangents) < len(given):
        result = _partial_backward(call, given)
        call.partly_done(ctx, grads)
        return result
    # With is_grads_batched=True: ops have batching rules, replays and copies have not.
    if any(map(is_batched, tangents)) or not slot.takes(tangents):
        return _op_by_op(plan, [*slot.backward_inputs()[: -len(tangents)], *tangents])
    slot.fill_tangents(tangents)
    if call.accumulator is not None and capture.accumulates_inside:
        gradients = _accumulating_backward(call, call.accumulator)
        if gradients is not None:
            return gradients
    if slot.backward is None and not slot.outdated:
        slot.will_need_plain()
    if slot.backward is None or not slot.gradients_free():
        return _op_by_op(plan, slot.backward_inputs())
    slot.backward.replay()
    copied = slot.copied_gradients
    if copied:
        with kernels_only():
            return tuple([copy_of(g) if k in copied else g for k, g in enumerate(aliases(slot.gradients))])
    return tuple(aliases(slot.gradients))


def _op_by_op(plan: Plan, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor | None, ...]:
    """The backward into new memory."""
    assert plan.backward is not None, "it has run"
    return _run(plan.backward, inputs)


def _run(graph: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor | None, ...]:
    with kernels_only():
        return tuple(graph(*outside_of_captures(inputs, seeds(graph))))


def _accumulating_backward(call: Call, accumulator: Accumulator) -> tuple[torch.Tensor | None, ...] | None:
    """Replay a backward that accumulates the parameters' gradients; gives the other ones. None if there is none."""
    if call.request is not None or len(call.accumulated) < len(accumulator.positions):
        return None
    pattern = accumulator.pattern(call.parameters)
    backward = None if pattern is None else call.slot.accumulating_backward(pattern, accumulator)
    if pattern is None or backward is None:
        return None
    backward.region.replay()
    accumulator.hand_out(call.parameters, pattern)
    call.accumulated = ()
    gradients: list[torch.Tensor | None] = [None] * len(call.capture.plan.gradient_of)
    if not accumulator.others:
        return tuple(gradients)
    with kernels_only():
        for k, gradient in zip(accumulator.others, backward.gradients, strict=True):
            gradients[k] = copy_of(gradient) if k in call.slot.copied_gradients else gradient.detach()
    return tuple(gradients)


def _verified_backward(
    call: Call, twin: Twin, ctx: Any, grads: Sequence[torch.Tensor | None]
) -> tuple[torch.Tensor | None, ...]:
    wanted = _wanted(call, ctx)
    before = [None if p.grad is None else p.grad.clone() for p in call.parameters]
    result = _backward(call, ctx, grads)
    found, added = list(result), {}
    if call.accumulator is not None and set(wanted) - set(_wanted(call, ctx)):  # a region has accumulated
        for k, parameter, former in zip(call.accumulator.positions, call.parameters, before, strict=True):
            found[k], added[k] = parameter.grad, former
    with torch.enable_grad():
        twin.check_gradients(call, grads, found, wanted, added)
    return result


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides, which ``clone()`` keeps only where they leave no gaps."""
    copy = tensor.clone()
    if copy.stride() == tensor.stride():
        return copy
    copy = empty_like_layout(tensor, tensor.device)
    compact(copy).copy_(compact(tensor))
    return copy


def _partial_backward(call: Call, tangents: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
    """Some outputs have no gradient: eager would not run their part of the backward at all."""
    plan = call.capture.plan
    updates = {position for _, position in plan.updates}
    tangents = [  # see _defined
        torch.zeros_like(like) if tangent is None and position in updates else tangent
        for tangent, like, position in zip(tangents, call.slot.tangents, plan.tangents, strict=True)
    ]
    partial = call.program.partial_backward(call.capture, tuple(tangent is not None for tangent in tangents))
    given = call.slot.backward_inputs()
    arguments = [given[k] for k in partial.saved] + [tangent for tangent in tangents if tangent is not None]
    gradients = _run(partial.graph, arguments)
    found = dict(zip(partial.gradient_of, gradients, strict=True))
    return tuple([found.get(i) for i in plan.gradient_of])


def _backward_under_autocast(
    call: Call, ctx: Any, grads: Sequence[torch.Tensor | None]
) -> tuple[torch.Tensor | None, ...]:
    """A backward with autocast on: the ops that autograd calls then cast their inputs, and between nodes gradients are
    cast back, which no region was captured for."""
    call.program.say_eager("its backward runs with autocast on, which torch advises against: call backward() outside")
    with torch.enable_grad():
        return _eager_backward(call, ctx, grads, "a backward with autocast on", create_graph=False)


def _eager_backward(
    call: Call, ctx: Any, grads: Sequence[torch.Tensor | None], what: str, create_graph: bool = True
) -> tuple[torch.Tensor | None, ...]:
    """Run the forward again, eagerly, and let autograd differentiate it: for ``what``, in words for errors.

    Raises:
        DoubleBackwardError: where running the forward again is not the same as the forward that ran.
    """
    plan = call.capture.plan
    if not plan.repeatable:
        raise DoubleBackwardError(
            "double-backward",
            f"{what} through a graphed callable whose forward cannot be run again",
            where=", ".join(_why_not_repeatable(plan)),
            observed="a forward that changes inputs in place and uses what they held before",
            expected="a forward that gives the same values when it runs a second time",
            hint="run this callable eagerly where you need that: fxgraph.ungraph(callable)",
        )
    if create_graph and plan.joint.one_layout:
        raise second_derivative_of_function(what)
    changed = [
        str(plan.inputs[i])
        for i, (tensor, version) in enumerate(zip(call.inputs, call.versions, strict=True))
        if _version(tensor) != version and i not in plan.overwritten
    ]
    if changed:
        raise DoubleBackwardError(
            "double-backward-input-changed",
            f"{what} after an input of the graphed callable was changed in place",
            where=", ".join(changed),
            observed="another version counter than at the forward",
            expected="inputs that are not changed between the forward and the backward",
            hint="clone the input before you change it",
        )
    unfrozen = [i for i, tensor in enumerate(call.inputs) if tensor.requires_grad and i in plan.frozen]
    if unfrozen and create_graph:
        raise DoubleBackwardError(
            "double-backward-input-changed",
            f"{what} after an input of the graphed callable was made to require grad",
            where=", ".join(str(plan.inputs[i]) for i in unfrozen),
            observed="requires_grad=True, at the forward False",
            expected="what required grad at the forward: eager's second derivative would reach it on some ways only",
            hint="call requires_grad_() before the forward",
        )
    inputs = list(call.inputs)
    saved = call.history if call.history is not None else ctx.saved_tensors
    for i, tensor in zip(call.with_history, saved, strict=False):
        inputs[i] = tensor
    inputs = [_stand_in(tensor, call.program.autocasts) for tensor in inputs]
    for i in plan.overwritten:
        inputs[i] = inputs[i].detach().clone()
    with contextlib.ExitStack() as stack:
        if call.random_state is not None:
            stack.enter_context(call.capture.engine.from_random_state(call.capture.device, call.random_state))
        outputs = call.program.recompute(call.capture, inputs)
    chosen = [
        (out, grads[k])
        for k, out in node_outputs(plan, outputs, inputs).items()
        if grads[k] is not None and out.requires_grad
    ]
    sources = [i for i in plan.gradient_of if inputs[i].requires_grad]  # AccumulateGrad passes over what is frozen now
    if not chosen or not sources:
        return (None,) * len(plan.gradient_of)
    if not all(_defined(plan, grads)):
        call.partly_done(ctx, grads)
    gradients = torch.autograd.grad(
        [output for output, _ in chosen],
        [inputs[i] for i in sources],
        [grad for _, grad in chosen],
        create_graph=create_graph,
        allow_unused=True,
    )
    found = dict(zip(sources, gradients, strict=True))
    return tuple([found.get(i) for i in plan.gradient_of])


def node_outputs(plan: Plan, outputs: Sequence[Any], inputs: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
    """What the program has given, and left in its inputs, when it ran eagerly, as outputs of the autograd node."""
    found: dict[int, torch.Tensor] = {position: inputs[index] for index, position in plan.updates}
    for ret, output in zip(plan.returns, outputs, strict=True):
        if ret.how == "node":
            found[ret.index] = output
        elif ret.how == "view_of_node" and output._base is not None:
            found.setdefault(ret.index, output._base)  # AOTAutograd hands out the base of such views
    return found


def _stand_in(tensor: torch.Tensor, autocasts: bool) -> torch.Tensor:
    """What stands for an input when the forward is run again to be differentiated.

    Not the tensor itself, whose hooks the inner backward would call. But autocast keeps its casts of leaves only, so
    where it is on, a leaf without hooks stands for itself.
    """
    if not tensor.requires_grad or (autocasts and tensor.is_leaf and not tensor._backward_hooks):
        return tensor
    return tensor.view_as(tensor)


def _why_not_repeatable(plan: Plan) -> list[str]:
    changed = [*sorted(set(plan.mutated) - plan.overwritten), *[i for i, _ in plan.updates]]
    return [str(plan.inputs[i]) for i in changed]
