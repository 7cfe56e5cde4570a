"""One torch-level graph, called with flat inputs: finds or makes the capture for a call, or runs the graph eagerly.

Both entries end here: ``make_graphed_callables`` with a graph that fxgraph's own reading of the callable gave,
``torch.compile`` with the graph that Dynamo hands to a backend.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import fx

import passes
from passes.facts import describe_call, where_of

from . import (
    accumulate,
    again,
    asking,
    compiling,
    effects,
    engines,
    fallback,
    partial,
    plan,
    replay,
    sharing,
    trace,
    verifying,
    weight_casts,
)
from ._torch_compat.autocast import AutocastState
from ._torch_compat.autograd import why_not_replay
from ._torch_compat.tracing import is_fake
from .engines.base import compact
from .errors import CaptureError, FxgraphError, ReplayError, SignatureError, TraceError, UncapturableError
from .options import Options
from .signature import WrittenMemory, guarded_key_of, key_names, key_of, shares_memory
from .slots import Capture, Slot

ALIVE: weakref.WeakSet[Any] = weakref.WeakSet()
"""Every program that exists; ``fxgraph.stats()`` sums over it."""


class RunEagerly(Exception):
    """Why a call is not replayed but run eagerly."""


class RunOriginal(Exception):
    """Why the callable itself is to run, not the graph that was made of it: an op may fail, and then what the callable
    does to Python objects before it has to have happened, which a graph leaves for its end."""


class Runner(Protocol):
    """What runs a torch-level graph for flat inputs."""

    @property
    def programs(self) -> list[Program]:
        """The programs in it."""

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        """The graph's outputs."""

    def prepare(self, inputs: Sequence[Any]) -> Prepared:
        """See :meth:`Program.prepare`."""

    def release(self) -> None:
        """Give up all captures."""


class _WritesShared(RunEagerly):
    """An input that is written shares memory with another one: a matter of the call, not of its signature."""

    def __init__(self) -> None:
        super().__init__("an input that is changed in place shares memory with another input")


class _TakenOver(Exception):
    """Another runner answers this call; see Note [An op that fails to be captured]."""


class _OnAten(Exception):
    """The call starts again, and captures aten kernels; see Note [An op that fails to be captured]."""


_FAILED = "the capture failed: "


def _reason(violation: passes.Violation) -> str:
    return f"[{violation.id}] {violation.title}: {violation.observed} ({violation.where})"


def _refuse_inference_tensors(tensors: Sequence[torch.Tensor]) -> None:
    """Where there may be gradients to compute: eager raises if an op saves one, and which ops do is theirs to know.

    AOTAutograd takes none that requires grad, in any mode.
    """
    inference = [tensor for tensor in tensors if tensor.is_inference()]
    if not inference or torch.is_inference_mode_enabled():
        return
    if any(tensor.requires_grad for tensor in (tensors if torch.is_grad_enabled() else inference)):
        raise RunEagerly("an inference tensor is among its inputs, where there may be gradients to compute")


class Pools:
    """What the callables share that were graphed together: one memory pool per device, and plans while that lasts."""

    def __init__(self, handle: object = None) -> None:
        self.plans: sharing.Plans | None = None  # while callables are graphed together
        self._handle = handle
        self._pools: dict[tuple[str, torch.device], engines.Pool] = {}

    def get(self, engine: engines.Engine, device: torch.device) -> engines.Pool:
        """The pool for a device, made at its first use."""
        if (engine.name, device) not in self._pools:
            self._pools[engine.name, device] = engine.new_pool(device, self._handle)
        return self._pools[engine.name, device]

    def trim(self) -> None:
        """Give back to the devices what nothing holds any more."""
        for pool in self._pools.values():
            pool.trim()

    def bytes_held(self) -> int:
        """Bytes that all pools hold."""
        return sum(pool.bytes_held() for pool in self._pools.values())


@dataclasses.dataclass
class Prepared:
    """What is captured for a sample.

    Attributes:
        slots: slots whose forward is captured, with their programs; the backwards are to come (:meth:`finish`).
        used: ids of the given tensors that have a gradient, or may have one where something runs eagerly.
    """

    slots: list[tuple[Program, Slot]] = dataclasses.field(default_factory=list)
    used: set[int] = dataclasses.field(default_factory=set)

    def finish(self) -> None:
        """Capture the backwards, the last forward's first."""
        for program, slot in reversed(self.slots):
            program.finish(slot)

    @property
    def differentiable(self) -> bool:
        """Whether anything captured has a backward."""
        return any(slot.capture.plan.backward is not None for _, slot in self.slots)


class Program:
    """A torch-level graph and its captures.

    Note [An op that fails to be captured]

    No rule may know of an op that it works on the host. Then its capture fails, and the error is the op's own (an
    engine's failure is another matter). With ``on_uncapturable="split"`` such an op runs eagerly, as those do that the
    rules know: what is captured around it takes the program over, for the signature that failed and all later ones.
    With ``"eager"`` the signature runs eagerly; with ``"error"`` the failure is raised. Ops that fail in eager too are
    not meant. A region of inductor's kernels does not say which op it was: the program goes on with aten kernels, which
    do, and what is around the op is compiled again.

    Args:
        graph: takes flat inputs (tensors, and numbers where Dynamo left sizes symbolic), returns flat outputs.
        specs: what the inputs are.
        options: how to capture.
        name: how messages call it.
        pools: memory shared with other programs.
        guarded: Dynamo's guards have seen everything about the inputs but their addresses.
        around: makes what captures around ops of the graph, given their names and the reasons; None if nothing is left
            to capture then.
    """

    def __init__(
        self,
        graph: fx.GraphModule,
        specs: Sequence[trace.InputSpec],
        options: Options,
        name: str,
        pools: Pools | None = None,
        guarded: bool = False,
        around: Callable[[dict[str, str]], Runner | None] | None = None,
    ) -> None:
        self._around = around
        self.alone = False  # the whole of a callable, which can run in its place
        self.instead: Runner | None = None  # Note [An op that fails to be captured]
        self.graph, self._attributes = trace.lift_attributes(graph)
        self.specs = (
            *specs,
            *(trace.InputSpec(trace.InputKind.PARAMETER, f"attribute {i}") for i in range(len(self._attributes))),
        )
        self.options, self.name = options, name
        self.pools = pools if pools is not None else Pools()
        self.lock = threading.RLock()
        self.captures: collections.OrderedDict[Any, Capture] = collections.OrderedDict()
        self.eager_keys: dict[Any, str] = {}
        self._shared_once: set[Any] = set()  # keys of which a call could not be traced for its inputs shared memory
        self.eager_reasons: collections.Counter[str] = collections.Counter()
        self.replays = 0
        self._without_inductor: set[str] = set()  # reasons that have been said
        self._aten_only: str | None = None  # why nothing more is captured on inductor's kernels
        self._eager = trace.for_eager(self.graph)  # not __call__, which prints a traceback of the graph's own
        self._wrapped_numbers = trace.wrapped_numbers(self.graph)
        self._grad_mode_after = trace.grad_mode_after(self.graph)
        self._autocast = AutocastState.now()
        self.autocasts = weight_casts.autocasts(self.graph)
        self._guarded = guarded and not self._wrapped_numbers and trace.takes_static_tensors(self.graph)
        self._static: tuple[tuple[int, ...], tuple[int, ...]] | None = None  # inputs, and where they are read always
        self._guarded_key = guarded_key_of(self.specs, self.autocasts)
        self._partial: weakref.WeakKeyDictionary[Capture, dict[tuple[bool, ...], partial.PartialBackward]] = (
            weakref.WeakKeyDictionary()
        )
        self._eager_nodes: weakref.WeakKeyDictionary[Capture, again.EagerNodes | None] = weakref.WeakKeyDictionary()
        ALIVE.add(self)

    @property
    def programs(self) -> list[Program]:
        """This one, and those that have taken it over."""
        return [self, *(self.instead.programs if self.instead is not None else ())]

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        """The graph's outputs for these inputs, equal to running it eagerly."""
        if at_work := why_not_replay():
            self.say_eager(at_work)
            return tuple(self._eager(*inputs, *self._attributes))
        return self.called(*inputs)

    def called(self, *inputs: Any) -> tuple[Any, ...]:
        """The same, where the caller has seen that nothing is at work that has to see the ops themselves."""
        given = inputs
        if self._attributes:
            inputs = (*inputs, *self._attributes)
        try:
            with self.lock:
                flat = self._unwrap_numbers(inputs) if self._wrapped_numbers else inputs
                capture = self._capture_for(flat)
                tensors = inputs if self._guarded else tuple([x for x in flat if isinstance(x, torch.Tensor)])
                if capture.plan.written:
                    self._refuse_shared_writes(capture, tensors)
                    if capture.writes_leaf(tensors):
                        raise RunEagerly("a leaf that requires grad would be changed in place")
                where = capture.where(tensors)
                slot = capture.free_slot(where) or self._slot_for(capture, tensors, where)
                self.replays += 1
                run = verifying.verified if capture.replays < self.options.verify else replay.run
                outputs = run(self, capture, slot, tensors)
                if self._grad_mode_after is not None:
                    torch.set_grad_enabled(self._grad_mode_after)
                return outputs
        except RunEagerly as error:
            reason = str(error)
        except _TakenOver:
            assert self.instead is not None, "what takes over is there before anything says so"
            return self.instead(*given)
        except _OnAten:
            return self.called(*given)
        self.say_eager(reason)
        if self.alone and reason.startswith(_FAILED):
            raise RunOriginal(reason)
        try:
            return tuple(self._eager(*inputs))
        except Exception as error:
            if not reason.startswith(_FAILED):
                raise
            raise self._op_failed(error) from error

    def prepare(self, inputs: Sequence[Any]) -> Prepared:
        """Trace, check and capture the forward for these inputs; nothing where this program runs eagerly.

        Raises:
            UncapturableError: with ``on_uncapturable="error"``.
            CaptureError: from the engine.
        """
        given = inputs
        with self.lock:
            inputs = self._unwrap_numbers((*inputs, *self._attributes))
            tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
            try:
                capture = self._capture_for(inputs)
                self._refuse_shared_writes(capture, tensors)
                with self._stage("capturing the forward"):
                    slot = capture.add_slot(tensors, with_backward=False)
                return Prepared([(self, slot)], {id(tensors[i]) for i in capture.plan.gradient_of})
            except RunEagerly as error:
                reason = str(error)
            except _TakenOver:
                reason = ""
            except CaptureError as error:
                own = self._own_failure(capture, tensors)
                if own is not None:
                    raise self._op_failed(own) from error
                if self._give_up_kernels(error, capture):
                    return self.prepare(given)
                if (found := self._set_aside(error, capture)) is None:
                    raise
                reason = found
            if self.instead is not None:
                return self.instead.prepare(given)
            self.say_eager(reason, calls=0)
            return Prepared(used={id(value) for value in inputs})

    def _set_aside(self, error: CaptureError, capture: Capture) -> str | None:
        """Give up a capture that failed at an op; see Note [An op that fails to be captured].

        Returns:
            The reason, or None where it was no op's own error, or is to be raised. Afterwards ``instead`` is there, or
            the signature is known as one that runs eagerly.
        """
        node = engines.blamed(error.__cause__)
        if node is None or self.options.on_uncapturable == "error":
            return None
        name = trace.origin(capture.plan.joint, node)
        if name is None:
            return None
        reason = f"[{error.id}] {describe_call(node)} cannot be captured: {error.observed} ({where_of(node)})"
        key = self._forget(capture)
        if self._around is not None and self.instead is None:
            self.instead = self._around({name: reason})
        if self.instead is None:
            self.eager_keys[key] = reason
        return reason

    def _give_up_kernels(self, error: CaptureError, capture: Capture) -> bool:
        """Give up a capture that failed on inductor's kernels, for one on aten's; whether it was such a one."""
        if not capture.plan.joint.for_inductor or isinstance(error.__cause__, torch.OutOfMemoryError):
            return False
        self._aten_only = f"their capture failed: {error.observed}"
        self._forget(capture)
        return True

    def _forget(self, capture: Capture) -> Any:
        """Release a capture; gives the key that it was found by."""
        key = next((key for key, known in self.captures.items() if known is capture), None)
        self.captures.pop(key, capture).release()
        self.pools.trim()
        return key

    def _own_failure(self, capture: Capture, tensors: list[torch.Tensor]) -> Exception | None:
        """What the graph raises when it runs eagerly on copies of these inputs, if it raises."""
        with capture.engine.unchanged([]), torch.no_grad():
            try:
                capture.graph.forward(*[tensor.detach().clone() for tensor in tensors])
            except Exception as error:
                return error
        return None

    def _op_failed(self, error: Exception) -> TraceError:
        return TraceError(
            "op-failed",
            "an op of the callable fails on these inputs",
            where=self.name,
            observed=f"{type(error).__name__}: {trace.first_line(error)}",
            expected="arguments on which the callable works in eager",
            hint="run the callable eagerly with the same arguments: it fails there too",
        ).of_kind(error)

    def finish(self, slot: Slot) -> None:
        """Capture the backward of a slot that :meth:`prepare` gave.

        Where an op of it cannot be captured, what takes over captures at its first call; so do aten kernels where
        inductor's cannot.
        """
        with self.lock:
            try:
                with self._stage("capturing the backward"):
                    slot.capture_backward()
            except CaptureError as error:
                if self._give_up_kernels(error, slot.capture):
                    return
                reason = self._set_aside(error, slot.capture)
                if reason is None:
                    raise
                if self.instead is None:
                    self.say_eager(reason, calls=0)

    def read_always(self, inputs: Sequence[Any], which: Sequence[int]) -> str:
        """From now on calls with the same tensors at these inputs have them read where they lie, without a copy.

        Returns:
            Why not, where that cannot be; else nothing.
        """
        if not self._guarded:
            return "sizes or numbers among its inputs are no constants"
        with self.lock:
            try:
                capture = self._capture_for((*inputs, *self._attributes))
            except RunEagerly as error:
                return f"it runs eagerly: {error}"
            except _TakenOver:
                return "it is captured in parts"
            for i in which:
                if i in capture.plan.written:
                    return f"{capture.plan.inputs[i]} is changed in place"
                if 0 in inputs[i].stride():
                    return f"{capture.plan.inputs[i]} is expanded"
            self._static = tuple(which), tuple(inputs[i].data_ptr() for i in which)
            for capture in self.captures.values():
                capture.places.read_always(*self._static)
        return ""

    def release(self) -> None:
        """Give up all captures."""
        with self.lock:
            for capture in self.captures.values():
                capture.release()
            self.captures.clear()
            if self.instead is not None:
                self.instead.release()

    def recompute(self, capture: Capture, inputs: Sequence[torch.Tensor]) -> tuple[Any, ...]:
        """See :class:`fxgraph.replay.Runner`."""
        with torch.enable_grad(), self._autocast.again():
            return tuple(capture.graph.forward(*inputs))

    def partial_backward(self, capture: Capture, defined: tuple[bool, ...]) -> partial.PartialBackward:
        """See :class:`fxgraph.replay.Runner`."""
        known = self._partial.setdefault(capture, {})
        if defined not in known:
            joint = capture.plan.joint
            graph = trace.detach_outputs(capture.graph, partial.outputs_without_gradient(joint, defined))
            with torch.inference_mode(False), torch.enable_grad(), self._autocast.again():
                examples = trace.example_inputs(joint)
                narrowed = trace.export(graph, capture.plan.inputs, examples, joint.cached, joint.for_inductor)
            try:
                known[defined] = partial.partial_backward(capture.plan, narrowed)
            except effects.CannotPlan as error:
                raise ReplayError(
                    "partial-backward",
                    f"{self.name}: a backward in which only some outputs have a gradient",
                    observed=str(error),
                    hint="use every output in the loss, or run the callable eagerly: fxgraph.ungraph(callable)",
                ) from error
        return known[defined]

    def eager_nodes(self, capture: Capture) -> again.EagerNodes | None:
        """See :class:`fxgraph.replay.Runner`."""
        if capture not in self._eager_nodes:
            self._eager_nodes[capture] = self._nodes_on_fakes(capture.graph, capture.plan)
        return self._eager_nodes[capture]

    def _nodes_on_fakes(self, graph: fx.GraphModule, planned: plan.Plan) -> again.EagerNodes | None:
        if not again.has_plain_nodes(graph, planned):
            return None
        with torch.inference_mode(False), torch.enable_grad(), self._autocast.again():
            examples = trace.example_inputs(planned.joint)
            inputs = [value.view_as(value) if value.requires_grad else value for value in examples]
            try:
                outputs = trace.run_on_fakes(graph, inputs)
            except Exception:  # whatever fakes cannot do: then no second backward is let through, which is always right
                return None
        return again.EagerNodes(replay.node_outputs(planned, outputs, inputs), inputs)

    def _unwrap_numbers(self, inputs: Sequence[Any]) -> Sequence[Any]:
        flat = list(inputs)
        for position in self._wrapped_numbers:
            if flat[position].device.type == "cpu" and flat[position].numel() == 1:
                flat[position] = flat[position].item()
        return flat

    def _capture_for(self, inputs: Sequence[Any]) -> Capture:
        key = self._guarded_key(inputs) if self._guarded else self._key_of(inputs)
        capture = self.captures.get(key)
        if capture is not None:
            if len(self.captures) > 1:
                self.captures.move_to_end(key)
            return capture
        if self.instead is not None:
            raise _TakenOver
        if key in self.eager_keys:
            raise RunEagerly(self.eager_keys[key])
        tensors = [value for value in inputs if isinstance(value, torch.Tensor)] if key in self._shared_once else []
        if shares_memory(tensors, range(len(tensors))):
            raise _WritesShared
        if self.captures:
            self._refuse_new_signature(inputs)
        try:
            capture = self._new_capture(inputs)
        except _WritesShared:
            self._shared_once.add(key)
            raise
        except RunEagerly as error:
            self.eager_keys[key] = str(error)
            raise
        self.captures[key] = capture
        self._keep_few()
        return capture

    def _keep_few(self) -> None:
        """Give up captures past ``max_captures``: those whose parameters are gone first, then the least recently used.

        The count is per set of parameters: ``torch.compile`` uses one graph for all instances of a module's class, each
        of which is a callable of its own.
        """
        while True:
            stale = [key for key, capture in self.captures.items() if not capture.lives()]
            sets = {capture.addresses for key, capture in self.captures.items() if key not in stale}
            if len(self.captures) <= self.options.max_captures * max(1, len(sets)):
                return
            key = stale[0] if stale else next(iter(self.captures))
            self.captures.pop(key).release()
            self.pools.trim()

    def _key_of(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        if self._guarded:
            return self._guarded_key(inputs)
        if not all(isinstance(value, (torch.Tensor, int, float, bool, complex)) for value in inputs):
            raise RunEagerly("its inputs come in lists (compiled autograd)")
        return key_of(self.specs, inputs, self.autocasts)

    def _refuse_new_signature(self, inputs: Sequence[Any]) -> None:
        """What ``on_new_signature`` says about a second capture of one trace (parameters moved, say)."""
        if self.options.on_new_signature == "eager":
            raise RunEagerly("a signature that no sample had")
        if self.options.on_new_signature == "error":
            known = self._key_of(inputs)
            nearest = max(self.captures, key=lambda key: sum(a == b for a, b in zip(key, known, strict=True)))
            names = key_names(self.specs, self.autocasts, self._guarded)
            changed = [name for name, a, b in zip(names, nearest, known, strict=True) if a != b]
            raise SignatureError(
                "new-signature",
                f"{self.name} was called in a way for which nothing is captured",
                observed="another address, size, stride, dtype or mode of " + ", ".join(changed),
                expected="the memory and shapes of a sample",
                hint="graph it again, or use on_new_signature='capture' or 'eager'",
            )

    def _slot_for(self, capture: Capture, tensors: tuple[torch.Tensor, ...], where: tuple[int, ...] | None) -> Slot:
        """Where none is free: one made free, or a new one."""
        if capture.failures > 1:
            raise RunEagerly("captures of it fail")
        try:
            with self._stage("capturing"):
                slot = capture.acquire(tensors, where)
        except CaptureError as error:
            self.pools.trim()
            if isinstance(error.__cause__, torch.OutOfMemoryError):
                raise RunEagerly("no memory for a capture") from error
            if self._give_up_kernels(error, capture):
                raise _OnAten from error
            eager_can = engines.blamed(error.__cause__) is None or self._own_failure(capture, list(tensors)) is None
            if eager_can and (reason := self._set_aside(error, capture)) is not None:
                raise (RunEagerly(reason) if self.instead is None else _TakenOver()) from error
            capture.failures += 1
            raise RunEagerly(_FAILED + error.observed) from error
        if slot is None:
            raise RunEagerly(f"more than max_in_flight={capture.max_in_flight} forwards wait for their backward")
        return slot

    def _refuse_shared_writes(self, capture: Capture, tensors: Sequence[torch.Tensor]) -> None:
        written = capture.plan.written
        if not written:
            return
        if not self._guarded:
            shared = shares_memory(tensors, written)
        else:
            if capture.written is None:
                capture.written = WrittenMemory(capture.plan.inputs, written, tensors)
            shared = capture.written.shared(tensors)
        if shared:
            raise _WritesShared

    def _new_capture(self, inputs: Sequence[Any]) -> Capture:
        tensors = tuple(value for value in inputs if isinstance(value, torch.Tensor))
        specs = tuple(spec for spec, value in zip(self.specs, inputs, strict=True) if isinstance(value, torch.Tensor))
        if not tensors:
            raise RunEagerly("it has no tensor input")
        for spec, value in zip(specs, tensors, strict=True):
            if torch._debug_has_internal_overlap(compact(value)) == 1:
                raise RunEagerly(f"{spec} overlaps itself in memory")
        if not torch.is_grad_enabled() and trace.switches_grad_on(self.graph):
            raise RunEagerly("it switches grad mode on inside, where it is off outside")
        _refuse_inference_tensors(tensors)
        if any(map(is_fake, tensors)):
            raise RunEagerly("its inputs are fake tensors")
        graph = trace.specialise(self.graph, inputs)
        planned, regions = self._plan(graph, specs, tensors)
        if len(planned.inputs) < len(tensors):  # AOTAutograd has made one of those that share memory
            raise _WritesShared
        if planned.mutated and trace.has_checkpoint(graph):
            raise RunEagerly("a checkpoint's part, which eager runs twice, may write a buffer")
        device = tensors[0].device  # there is but one: the rules have been judged
        engine = engines.get(engines.name_for(self.options.engine, [device]))
        pool = self.pools.get(engine, device)
        capture = Capture(
            graph,
            planned,
            regions,
            engine,
            device,
            tensors,
            pool,
            self.options.num_warmup_iters,
            self.options.max_in_flight,
        )
        if self._static is not None and not set(self._static[0]) & set(planned.written):
            capture.places.read_always(*self._static)
        if self.options.grads == "in_graph" and (positions := accumulate.parameters_in_graph(planned, tensors)):
            capture.accumulator = accumulate.Accumulator(planned, positions, tensors, engine, pool)
            asking.look_at_backwards()
        return capture

    def _plan(
        self, graph: fx.GraphModule, specs: tuple[trace.InputSpec, ...], tensors: tuple[torch.Tensor, ...]
    ) -> tuple[plan.Plan, compiling.Regions]:
        """The plan for these inputs, and what is to be captured of it."""
        reason = self._aten_only
        if self.options.kernels == "inductor" and reason is None:
            try:
                planned = self._shared_plan(graph, specs, tensors, for_inductor=True)
                return planned, compiling.compiled(planned, tensors)
            except (compiling.CannotCompile, effects.CannotPlan, TraceError) as error:
                reason = error.observed if isinstance(error, TraceError) else str(error)
        try:
            planned = self._shared_plan(graph, specs, tensors, for_inductor=False)
        except TraceError as error:
            raise RunEagerly(f"[{error.id}] {error.observed}") from error
        except effects.CannotPlan as error:
            raise RunEagerly(str(error)) from error
        if reason is not None:
            self._say_kernels(reason)
        return planned, compiling.as_they_are(planned)

    def _say_kernels(self, reason: str) -> None:
        if reason not in self._without_inductor:
            self._without_inductor.add(reason)
            text = f"{self.name} runs with aten kernels, not with inductor's: {reason}"
            fallback.warn(text, fallback.KernelFallbackWarning)

    def _shared_plan(
        self,
        graph: fx.GraphModule,
        specs: tuple[trace.InputSpec, ...],
        tensors: tuple[torch.Tensor, ...],
        for_inductor: bool,
    ) -> plan.Plan:
        plans = self.pools.plans
        key = sharing.key_of(graph, specs, tensors, for_inductor) if plans is not None else None
        if plans is not None and (known := plans.find(key)) is not None:
            return known
        self._refuse(trace.check_torch_level(graph))  # first: what depends on data has no joint graph
        joint = trace.export(graph, specs, tensors, for_inductor=for_inductor)
        self._refuse_in(joint)
        planned = plan.make(joint)
        if plans is not None:
            plans.keep(key, planned)
        return planned

    def _refuse_in(self, joint: trace.JointGraph) -> None:
        """Refuse what only the joint graph shows: ops inside of a torch-level op, constants that cannot be moved.

        Where each belongs to an op of the graph, those are set aside; see Note [An op that fails to be captured].

        Raises:
            CannotCompile: for a graph of inductor's ops, which do not lead back to the user's: aten's are judged next.
        """
        report = passes.check(joint.gm)
        if joint.for_inductor and not report.ok:
            raise compiling.CannotCompile(_reason(report.violations[0]))
        if not report.ok and self._around is not None and self.instead is None:
            nodes = {node.name: node for node in joint.gm.graph.nodes}
            origins: dict[str, str] = {}
            for violation in report.violations:
                node = nodes.get(violation.where.node or "")
                name = trace.origin(joint, node) if node is not None else None
                if name is None:
                    break
                origins.setdefault(name, _reason(violation))
            else:
                self.instead = self._around(origins)
            if self.instead is not None:
                raise _TakenOver
        self._refuse(report)

    def _refuse(self, report: passes.Report) -> None:
        if report.ok:
            return
        if self.options.on_uncapturable == "error":
            raise UncapturableError.from_report(report)
        raise RunEagerly(_reason(report.violations[0]))

    @contextlib.contextmanager
    def _stage(self, stage: str) -> Iterator[None]:
        try:
            yield
        except FxgraphError:
            raise
        except Exception as error:
            raise CaptureError(
                "capture-failed",
                f"{self.name}: an error while {stage}",
                observed=f"{type(error).__name__}: {trace.first_line(error)}",
                hint="the cause is attached; the callable itself still works",
                instead="nothing is left capturing, and the memory has been given back",
            ) from error

    def say_eager(self, reason: str, calls: int = 1) -> None:
        """See :class:`fxgraph.replay.Runner`."""
        if reason not in self.eager_reasons:
            fallback.warn(f"{self.name} runs eagerly: {reason}")
        self.eager_reasons[reason] += calls
