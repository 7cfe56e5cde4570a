"""Captures and their slots: static buffers, captured regions, and which slot is free right now.

Note [Hand-out]

An output of a replay is a buffer that the next replay of the same slot overwrites. Users get an alias of the buffer,
without a copy, and the slot counts as taken as long as anybody else holds the buffer's storage: a tensor of the user's,
a view of it, or a saved variable of autograd's (``torch._C._storage_Use_Count``). Who keeps outputs (a list of losses,
a cache) would take one slot after the other. So a capture learns: an output once found held at the next call is handed
out as a copy from then on, and the slot that is held is given up to its holder and replaced.

Gradients likewise. ``AccumulateGrad`` takes a gradient that nobody else references as ``.grad`` without copying. If it
is still there when the slot's backward comes round again (gradient accumulation, ``set_to_none=False``), this backward
runs op by op into new memory, and the slot's backward region is captured anew with those gradients handed out as
copies.

Note [Tangents]

The gradient of an output comes in the layout that autograd happens to give it: expanded from one element after
``sum()``, transposed, contiguous. Kernels, and with them the rounding, depend on it. So a backward with another layout
than captured runs op by op on the tangents as they are, and the backward region is captured anew for that layout. After
MAX_LAYOUTS of them a slot copies into what it has, if that is not expanded: equal to eager up to rounding. A backward
that the user has written (``torch.autograd.Function``) may have asked for the layout, so it gets the traced one always.
A backward of inductor's kernels, which rounds in its own way whatever the layout, is compiled for one and copied into
at once.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import fx

from ._torch_compat.autograd import kernels_only, saved_tensors_hooked, watched
from ._torch_compat.storage import Held, Watched, unowned
from .accumulate import Accumulator, Pattern, accumulating_graph
from .compiling import Regions
from .engines import CapturedRegion, Engine, Pool
from .engines.base import compact, copy_all
from .places import MOST_PLACES, Places, large_inputs
from .plan import Plan
from .signature import WrittenMemory

MAX_LAYOUTS = 4
"""How often a slot captures its backward anew for tangents of another layout; see Note [Tangents]."""

MAX_PATTERNS = 4
"""For how many patterns a slot has backwards that accumulate; see Note [Gradients in the graph], ``accumulate.py``."""


class Lease:
    """A forward that waits for its backward. It dies with the autograd node that owns it, and frees the slot then."""

    __slots__ = ("_slot",)

    def __init__(self, slot: Slot) -> None:
        self._slot: Slot | None = slot
        slot.pending = True

    @property
    def held(self) -> bool:
        """Whether the backward may still come."""
        return self._slot is not None

    def end(self) -> None:
        """Give the slot back. Idempotent."""
        slot, self._slot = self._slot, None
        if slot is not None:
            slot.give_back()

    def __del__(self) -> None:
        self.end()


class AccumulatingBackward:
    """A backward region that accumulates the gradients of parameters itself.

    Attributes:
        gradients: buffers of the other gradients, in the order of ``accumulator.others``.
    """

    def __init__(self, region: CapturedRegion, memory: list[torch.Tensor]) -> None:
        self.region, self.gradients = region, region.outputs
        self._memory = memory
        self.held = Held(list(self.gradients))

    def writes(self, memory: list[torch.Tensor]) -> bool:
        """Whether these are the static gradients that it was captured on."""
        return self._memory is memory or all(map(operator.is_, self._memory, memory))


class Slot:
    """One set of static buffers with the regions captured on them.

    Attributes:
        where: the addresses at which it reads the capture's large inputs; None if it copies them.
        pending: a forward of this slot waits for its backward.
        statics: for each input of the program its static buffer, or None where the input is live or read where it lies.
        outputs: buffers of the forward region.
        gradients: buffers of the backward region, in the order of ``plan.gradient_of``.
    """

    def __init__(self, capture: Capture, inputs: Sequence[torch.Tensor], where: tuple[int, ...] | None = None) -> None:
        self.capture, self.where = capture, where
        self.pending = False
        plan, engine = capture.plan, capture.engine
        with kernels_only():
            self._arguments = [value.detach() for value in inputs]
            self.statics: list[torch.Tensor | None] = [None] * len(inputs)
            for i, spec in enumerate(plan.inputs):
                if where is not None and i in capture.places.large:
                    self._arguments[i] = unowned(inputs[i])
                elif not spec.live:
                    self._arguments[i] = self.statics[i] = engine.empty(capture.pool, inputs[i])
            self._copied = [i for i, static in enumerate(self.statics) if static is not None]
            self._targets = [compact(self._arguments[i]) for i in self._copied]
            self._expanded = [i for i in self._copied if 0 in self._arguments[i].stride()]
            self.fill(inputs)
        mutated = [self._arguments[i] for i in plan.mutated]
        with engine.unchanged(mutated):
            self.forward: CapturedRegion = engine.capture(
                capture.pool, capture.regions.forward, self._arguments, capture.num_warmup_iters
            )
        self.outputs = self.forward.outputs
        self.handed = [self.outputs[out.position] for out in plan.handed]
        self._watch_outputs()
        self.roots = _roots(self.handed)
        self.separate = self.roots == list(range(len(self.roots)))  # no two of them share memory
        self.backward: CapturedRegion | None = None
        self.gradients: tuple[torch.Tensor, ...] = ()
        self.tangents: list[torch.Tensor] = []
        self._tangent_targets: list[torch.Tensor] = []
        self._tangent_strides: list[tuple[int, ...]] = []
        self._held_gradients = Held([])
        self.copied_gradients: set[int] = set()
        self.stale_gradients: set[int] = set()
        self._layouts_learned = 0
        self._new_tangents: list[torch.Tensor] = []
        # With gradients in the graph: the backwards that accumulate; which ones are wanted, and whether a plain one is.
        self.accumulating: dict[Pattern, AccumulatingBackward] = {}
        inside = capture.accumulator if capture.accumulates_inside else None
        self._patterns = {inside.nothing_there} if inside is not None else set()
        self._plain = inside is None

    def capture_backward(self) -> None:
        """Capture the backward regions that are to be and are not yet. The forward has been captured; it runs once more
        to give the saved values a value."""
        plan, engine, pool = self.capture.plan, self.capture.engine, self.capture.pool
        region = self.capture.regions.backward
        if region is None:
            return
        with kernels_only():
            if not self.tangents:
                likes = plan.layouts or [self.handed[k] for k in plan.tangents]
                self.tangents = [engine.empty(pool, like) for like in likes]
                for tangent in self.tangents:
                    compact(tangent).fill_(1)
            self._tangent_targets = [compact(tangent) for tangent in self.tangents]
            self._tangent_strides = [tangent.stride() for tangent in self.tangents]
        with engine.unchanged([self._arguments[i] for i in plan.mutated]):
            self.forward.replay()
            if self._plain and self.backward is None:
                self.backward = engine.capture(pool, region, self.backward_inputs(), self.capture.num_warmup_iters)
                self.gradients = self.backward.outputs
                self._held_gradients = Held(list(self.gradients))
            if self.capture.accumulator is not None and plan.backward is not None:
                self._capture_accumulating(plan.backward, self.capture.accumulator)
        self._watch_outputs()  # again: the backward regions hold views of the forward's buffers

    def _capture_accumulating(self, backward: fx.GraphModule, accumulator: Accumulator) -> None:
        engine, memory = self.capture.engine, accumulator.memory
        for pattern in self._patterns - self.accumulating.keys():
            graph = accumulating_graph(backward, accumulator, pattern)
            with engine.unchanged(memory):  # which may be gradients that the user has
                inputs = [*self.backward_inputs(), *memory]
                region = engine.capture(self.capture.pool, graph, inputs, self.capture.num_warmup_iters)
            self.accumulating[pattern] = AccumulatingBackward(region, memory)

    def accumulating_backward(self, pattern: Pattern, accumulator: Accumulator) -> AccumulatingBackward | None:
        """The backward that accumulates for this pattern, if it may run now; what is missing will be captured."""
        found = self.accumulating.get(pattern)
        if found is not None and not found.writes(accumulator.memory):
            del self.accumulating[pattern]
            found.region.release()
            found = None
        if found is None:
            if len(self._patterns) < MAX_PATTERNS:
                self._patterns.add(pattern)
        elif found.held.any():
            self.stale_gradients.update(accumulator.others[k] for k in found.held.which())
            found = None
        return found

    def will_need_plain(self) -> None:
        """Have the backward that does not accumulate captured too, when the slot is next taken."""
        self._plain = True

    def _watch_outputs(self) -> None:
        self._held = Held(self.handed)

    def backward_inputs(self) -> list[torch.Tensor]:
        """The tensors that the backward graph takes, in its order."""
        places = {"input": self._arguments, "forward": self.outputs, "tangent": self.tangents}
        return [places[source.kind][source.index] for source in self.capture.plan.backward_inputs]

    def fill(self, inputs: Sequence[torch.Tensor]) -> None:
        """Copy the call's inputs into the static buffers."""
        if self._expanded:
            inputs = [compact(value) if i in self._expanded else value for i, value in enumerate(inputs)]
        copy_all(self._targets, [inputs[i] for i in self._copied])

    def own_bytes(self) -> int:
        """Bytes of its outputs, saved values and gradients."""
        gradients = [g for backward in self.accumulating.values() for g in backward.gradients]
        kept = {argument.untyped_storage()._cdata for argument in self._arguments}
        storages = [buffer.untyped_storage() for buffer in (*self.outputs, *self.gradients, *gradients)]
        return sum({s._cdata: s.nbytes() for s in storages if s._cdata not in kept}.values())

    def free(self) -> bool:
        """Whether a forward may overwrite this slot now."""
        return not self.pending and not self._held.any()

    def held(self) -> list[int]:
        """Node outputs that somebody still holds."""
        return self._held.which()

    def gradients_free(self) -> bool:
        """Whether the backward region may overwrite the gradients now; if not, remembers which ones stand in the
        way."""
        if not self._held_gradients.any():
            return True
        self.stale_gradients.update(self._held_gradients.which())
        return False

    def renew_backward(self) -> None:
        """Leave the gradient buffers that are held to their holders, and capture the backward into new ones."""
        if self.stale_gradients or self._new_tangents:
            self._release_backwards()
        self.copied_gradients |= self.stale_gradients
        self.stale_gradients = set()
        if self._new_tangents:
            self.tangents, self._new_tangents = self._new_tangents, []
        self.capture_backward()

    def _release_backwards(self) -> None:
        for region in [self.backward, *[backward.region for backward in self.accumulating.values()]]:
            if region is not None:
                region.release()
        self.backward, self.accumulating = None, {}

    def fill_tangents(self, tangents: Sequence[torch.Tensor]) -> None:
        """Copy the gradients of the outputs, which :meth:`takes` has seen, into the static tangents."""
        sources = [
            tangent if target is static else compact_as(tangent, static, target)
            for tangent, static, target in zip(tangents, self.tangents, self._tangent_targets, strict=True)
        ]
        copy_all(self._tangent_targets, sources)

    def takes(self, tangents: Sequence[torch.Tensor]) -> bool:
        """Whether the backward was captured for tangents of this layout; if not, it will be. See Note [Tangents]."""
        if [tangent.stride() for tangent in tangents] == self._tangent_strides:
            return True
        if all(map(_same_layout, tangents, self.tangents)):
            return True
        if self.capture.regions.any_layout or self._layouts_learned == MAX_LAYOUTS:
            # One that is expanded takes nothing else.
            return all(map(operator.is_, self._tangent_targets, self.tangents))
        if any(torch._debug_has_internal_overlap(compact(tangent)) == 1 for tangent in tangents):
            return True
        self._layouts_learned += 1
        self._new_tangents = [self.capture.engine.empty(self.capture.pool, tangent) for tangent in tangents]
        for tangent in self._new_tangents:
            compact(tangent).fill_(1)
        return False

    @property
    def outdated(self) -> bool:
        """Whether a backward has to be captured before the slot is used again."""
        if self.stale_gradients or self._new_tangents:
            return True
        missing = len(self.accumulating) < len(self._patterns) or (self._plain and self.backward is None)
        return missing and self.capture.plan.backward is not None

    def give_back(self) -> None:
        """The forward that was pending is not any more."""
        self.pending = False
        if not self.capture.engine.poisons:
            return
        others = self.handed + self._arguments
        kept = {tensor.untyped_storage().data_ptr() for tensor in others}
        own = [buffer for buffer in self.outputs if buffer.untyped_storage().data_ptr() not in kept]
        self.capture.engine.poison(own)

    def release(self) -> None:
        """Give up the regions; buffers that somebody holds stay theirs."""
        self.forward.release()
        self._release_backwards()


class Capture:
    """All slots for one signature of a program."""

    def __init__(
        self,
        graph: fx.GraphModule,
        plan: Plan,
        regions: Regions,
        engine: Engine,
        device: torch.device,
        inputs: Sequence[torch.Tensor],
        pool: Pool,
        num_warmup_iters: int,
        max_in_flight: int,
    ) -> None:
        self.graph = graph  # torch-level, with the plan's inputs: what runs where no replay can
        self.plan, self.regions = plan, regions
        self.engine, self.device, self.pool = engine, device, pool
        self.num_warmup_iters, self.max_in_flight = num_warmup_iters, max_in_flight
        live = [tensor for spec, tensor in zip(plan.inputs, inputs, strict=True) if spec.live]
        self.addresses = tuple(tensor.data_ptr() for tensor in live)
        self.saved_addresses = tuple(inputs[i].data_ptr() for i in plan.saved_live)
        # A Parameter has no history (were one given some, in place, a call would only be kept longer than it should).
        self.may_have_history = [i for i in plan.gradient_of if not isinstance(inputs[i], torch.nn.Parameter)]
        # A leaf can only be written behind autograd's back (`weight.detach().mul_(2)`): eager refuses anything else.
        self.leaf_updates = frozenset(i for i, _ in plan.updates if _is_differentiable_leaf(inputs[i]))
        self._live = [Watched.of(tensor) for tensor in live]
        self.slots: list[Slot] = []
        self.places = Places(large_inputs(plan, inputs), self._affordable_places)
        self.copied_outputs: set[int] = set()
        self.replays = 0
        self.written: WrittenMemory | None = None
        self.failures = 0  # captures of a slot that the engine could not make
        self.accumulator: Accumulator | None = None  # with gradients in the graph

    @property
    def accumulates_inside(self) -> bool:
        """Whether backward regions are captured that accumulate. They are made of the plan's own graph, so inductor's
        are not: what they give is accumulated by hand."""
        return self.accumulator is not None and self.regions.backward is self.plan.backward

    def writes_leaf(self, inputs: Sequence[torch.Tensor]) -> bool:
        """Whether a call would change a leaf that requires grad where it was captured with another tensor there."""
        if not torch.is_grad_enabled():
            return False
        return any(_is_differentiable_leaf(inputs[i]) and i not in self.leaf_updates for i, _ in self.plan.updates)

    def lives(self) -> bool:
        """Whether the parameters and buffers that it was captured on are still where they were."""
        return all(
            watched.held and watched.tensor.data_ptr() == address
            for watched, address in zip(self._live, self.addresses, strict=True)
        )

    def accumulates(self, inputs: Sequence[torch.Tensor]) -> tuple[Accumulator, Sequence[torch.Tensor]] | None:
        """What accumulates the gradients of a call's parameters, and these; None where autograd has to do it."""
        if self.accumulator is None:
            return None
        parameters = self.accumulator.parameters(inputs)
        if watched(parameters):
            return None
        if not self.accumulator.belongs_to(parameters):
            if len({id(parameter) for parameter in parameters}) < len(parameters):
                return None
            self.accumulator = self.accumulator.again(inputs)
        return self.accumulator, parameters

    def _affordable_places(self) -> int:
        """See Note [Large inputs], ``places.py``."""
        copying = next((slot for slot in self.slots if slot.where is None), None)
        if copying is None:
            return 0
        own = copying.own_bytes()
        copies = sum(static.nbytes for static in copying.statics if static is not None)
        return 11 * (own + copies) // (10 * own) if own else MOST_PLACES  # give or take a tenth

    def add_slot(
        self, inputs: Sequence[torch.Tensor], with_backward: bool = True, where: tuple[int, ...] | None = None
    ) -> Slot:
        """Capture one more slot on these inputs."""
        slot = Slot(self, inputs, where)
        if with_backward:
            try:
                slot.capture_backward()
            except BaseException:
                slot.release()
                raise
        self.slots.append(slot)
        return slot

    def where(self, inputs: Sequence[torch.Tensor]) -> tuple[int, ...] | None:
        """At which addresses a slot for a call is to read its large inputs; None if it is to copy them."""
        return self.places.of(inputs) if self.places.large else None

    def free_slot(self, where: tuple[int, ...] | None) -> Slot | None:
        """A slot that a forward may use now as it is."""
        for slot in self.slots:
            if slot.where == where and slot.free() and not slot.outdated:
                return slot
        return None

    def acquire(self, inputs: Sequence[torch.Tensor], where: tuple[int, ...] | None) -> Slot | None:
        """Where there is no :meth:`free_slot`: one captured for it; None if ``max_in_flight`` forwards are pending.

        Checkpoint runs a forward again and compares what is saved each time. A replay saves other tensors than eager
        does, so inside of a checkpoint there is always a slot.
        """
        for slot in self.slots:
            if slot.where == where and slot.free():
                self.slots.remove(slot)  # until it is whole again
                slot.renew_backward()
                self.slots.append(slot)
                return slot
        if self._drop_idle(where):
            self.pool.trim()
        if len(self.slots) >= self.max_in_flight and not saved_tensors_hooked():
            return None
        return self.add_slot(inputs, where=where)

    def _drop_idle(self, where: tuple[int, ...] | None) -> bool:
        """Give up the slots that no call is waiting for and none will use; whether there were any."""
        full = len(self.slots) >= self.max_in_flight
        kept = []
        for slot in self.slots:
            to_come = slot.where in self.places.known or (slot.where is not None and slot.where == self.places.static)
            if slot.pending or (slot.where != where and to_come and not full):
                kept.append(slot)  # for a call that is to come
                continue
            if slot.where == where:
                self.copied_outputs.update(slot.held())  # Note [Hand-out]
            slot.release()
        dropped = len(kept) < len(self.slots)
        self.slots = kept
        return dropped

    def release(self) -> None:
        """Give up all slots."""
        for slot in self.slots:
            slot.release()
        self.slots = []

    def __str__(self) -> str:
        ops = sum(node.op == "call_function" for node in self.plan.forward.graph.nodes)
        regions = "forward" if self.plan.backward is None else "forward and backward"
        inside = ""
        if self.accumulator is not None and self.accumulates_inside:
            inside = f", {len(self.accumulator.positions)} gradients in the graph"
        if self.places.known:
            inside += f", large inputs read in {len(self.places.known)} place(s)"
        return f"{regions}, {ops} forward ops, {len(self.slots)} slot(s), {self.replays} replays{inside}"


def _roots(tensors: Sequence[torch.Tensor]) -> list[int]:
    """For each tensor the index of the first one that lies in the same storage."""
    first: dict[int, int] = {}
    return [first.setdefault(tensor.untyped_storage()._cdata, k) for k, tensor in enumerate(tensors)]


def _same_layout(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one size have their elements in the same places."""
    if one.stride() == other.stride():
        return True
    return all(a == b or n == 1 for a, b, n in zip(one.stride(), other.stride(), one.size(), strict=True))


def _is_differentiable_leaf(tensor: torch.Tensor) -> bool:
    return tensor.requires_grad and tensor.is_leaf


def compact_as(value: torch.Tensor, like: torch.Tensor, compacted: torch.Tensor) -> torch.Tensor:
    """The value, narrowed in the dimensions in which ``like`` is expanded; ``compacted`` is ``compact(like)``."""
    if value.stride() == like.stride():
        return value.as_strided(compacted.size(), compacted.stride(), value.storage_offset())
    for dim, (size, stride) in enumerate(zip(like.size(), like.stride(), strict=True)):
        if stride == 0 and size > 1:
            value = value.narrow(dim, 0, 1)
    return value
