"""Gradients that the captured backward itself writes into ``.grad``: ``grads="in_graph"``.

Note [Gradients in the graph]

With ``grads="autograd"`` each parameter is an input of the autograd node, and the engine runs an ``AccumulateGrad`` for
each: about ten microseconds a piece, however small the parameter. With ``grads="in_graph"`` a call's parameters are no
inputs of its node. The backward region ends with what ``AccumulateGrad`` does: it writes each gradient into a *static
gradient*, or adds to it where ``.grad`` is there already, and the replay sets ``.grad`` where it was None.

* A parameter has one static gradient, whichever slots, captures and callables accumulate into it. While somebody else
  holds its memory (``kept = p.grad; p.grad = None``) it is not written: it is left to its holder, and a new one
  is made.
* Which parameters have a ``.grad`` is the *pattern* of a backward. A slot has a region per pattern, captured when the
  slot is next taken; a backward without one adds by hand, with one launch for all. So it does where a ``.grad`` is not
  the static one (the user's own, another one's, one that was given other memory).
* What ``AccumulateGrad`` gives, is given: written where ``.grad`` is None, ``grad + new`` in place where it is not, in
  the parameter's layout, out of place with history under ``create_graph=True``, nothing where no gradient flows or the
  parameter does not ask for one any more.
* A parameter that is used outside of the callable too, in the same backward, has an ``AccumulateGrad`` that will run,
  on a stream of its own. It is given our gradient as well.
* Regions of inductor's kernels do not accumulate: what they give is added by hand.
* Hooks are ``AccumulateGrad``'s. A call whose parameters have hooks at its forward goes the ordinary way, and so does
  one whose parameters are held by more than one graph (DistributedDataParallel hooks in C++, where nobody sees it); a
  hook that comes between a forward and its backward is refused.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
import weakref
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import fx
from torch.utils.dlpack import from_dlpack

from passes.facts import output_args

from ._torch_compat.autograd import accumulated_elsewhere, foreach_add_, hooked, kernels_only, untouched
from ._torch_compat.storage import addresses, use_counts
from .engines import Engine, Pool
from .engines.base import copy_all, copy_laid_out
from .errors import ReplayError
from .plan import Plan, picker
from .trace import InputKind

Pattern = tuple[bool, ...]
"""Which of the parameters have a ``.grad`` already."""

CHUNK_TENSORS, CHUNK_BYTES = 64, 32 * 2**20
"""How many gradients, of how much memory, a region keeps before it accumulates them in one launch."""


class StaticGradient:
    """The memory of one parameter's ``.grad``.

    Attributes:
        base: what is handed out are aliases of it.
        storage, baseline: of the base, and its use count while nothing is handed out.
        memory: for regions, and for writing by hand. It has a storage of its own over the same bytes, so that the use
            count of the base's storage tells whether a user holds them, however many regions there are.
        handed: what was last set as ``.grad``.
        renewals: how often one of them has got other memory.
    """

    __slots__ = ("__weakref__", "base", "baseline", "handed", "memory", "storage")

    renewals: ClassVar[int] = 0

    def __init__(self, engine: Engine, pool: Pool, parameter: torch.Tensor) -> None:
        self.renew(engine, pool, parameter)

    def renew(self, engine: Engine, pool: Pool, parameter: torch.Tensor) -> None:
        """Leave the memory to whoever holds it, and go on with other memory."""
        with kernels_only():
            like = parameter.detach()
            if like.stride() != _gradient_strides(like):
                like = like.contiguous()
            self.base = engine.empty(pool, like)
            self.memory = from_dlpack(self.base.detach())
        self.handed: torch.Tensor | None = None
        self.storage = self.base.untyped_storage()
        (self.baseline,) = use_counts([self.storage._cdata])
        StaticGradient.renewals += 1

    @property
    def moved(self) -> bool:
        """Whether somebody has given it other memory (``p.grad.share_memory_()``): what was its own is freed."""
        return self.storage.data_ptr() != self.memory.untyped_storage().data_ptr()

    def fits(self, parameter: torch.Tensor) -> bool:
        """Whether the parameter's gradient would look like this."""
        own = self.base
        return (own.dtype, own.device, own.size()) == (
            parameter.dtype,
            parameter.device,
            parameter.size(),
        ) and own.stride() == _gradient_strides(parameter)


def _gradient_strides(parameter: torch.Tensor) -> tuple[int, ...]:
    """The layout that torch promises for gradients: the parameter's where that leaves no gaps, else contiguous."""
    dense = torch.empty_like(parameter, device="meta").stride()
    return dense if dense == parameter.stride() else torch.empty(parameter.size(), device="meta").stride()


_LAST: dict[torch.device, object] = {}
"""By what static gradients were last written (:meth:`Engine.after`): all of a device's come after each other."""

_KNOWN: weakref.WeakValueDictionary[int, StaticGradient] = weakref.WeakValueDictionary()
"""Of each parameter, by its ``id``, the static gradient, which lives as long as a capture writes it.

No weak references to the parameters, for these could not be swapped then (``torch.utils.swap_tensors``). So a tensor
that comes to have the ``id`` of a parameter that is gone takes over its static gradient, which nobody else needs.
"""


def _static_gradient(engine: Engine, pool: Pool, parameter: torch.Tensor) -> StaticGradient:
    static = _KNOWN.get(id(parameter))
    if static is None or not static.fits(parameter):
        static = _KNOWN[id(parameter)] = StaticGradient(engine, pool, parameter)
    return static


def is_accumulated(tensor: torch.Tensor) -> bool:
    """Whether some capture writes this tensor's ``.grad``, or has written that of one with this ``id``."""
    return id(tensor) in _KNOWN


@dataclasses.dataclass(frozen=True)
class _Places:
    """Where static gradients lie, in lists that are quick to compare."""

    renewals: int
    memory: list[torch.Tensor]
    alive: list[torch.UntypedStorage]
    addresses: list[int]
    strides: list[tuple[int, ...]]
    storages: list[int]
    baselines: list[int]

    @classmethod
    def of(cls, statics: Sequence[StaticGradient]) -> _Places:
        return cls(
            StaticGradient.renewals,
            [static.memory for static in statics],
            [static.storage for static in statics],
            [static.base.data_ptr() for static in statics],
            [static.base.stride() for static in statics],
            [static.storage._cdata for static in statics],
            [static.baseline for static in statics],
        )

    def moved(self) -> bool:
        """Whether somebody has given one of them other memory."""
        return addresses(self.alive) != self.addresses


class Accumulator:
    """The parameters whose gradients a capture's backward accumulates, and where.

    Attributes:
        positions: which of ``plan.gradient_of`` they are.
        others: the rest of these.
        parameters: takes them from the inputs of a call.
        other_inputs: takes the inputs that the rest belongs to.
    """

    def __init__(
        self, plan: Plan, positions: Sequence[int], inputs: Sequence[torch.Tensor], engine: Engine, pool: Pool
    ) -> None:
        self.plan, self._engine, self._pool = plan, engine, pool
        self.positions = tuple(positions)
        self.others = tuple(k for k in range(len(plan.gradient_of)) if k not in set(positions))
        self.parameters = picker([plan.gradient_of[k] for k in positions])
        self.other_inputs = picker([plan.gradient_of[k] for k in self.others])
        parameters = self.parameters(inputs)
        self._ids = list(map(id, parameters))
        self.statics = [_static_gradient(engine, pool, parameter) for parameter in parameters]
        self._known_places: _Places | None = None
        self._device = parameters[0].device
        with kernels_only():
            self._anchor = torch.empty(0, device=self._device)

    @property
    def nothing_there(self) -> Pattern:
        """The pattern of the first backward after ``zero_grad()``."""
        return (False,) * len(self.positions)

    def new_anchor(self) -> torch.Tensor:
        """See Note [Asking for the gradients of parameters] in ``asking.py``.

        Each call has its own. For the engine makes the caller's stream wait for those on which leaves are come to, and
        the node of a leaf belongs to the stream on which it was made: here the forward's.
        """
        return self._anchor.detach().requires_grad_()

    def belongs_to(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether it is for these very tensors, or such as have taken their place: others can lie at the same
        addresses."""
        return list(map(id, parameters)) == self._ids

    def again(self, inputs: Sequence[torch.Tensor]) -> Accumulator:
        """The same for other tensors at the same addresses."""
        return Accumulator(self.plan, self.positions, inputs, self._engine, self._pool)

    @property
    def memory(self) -> list[torch.Tensor]:
        """Of the static gradients: the same list as long as they are the same."""
        return self._places().memory

    def _places(self) -> _Places:
        known = self._known_places
        if known is None or known.renewals != StaticGradient.renewals or known.moved():
            for static in self.statics:
                if static.moved:
                    static.renew(self._engine, self._pool, static.base)
            known = self._known_places = _Places.of(self.statics)
        return known

    def pattern(self, parameters: Sequence[torch.Tensor]) -> Pattern | None:
        """Which of them have a static gradient as ``.grad``, where the others' may be written.

        None where a region cannot do what is to be done.

        Raises:
            ReplayError: ``hook-after-forward``.
        """
        if not untouched(parameters):
            refuse_hooks(parameters)
            if accumulated_elsewhere(parameters):
                return None
        if not all([parameter.requires_grad and parameter.is_leaf for parameter in parameters]):  # noqa: C419  # quicker
            return None
        places = self._places()
        grads = [parameter.grad for parameter in parameters]
        there = tuple([grad is not None for grad in grads])
        if not any(there):
            missing: Sequence[int] = range(len(there))
        elif self._are_ours(places, grads, there):
            missing = [k for k, is_there in enumerate(there) if not is_there]
        else:
            return None
        if not self._may_write(places, missing, parameters):
            return None
        self._in_order()
        return there

    def _are_ours(self, places: _Places, grads: Sequence[torch.Tensor | None], there: Pattern) -> bool:
        """Whether those that are there are what was handed out, where it was."""
        ours = [grad for grad in grads if grad is not None]
        return (
            all(map(operator.is_, ours, [static.handed for static in itertools.compress(self.statics, there)]))
            and [grad.data_ptr() for grad in ours] == list(itertools.compress(places.addresses, there))
            and [grad.stride() for grad in ours] == list(itertools.compress(places.strides, there))
        )

    def _in_order(self) -> None:
        """What comes next in the current stream comes after what static gradients were last written by."""
        _LAST[self._device] = self._engine.after(self._device, _LAST.get(self._device))

    def _may_write(self, places: _Places, missing: Sequence[int], parameters: Sequence[torch.Tensor]) -> bool:
        """Whether nobody holds these static gradients; those that somebody holds are new ones afterwards."""
        for k in missing:
            self.statics[k].handed = None
        storages, baselines = places.storages, places.baselines
        if len(missing) < len(storages):
            storages, baselines = [storages[k] for k in missing], [baselines[k] for k in missing]
        counts = use_counts(storages)
        if counts == baselines:
            return True
        for k, count, baseline in zip(missing, counts, baselines, strict=True):
            if count != baseline:
                self.statics[k].renew(self._engine, self._pool, parameters[k])
        return False

    def hand_out(self, parameters: Sequence[torch.Tensor], there: Pattern) -> None:
        """After a region has run: set the gradients that it has written, count a version of those it has added to."""
        grown: list[torch.Tensor] = []
        for parameter, static, is_there in zip(parameters, self.statics, there, strict=True):
            if is_there and parameter.grad is not None:
                grown.append(parameter.grad)
            else:
                parameter.grad = static.handed = static.base.data  # its versions count from 0, as a new gradient's do
        if grown:
            torch.autograd.graph.increment_version(grown)

    def add(self, parameters: Sequence[torch.Tensor], values: Sequence[torch.Tensor | None]) -> None:
        """What ``AccumulateGrad`` does with these gradients, by hand.

        Args:
            parameters: in the order of ``positions``.
            values: in the order of ``plan.gradient_of``; None where there is nothing to add.
        Raises:
            ReplayError: ``hook-after-forward``.
        """
        refuse_hooks(parameters)
        self._in_order()
        handed_over: list[tuple[torch.Tensor, torch.Tensor]] = []
        elsewhere = {id(parameter) for parameter in accumulated_elsewhere(parameters)}
        written: list[tuple[int, torch.Tensor]] = []
        grown: list[tuple[torch.Tensor, torch.Tensor]] = []
        for k, (parameter, position) in enumerate(zip(parameters, self.positions, strict=True)):
            value = values[position]
            if value is None or not parameter.requires_grad:
                continue
            if not parameter.is_leaf:
                raise RuntimeError("leaf variable has been moved into the graph interior")  # as autograd has it
            if id(parameter) in elsewhere:
                handed_over.append((parameter, value))
                continue
            grad = parameter.grad
            if torch.is_grad_enabled():
                own = self.statics[k].base.stride()
                parameter.grad = copy_laid_out(value, own) if grad is None else _sum(grad, value)
            elif grad is None:
                written.append((k, value))
            elif grad.layout is not torch.strided:
                parameter.grad = _sum(grad, value)
            else:
                grown.append((grad, value))
            del grad
        self._may_write(self._places(), [k for k, _ in written], parameters)
        copy_all([self.statics[k].memory for k, _ in written], [value for _, value in written])
        foreach_add_([grad for grad, _ in grown], [value for _, value in grown])
        for k, _ in written:
            parameters[k].grad = self.statics[k].handed = self.statics[k].base.data
        if handed_over:  # a backward inside of the backward
            leaves, gradients = zip(*handed_over, strict=True)
            torch.autograd.backward(leaves, gradients, create_graph=torch.is_grad_enabled())


def _sum(grad: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return grad + value if grad.layout is torch.strided else value + grad


class Request:
    """What a backward was asked for of a call's parameters; see ``asking.py``.

    Attributes:
        wanted: which of ``plan.gradient_of``.
        accumulates: into ``.grad``, or else to be given back.
        found: the gradients that are to be given back, in the order of ``plan.gradient_of``.
    """

    def __init__(self, wanted: Sequence[int], accumulates: bool) -> None:
        self.wanted, self.accumulates = wanted, accumulates
        self.found: Sequence[torch.Tensor | None] = ()


def refuse_hooks(parameters: Sequence[torch.Tensor]) -> None:
    """Raise where a parameter has got hooks after the forward.

    Raises:
        ReplayError: ``hook-after-forward``.
    """
    if not hooked(parameters):
        return
    raise ReplayError(
        "hook-after-forward",
        "a parameter has got a hook between a forward and its backward, with grads='in_graph'",
        where=", ".join(f"a parameter of shape {tuple(p.shape)}" for p in parameters if hooked([p])),
        observed="a hook of the parameter, or of the node that accumulates its gradient, new since the forward",
        expected="hooks that are registered before the forward, which then goes the ordinary way",
        hint="register the hook earlier, or use grads='autograd'",
    )


def accumulating_graph(backward: fx.GraphModule, accumulator: Accumulator, there: Pattern) -> fx.GraphModule:
    """The backward with the accumulation in it; it takes the static gradients after its other inputs.

    Its outputs are the gradients of ``accumulator.others``. Gradients are accumulated several at once, and soon: what a
    region keeps until its end is memory. A product of matrices that is to be written is computed where it is to be.
    """
    graph = fx.Graph()
    copied: dict[fx.Node, fx.Node] = {}
    graph.graph_copy(backward.graph, copied)
    values = [copied[node] if isinstance(node, fx.Node) else node for node in output_args(backward)]
    graph.output(tuple(values[k] for k in accumulator.others))
    *_, last_input = graph.find_nodes(op="placeholder")
    targets: dict[fx.Node, tuple[fx.Node, bool]] = {}  # each gradient is a value of its own
    for k, static, is_there in zip(accumulator.positions, accumulator.statics, there, strict=True):
        with graph.inserting_after(last_input):
            last_input = graph.placeholder(f"static_gradient_{k}")
        last_input.meta["val"] = values[k].meta["val"].new_empty_strided(static.memory.size(), static.base.stride())
        if is_there or not _compute_in(values[k], last_input):
            targets[values[k]] = (last_input, is_there)
    waiting: dict[tuple[Any, ...], list[tuple[fx.Node, fx.Node]]] = {}

    def accumulate(key: tuple[Any, ...]) -> None:
        pairs = waiting.pop(key)
        op = torch.ops.aten._foreach_add_.List if key[0] else torch.ops.aten._foreach_copy_.default
        graph.call_function(op, ([target for target, _ in pairs], [value for _, value in pairs]))

    for node in list(graph.nodes):
        if node in targets:
            target, is_there = targets[node]
            value = node.meta["val"]
            # One launch takes tensors of one type, each pair of one layout.
            key = (is_there, value.dtype, value.stride() == target.meta["val"].stride())
            group = waiting.setdefault(key, [])
            group.append((target, node))
            if len(group) >= CHUNK_TENSORS or sum(v.meta["val"].nbytes for _, v in group) >= CHUNK_BYTES:
                with graph.inserting_after(node):
                    accumulate(key)
    with graph.inserting_before(graph.output_node()):
        for key in list(waiting):
            accumulate(key)
    return fx.GraphModule(backward, graph)


def _compute_in(value: fx.Node, target: fx.Node) -> bool:
    """Have a product of matrices of which a gradient is but a view computed in the gradient's memory, if it is one."""
    views, product = [], value
    while product.target in _VIEWS and len(product.users) <= 1:
        views.append(product)
        product = product.all_input_nodes[0]
    if product.target is not torch.ops.aten.mm.default or len(product.users) > 1:
        return False
    whole, own, given = product.meta["val"], value.meta["val"], target.meta["val"]
    if not (whole.is_contiguous() and own.stride() == given.stride() and whole.dtype == given.dtype):
        return False
    graph = product.graph
    with graph.inserting_before(product):
        place = graph.call_function(
            torch.ops.aten.as_strided.default, (target, list(whole.size()), list(whole.stride()), 0)
        )
        place.meta["val"] = whole
        graph.call_function(torch.ops.aten.mm.out, product.args, {"out": place})
    for node in (*views, product):
        graph.erase_node(node)
    return True


_VIEWS = {torch.ops.aten.t.default, torch.ops.aten.transpose.int, torch.ops.aten.permute.default}


def parameters_in_graph(plan: Plan, inputs: Sequence[torch.Tensor]) -> list[int]:
    """Which of ``plan.gradient_of`` a region can accumulate: those of leaves, with gradients that look like them."""
    if plan.backward is None:
        return []
    found = []
    for k, (i, node) in enumerate(zip(plan.gradient_of, output_args(plan.backward), strict=True)):
        parameter, gradient = inputs[i], node.meta["val"]
        if (
            plan.inputs[i].kind is InputKind.PARAMETER
            and parameter.is_leaf
            and gradient.layout == parameter.layout == torch.strided
            and (gradient.dtype, gradient.size()) == (parameter.dtype, parameter.size())
            and parameter.grad_dtype == parameter.dtype
            and sum(tensor is parameter for tensor in inputs) == 1
        ):
            found.append(k)
    return found
