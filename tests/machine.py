"""A graphed module, its eager twin, and the steps that a user may take with both.

A course is a blueprint, a setup and a list of steps, all of them data (``strategies.py``): it can be printed, run again
with :func:`replay` and shortened with :func:`shorten`. After each step everything that can be seen of the two sides
must be the same: what the step gives or raises, outputs and gradients that are kept, parameters, buffers, ``.grad`` and
its absence, what hooks have seen, flags, and the state of the random generators.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from strategies import WIDTH, Blueprint, Setup
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint
from twins import assert_same, rng_state, set_rng_state, state_of

import fxgraph
from fxgraph import places

Step = tuple[Any, ...]

# Bit by bit, but for values with three or more gradients of which some come from outside of the graphed module's node
# (the loss's own, a view's, another call's): eager's engine adds each as it comes, the node adds its own ones first.
EXACT_FORMS = {"one", "sum", "whole numbers", "nothing to learn", "detached"}
SEVERAL_CALLS = {"chain", "backward_of_two", "second_order"}

# Why a call may run eagerly; any other reason is a difference.
MAY_RUN_EAGERLY = ("max_in_flight", "overlaps itself in memory", "shares memory with another input")


class Difference(AssertionError):
    """The two sides are not the same; the text ends with a program that shows it."""


class Boom(Exception):
    """Raised in the middle of something."""


class Call:
    """What a user has of a call whose backward may come."""

    def __init__(self, x: torch.Tensor, given: torch.Tensor, out: Any) -> None:
        self.x, self.given, self.out = x, given, out
        self.changed = False  # an output has been changed in place
        self.hooked = False  # an output has a hook
        self.rounded = False  # it ran in bfloat16
        self._only: torch.Tensor | None = None

    def loss(self, which: int = 0) -> torch.Tensor | None:
        """A number that depends on all outputs, or (from 1 on) on one of them; None if none requires grad."""
        if self._only is not None:
            return self._only
        parts = [t.square().mean() * (i + 1) for i, t in enumerate(self._leaves())]
        if not parts:
            return None
        return sum(parts[1:], parts[0]) if which == 0 else parts[which % len(parts)]

    def keep_only_a_loss(self) -> None:
        """Let go of the outputs. The loss that remains does not need them for its backward."""
        leaves = self._leaves()
        parts = [(t * torch.arange(1.0, t.numel() + 1, device=t.device).view(t.shape)).sum() for t in leaves]
        if parts:
            self._only = sum(parts[1:], parts[0])
        self.out = None

    def _leaves(self) -> list[torch.Tensor]:
        return [t for t in pytree.tree_leaves(self.out) if isinstance(t, torch.Tensor) and t.requires_grad]


NOTHING = object()
"""What a step gives that finds nothing to do."""


class Side:
    """One of the two: a module and what its user holds. Each public method is a step."""

    def __init__(self, module: nn.Module, blueprint: Blueprint, setup: Setup, device: str) -> None:
        self.module, self.blueprint, self.setup, self.device = module, blueprint, setup, device
        self.calls: list[Call] = []
        self.spent: Call | None = None
        self.kept: list[Any] = []
        self.kept_gradients: list[Any] = []
        self.retired: list[nn.Module] = []
        self.log: dict[str, list[Any]] = {}
        self.handles: list[Any] = []
        self.updating = False  # a hook changes parameters
        self.leaks = False  # a backward with a full backward hook in it has failed: torch's hook keeps its graph
        self.involved: list[Call] = []
        self._last: dict[tuple[Any, ...], torch.Tensor] = {}
        self._new_optimizer()

    # What the steps are made of.

    def _new_optimizer(self) -> None:
        kind, _, foreach = self.setup.optimizer.partition(" ")
        more = {"momentum": 0.9} if kind == "SGD" else {}
        parameters = [*self.module.parameters(), torch.zeros(1, device=self.device)]  # some modules have none
        self.optimizer = getattr(torch.optim, kind)(parameters, lr=0.01, foreach=bool(foreach), **more)

    @property
    def _dtype(self) -> torch.dtype:
        return next((p.dtype for p in self.module.parameters()), torch.float32)

    def _input(self, rows: int, layout: str, autograd: str) -> tuple[torch.Tensor, torch.Tensor]:
        """A leaf, and the input made from it."""
        key = (rows, self._dtype)
        last = self._last.get(key)
        x = self.blueprint.sample(rows, self.device).to(self._dtype)
        if layout == "the last one's" and last is not None:
            x = last
        elif layout == "transposed":
            x = x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x.t().contiguous().t()
        elif layout == "sliced":
            # The rounding of some kernels (MKL, cuBLAS) depends on how memory is aligned. A static buffer is aligned,
            # so the rows here are too.
            if rows > 2:
                base = x.new_ones((*x.shape[:-1], 32))
                base[..., 16 : 16 + x.shape[-1]] = x
                x = base[1:, ..., 16 : 16 + x.shape[-1]]
        elif layout == "expanded":
            x = x[:1].expand(x.shape)
        self._last = {key: x.detach()}
        x = x.detach()
        if autograd != "none":
            x.requires_grad_()
        return x, x * 1.5 if autograd == "with history" else x

    def _run(self, given: torch.Tensor, context: str) -> Any:
        # In bfloat16 the order of a sum shows: only where there is no sum of several gradients.
        if context == "autocast" and self.blueprint.form in EXACT_FORMS:
            with torch.autocast(self.device, torch.bfloat16):
                return self.module(given)
        # A checkpoint's second forward ends as soon as it has what it wants: eager may leave out an update of a buffer.
        if context == "checkpoint" and next(self.module.buffers(), None) is None:
            return checkpoint(self.module, given, use_reentrant=False)
        return self.module(given)

    def _call(self, which: int) -> Call | None:
        if not self.calls:
            return None
        call = self.calls[which % len(self.calls)]
        self.involved.append(call)
        return call

    def _forget_call(self, call: Call) -> None:
        if call in self.calls:
            self.calls.remove(call)

    def _parameters(self, which: int) -> list[tuple[str, nn.Parameter]]:
        every = list(self.module.named_parameters())
        return every if which < 0 or not every else [every[which % len(every)]]

    def _owner(self, name: str) -> tuple[nn.Module, str]:
        path, _, last = name.rpartition(".")
        return self.module.get_submodule(path), last

    def _logs(self, what: str) -> Callable[..., None]:
        def note(*values: Any) -> None:
            tensors = [v for v in pytree.tree_leaves(values) if isinstance(v, torch.Tensor)]
            self.log.setdefault(what, []).append([t.detach().clone() for t in tensors])

        return note

    def recover(self, kept: int) -> None:
        """After an exception, one side's at least: its calls are dropped, the gradients that it may have given in part,
        and what it has kept beyond the first so many, which the other side may not have come to."""
        del self.kept[kept:]
        self.leaks |= bool(self.module._backward_hooks)
        for call in self.involved:
            self._forget_call(call)
        self.spent = None
        self.kept_gradients.clear()
        self.log.clear()
        self.module.zero_grad(set_to_none=True)
        for module in self.retired:
            module.zero_grad(set_to_none=True)

    # Calls and backwards.

    def call(self, rows: int, layout: str, autograd: str, context: str) -> Any:
        x, given = self._input(rows, layout, autograd)
        # A checkpoint runs its forward again in the backward, on whatever the module has become by then: not here.
        call = Call(x, given, self._run(given, "plain" if context == "checkpoint" else context))
        call.rounded = context == "autocast"
        self.calls = [*self.calls[-3:], call]
        return look(call.out)

    def call_for_a_loss(self, rows: int, layout: str, autograd: str, context: str) -> Any:
        seen = self.call(rows, layout, autograd, context)
        self.calls[-1].keep_only_a_loss()
        return seen

    def train(self, rows: int, layout: str, autograd: str, context: str) -> Any:
        x, given = self._input(rows, layout, autograd)
        call = Call(x, given, self._run(given, context))
        loss = call.loss()
        if loss is not None:
            loss.backward()
        return look(call.out), x.grad

    def in_flight(self, rows: int, layout: str, autograd: str, context: str, order: tuple[int, ...]) -> Any:
        """Several forwards of which only the losses are kept, then their backwards in any order."""
        calls = []
        for _ in order:
            x, given = self._input(rows, layout, autograd)
            calls.append(Call(x, given, self._run(given, context)))
            calls[-1].keep_only_a_loss()
        for which in order:
            loss = calls[which].loss()
            if loss is not None:
                loss.backward()
        return [call.x.grad for call in calls]

    def chain(self, rows: int, layout: str, autograd: str, context: str) -> Any:
        x, given = self._input(rows, layout, autograd)
        context = "plain" if context == "autocast" else context
        first = self._run(given, context)
        again = next((t for t in pytree.tree_leaves(first) if isinstance(t, torch.Tensor) and t.shape == x.shape), None)
        if again is None or not again.is_floating_point():
            return NOTHING
        call = Call(x, given, [first, self._run(again.to(x.dtype), context)])
        loss = call.loss()
        if loss is not None:
            loss.backward()
        return look(call.out), x.grad

    def backward(self, which: int, part: int, retain: bool) -> Any:
        call = self._call(which)
        loss = call.loss(part) if call is not None else None
        if call is None or loss is None:
            return NOTHING
        loss.backward(retain_graph=retain)
        if not retain:
            self._forget_call(call)
            self.spent = call if part == 0 else None
        return call.x.grad

    def backward_again(self) -> Any:
        call, self.spent = self.spent, None
        if call is None:
            return NOTHING
        call.loss().backward()
        return call.x.grad

    def backward_of_two(self, first: int, second: int) -> Any:
        calls = [self._call(first), self._call(second)]
        losses = [call.loss() for call in calls if call is not None and not call.rounded]
        losses = [loss for loss in losses if loss is not None]
        if len(losses) < 2 or calls[0] is calls[1]:
            return NOTHING
        sum(losses).backward()
        for call in calls:
            self._forget_call(call)
        return [call.x.grad for call in calls]

    def gradients(self, which: int, parameter: int, keep: bool) -> Any:
        call = self._call(which)
        loss = call.loss(which) if call is not None else None
        only_x = parameter < -1
        wanted = [] if only_x else [p for _, p in self._parameters(parameter) if p.requires_grad]
        if call is not None and call.x.requires_grad and (only_x or which % 2):
            wanted.append(call.x)
        if loss is None or not wanted:
            return NOTHING
        if self.device == "cuda" and call is not None and call.rounded:
            return NOTHING  # eager computes only what was asked for, by other kernels, in bfloat16
        found = torch.autograd.grad(loss, wanted, retain_graph=True, allow_unused=True)
        if keep:
            self.kept.append(found)
        return found

    def second_order(self, which: int) -> Any:
        call = self._call(which)
        loss = call.loss() if call is not None else None
        wanted = [p for _, p in self._parameters(-1) if p.requires_grad]
        if call is not None and call.x.requires_grad:
            wanted.append(call.x)
        # Eager's hooks on an output also see what comes back through results that ops inside have saved.
        if call is None or call.rounded or call.hooked or loss is None or not wanted:
            return NOTHING
        self._forget_call(call)
        first = torch.autograd.grad(loss, wanted, create_graph=True, allow_unused=True)
        squares = [g.square().sum() for g in first if g is not None and g.requires_grad]
        if squares:
            sum(squares).backward()
        return [None if g is None else g.detach() for g in first], call.x.grad

    def without_grad(self, rows: int, layout: str, how: str) -> Any:
        mode = torch.inference_mode() if how == "inference" else torch.no_grad()
        with mode:
            out = self.module(self._input(rows, layout, "none")[0])
            seen = pytree.tree_map_only(torch.Tensor, lambda t: t.clone(), out)
            flags = [(t.requires_grad, t.is_inference()) for t in pytree.tree_leaves(out) if torch.is_tensor(t)]
        self._last = {}  # inference tensors may not be saved for backward
        if how == "keep":
            self.kept.append(out)
        return seen, flags

    # What a user does with results.

    def drop(self, which: int) -> Any:
        call = self._call(which)
        if call is None:
            return NOTHING
        self._forget_call(call)

    def keep(self, which: int) -> Any:
        call = self._call(which)
        if call is None:
            return NOTHING
        self.kept = [*self.kept[-5:], pytree.tree_map_only(torch.Tensor, lambda t: t.detach(), call.out)]

    def keep_gradients(self) -> Any:
        self.kept_gradients = [*self.kept_gradients[-3:], [p.grad for p in self.module.parameters()]]

    def forget(self) -> Any:
        self.kept.clear()
        self.kept_gradients.clear()

    def in_place(self, which: int, output: int) -> Any:
        call = self._call(which)
        # An output that eager makes as a view gets a new history by an in-place change, without the hooks that it had;
        # what a replay gives is no view, and keeps them.
        if call is None or call.hooked:
            return NOTHING
        tensors = [t for t in pytree.tree_leaves(call.out) if torch.is_tensor(t) and t.is_floating_point()]
        tensors = [t for t in tensors if t is not call.x]
        if self.blueprint.form == "pair":  # the other one is made of it: an input that is changed, no error in a replay
            tensors = tensors[1:]
        if not tensors:
            return NOTHING
        call.changed = True
        tensors[output % len(tensors)].mul_(2)
        return look(call.out)

    # Training.

    def zero_grad(self, set_to_none: bool) -> None:
        self.module.zero_grad(set_to_none=set_to_none)

    def clip(self) -> Any:
        parameters = [p for p in self.module.parameters() if p.grad is not None]
        return nn.utils.clip_grad_norm_(parameters, 0.5) if parameters else NOTHING

    def optimize(self) -> None:
        self.optimizer.step()

    # The module's state.

    def mode(self, which: int, training: bool) -> None:
        every = list(self.module.children()) if which >= 0 else []
        every += list(getattr(self.module, "layers", [])) if every else []
        (every[which % len(every)] if every else self.module).train(training)

    def load(self, assign: bool) -> None:
        state = {k: v.detach() * 0.9 if v.is_floating_point() else v.clone() for k, v in self._state().items()}
        if self.calls and not assign:
            # In eager a call that waits has saved BatchNorm's statistics, which its backward in training does not use:
            # with changed ones it raises. A replay has not saved them.
            buffers = dict(self.module.named_buffers())
            state = {k: v for k, v in state.items() if k not in buffers}
        self.module.load_state_dict(state, assign=assign, strict=not self.calls or assign)
        if assign:
            self._new_optimizer()

    def _state(self) -> dict[str, torch.Tensor]:
        return self.module.state_dict()

    def swap_data(self, which: int) -> Any:
        chosen = self._parameters(which)
        if not chosen:
            return NOTHING
        # In eager the backward of some ops then reads the new data and that of others the old: no loop can want that.
        self.calls, self.spent = [], None
        for _, parameter in chosen:
            parameter.data = parameter.data * 0.5

    def swap_buffer(self, which: int) -> Any:
        buffers = list(self.module.named_buffers())
        if not buffers:
            return NOTHING
        name, buffer = buffers[which % len(buffers)]
        owner, last = self._owner(name)
        setattr(owner, last, buffer + 1)

    def replace(self, which: int) -> Any:
        chosen = self._parameters(which)
        if not chosen:
            return NOTHING
        for name, parameter in chosen:
            owner, last = self._owner(name)
            setattr(owner, last, nn.Parameter(parameter.detach() * 0.8, requires_grad=parameter.requires_grad))
        self._new_optimizer()

    def tie(self, first: int, second: int) -> Any:
        linear = [layer for layer in getattr(self.module, "layers", []) if isinstance(layer, nn.Linear)]
        if len(linear) < 2:
            return NOTHING
        linear[first % len(linear)].weight = linear[second % len(linear)].weight
        self._new_optimizer()

    def freeze(self, which: int, frozen: bool) -> Any:
        chosen = self._parameters(which)
        if not chosen:
            return NOTHING
        for _, parameter in chosen:
            parameter.requires_grad_(not frozen)

    def convert(self, double: bool) -> None:
        self.calls.clear()  # with leaves of another dtype than their gradients
        self.spent = None
        self.module.to(torch.float64 if double else torch.float32)
        self._new_optimizer()

    def copy(self) -> None:
        self.retired = [self.module]
        self.module = copy.deepcopy(self.module)
        self._new_optimizer()

    def attribute(self, name: str, value: Any) -> None:
        if name == "factor":
            self.module.factor = value
        elif name == "tanh":
            self.module.switches["tanh"] = value
        elif value and len(self.module.shifts) < 3:
            self.module.shifts.append(value)
        else:
            self.module.shifts[0] = value

    # Hooks.

    def hook_output(self, which: int, how: str) -> Any:
        call = self._call(which)
        outputs = [t for t in pytree.tree_leaves(call.out if call else None) if torch.is_tensor(t) and t.requires_grad]
        if not outputs:
            return NOTHING
        call.hooked = True

        def explode(grad: torch.Tensor) -> None:
            raise Boom("in a hook of an output")

        hook = {"log": self._logs(f"output {which}"), "scale": lambda grad: grad * 2, "raise": explode}[how]
        # One of several outputs of a node gets None where no gradient comes to it, as with torch's own nodes; in eager
        # each output here has a node of its own, which does not run then.
        outputs[which % len(outputs)].register_hook(lambda grad: None if grad is None else hook(grad))

    def hook_parameter(self, which: int, how: str) -> Any:
        chosen = [(name, p) for name, p in self._parameters(which) if p.requires_grad]
        if not chosen:
            return NOTHING

        @torch.no_grad()
        def update(parameter: torch.Tensor) -> None:
            parameter.sub_(0.01 * parameter.grad)
            parameter.grad = None

        self.updating |= how == "update"
        for name, parameter in chosen:
            if how in ("log", "scale"):
                log = self._logs(f"gradient of {name}")
                self.handles.append(parameter.register_hook(log if how == "log" else lambda grad: grad * 2))
            else:
                log = self._logs(f"accumulated gradient of {name}")
                self.handles.append(
                    parameter.register_post_accumulate_grad_hook(
                        (lambda p, log=log: log(p.grad)) if how == "after" else update
                    )
                )

    def hook_module(self, how: str) -> Any:
        log = self._logs(f"module, {how}")
        if how == "log":
            self.handles.append(self.module.register_forward_hook(lambda m, args, out: log(args, out)))
        elif how == "scale":
            self.handles.append(self.module.register_forward_hook(lambda m, args, out: scaled(out)))
        elif how == "before":
            self.handles.append(self.module.register_forward_pre_hook(lambda m, args: (args[0] * 1.5,)))
        elif self.blueprint.form in ("one", "sum", "pair"):
            self.handles.append(self.module.register_full_backward_hook(lambda m, given, got: log(given, got)))
        else:
            return NOTHING

    def hook_inner(self, which: int, how: str) -> Any:
        layers = list(getattr(self.module, "layers", []))
        if not layers:
            return NOTHING
        for layer in layers if which < 0 else [layers[which % len(layers)]]:
            if how == "double":
                self.handles.append(layer.register_forward_hook(doubled))
            else:
                self.handles.append(layer.register_forward_pre_hook(halved))

    def unhook(self) -> Any:
        if not self.handles:
            return NOTHING
        for handle in self.handles:
            handle.remove()
        self.handles.clear()
        self.updating = False

    # Exceptions, randomness, garbage.

    def raise_inside(self, rows: int) -> None:
        self.module.bomb = Boom("in the forward")
        try:
            self.module(self._input(rows, "plain", "none")[0])
        finally:
            self.module.bomb = None

    def raise_outside(self, rows: int) -> None:
        call = Call(*self._input(rows, "plain", "leaf"), None)
        call.out = self.module(call.given)
        loss = call.loss()
        raise Boom(f"between forward and backward, loss {loss is not None}")

    def bad_input(self, rows: int) -> Any:
        x = torch.ones((rows, 3, 4, 4) if self.blueprint.image else (rows, WIDTH + 1), device=self.device)
        return look(self.module(x.to(self._dtype)))

    def seed(self, which: int) -> None:
        torch.manual_seed(which)

    def draw(self) -> torch.Tensor:
        return torch.randn(3, device=self.device)

    def collect(self) -> None:
        gc.collect()


def doubled(module: nn.Module, args: Any, out: Any) -> Any:
    return out * 2


def halved(module: nn.Module, args: Any) -> Any:
    return (args[0] * 0.5,)


def scaled(out: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, lambda t: t * 2 if t.is_floating_point() else t, out)


def look(out: Any) -> Any:
    """What can be seen of an output without holding its graph."""
    return pytree.tree_map_only(
        torch.Tensor, lambda t: (t.detach(), t.requires_grad, t.is_leaf, t.grad_fn is not None, t.output_nr >= 0), out
    )


def equal(found: Any, expected: Any) -> bool:
    """A quick answer where everything is the same bit by bit; False says nothing."""
    flat, spec = pytree.tree_flatten(found)
    wanted, wanted_spec = pytree.tree_flatten(expected)
    if spec != wanted_spec:
        return False
    for one, other in zip(flat, wanted, strict=True):
        if not (isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)):
            if type(one) is not type(other) or one != other:
                return False
        elif (
            one.dtype != other.dtype
            or one.stride() != other.stride()
            or one.requires_grad != other.requires_grad
            or one.is_leaf != other.is_leaf
            or one.is_inference() != other.is_inference()
            or one.device != other.device
            or not torch.equal(one, other)
        ):
            return False
    return True


@dataclasses.dataclass
class Outcome:
    """What a step gives, or the exception that it raises; not the exception itself, which would keep what it saw."""

    value: Any = None
    error: str = ""
    kinds: tuple[str, ...] = ()


def attempt(side: Side, step: Step) -> Outcome:
    """Take a step."""
    side.involved = []
    try:
        return Outcome(getattr(side, step[0])(*step[1:]))
    except Exception as error:
        causes, cause = [type(error).__name__], error.__cause__
        while cause is not None:
            causes.append(type(cause).__name__)
            cause = cause.__cause__
        return Outcome(None, f"{type(error).__name__}: {error}", tuple(causes))


class Twins:
    """A graphed module, its eager twin, and the course that they have taken."""

    def __init__(self, blueprint: Blueprint, setup: Setup, device: str) -> None:
        self.blueprint, self.setup, self.device = blueprint, setup, device
        self.steps: list[Step] = []
        self.taken = 0  # steps that found something to do
        torch.manual_seed(setup.seed)
        module = blueprint.make().to(device)
        sample = blueprint.sample(3, device, setup.grad)
        eager = copy.deepcopy(module)
        before = rng_state(device)
        with self._told(("graph",)):
            graphed = fxgraph.make_graphed_callables(
                module,
                (sample,),
                allow_unused_input=True,
                options={
                    "max_in_flight": setup.max_in_flight,
                    "max_captures": setup.max_captures,
                    "verify": setup.verify,
                    "grads": setup.grads,
                },
            )
            assert all(map(torch.equal, rng_state(device), before)), "graphing drew random numbers"
            self.eager = Side(eager, blueprint, setup, device)
            self.graphed = Side(graphed, blueprint, setup, device)
            self._compare("after graphing", True)

    def take(self, *step: Any) -> None:
        """Take a step on both sides.

        Raises:
            Difference: if the two sides are not the same afterwards.
        """
        self.steps.append(step)
        with self._told(step):
            what = f"step {len(self.steps)}, {step[0]}{step[1:]}"
            before, kept = rng_state(self.device), len(self.eager.kept)
            expected = attempt(self.eager, step)
            after = rng_state(self.device)
            set_rng_state(before)
            found = attempt(self.graphed, step)
            exact, largest = self._exact(step), 0.0
            if found.error or expected.error:
                self._compare_errors(found, expected, what)
                self.eager.recover(kept)
                self.graphed.recover(kept)
                set_rng_state(after)
                if self.eager.updating:
                    # The two need not have come equally far: hooks may have changed parameters, and their versions.
                    align(self.graphed, self.eager)
                    for side in (self.graphed, self.eager):
                        side.calls, side.spent = [], None
            else:
                assert all(map(torch.equal, rng_state(self.device), after)), f"{what}: other random numbers were drawn"
                # A second derivative through a batch norm or a loss is made of sums that cancel.
                largest = self._largest(expected.value) if step[0] == "second_order" else 0.0
                self._same(found.value, expected.value, f"{what}: result", exact, largest)
            if found.error or found.value is not NOTHING:
                self.taken += 1
            del found, expected
            self._compare(what, exact, largest)
            if not exact:
                align(self.graphed, self.eager)

    def finish(self) -> None:
        """The end of a course: when nothing is held any more, no slot waits for a backward."""
        with self._told(("finish",)):
            for side in (self.graphed, self.eager):
                side.calls, side.spent, side.involved = [], None, []
                side.forget()
            # After an exception autograd keeps the rest of its queue, and the nodes in it, until its next backward.
            torch.ones(1, device=self.device, requires_grad=True).sum().backward()
            gc.collect()
            for module in (self.graphed.module, *self.graphed.retired):
                for program in module.forward.programs():
                    for capture in program.captures.values():
                        waiting = sum(slot.pending for slot in capture.slots)
                        assert not waiting or self.graphed.leaks, (
                            f"{waiting} slots wait for a backward that cannot come"
                        )

    @property
    def program(self) -> str:
        """The course as a program to be run in the folder of this file."""
        return as_program(self.blueprint, self.setup, self.steps, self.device)

    @contextlib.contextmanager
    def _told(self, step: Step) -> Iterator[None]:
        large = {"LEAST_BYTES": 1, "CALLS": 2} if self.setup.places else {}
        try:
            with mock.patch.multiple(places, **large) if large else contextlib.nullcontext():
                yield
        except Difference:
            raise
        except Exception as error:
            text = str(error) if isinstance(error, AssertionError) else f"{step}: {type(error).__name__}: {error}"
            raise Difference(f"{text}\n\nThe course, to be run in tests/:\n\n{self.program}") from error

    def _exact(self, step: Step) -> bool:
        if self.blueprint.form not in EXACT_FORMS:
            return False
        if step[0] == "gradients" and self.device == "cuda":
            return False  # eager computes only what was asked for, and cuDNN has other kernels for that
        return step[0] not in SEVERAL_CALLS

    def _compare_errors(self, found: Outcome, expected: Outcome, what: str) -> None:
        if found.error and expected.error and set(found.kinds) & set(expected.kinds):
            return
        counts = "count" in self.blueprint.blocks  # the buffer's former value is part of what comes out
        if "DoubleBackwardError" in found.kinds and (counts or "[double-backward-input-changed]" in found.error):
            return
        if "modified by an inplace operation" in found.error and any(c.changed for c in self.graphed.involved):
            return
        if "[hook-after-forward]" in found.error and self.setup.grads == "in_graph":
            return
        if "CheckpointError" in found.kinds and len(self.graphed.calls) + 2 > self.setup.max_in_flight:
            return
        raise AssertionError(f"{what}: {found.error or 'no exception'}\n  but in eager: {expected.error or 'none'}")

    def _largest(self, result: Any) -> float:
        """The size of the largest number that a step gave or added to a gradient."""
        gradients = [p.grad for p in self.eager.module.parameters() if p.grad is not None]
        seen = [t for t in pytree.tree_leaves((result, gradients)) if isinstance(t, torch.Tensor) and t.numel()]
        return max((t.detach().abs().max().item() for t in seen), default=0.0)

    def _compare(self, what: str, exact: bool, largest: float = 0.0) -> None:
        mine, its = self.graphed, self.eager
        self._same(state_of(mine.module), state_of(its.module), f"{what}: module", exact, largest)
        for one, other in zip(mine.retired, its.retired, strict=True):
            self._same(state_of(one), state_of(other), f"{what}: the module that was copied", exact, largest)
        self._same(mine.kept, its.kept, f"{what}: kept tensors", exact, largest)
        self._same(mine.kept_gradients, its.kept_gradients, f"{what}: kept gradients", exact, largest)
        self._same(mine.log, its.log, f"{what}: what hooks saw", exact, largest)
        mine.log.clear()
        its.log.clear()

    def _same(self, found: Any, expected: Any, what: str, exact: bool, largest: float = 0.0) -> None:
        if not equal(found, expected):
            self._describe(found, expected, what, exact, largest)

    def _describe(self, found: Any, expected: Any, what: str, exact: bool, largest: float = 0.0) -> None:
        if isinstance(found, dict) and isinstance(expected, dict):
            assert found.keys() == expected.keys(), f"{what}: {sorted(found)} but {sorted(expected)} in eager"
            for name, value in found.items():
                if not equal(value, expected[name]):
                    assert_same(value, expected[name], f"{what}, {name}", exact, largest)
        else:
            assert_same(found, expected, what, exact, largest)


def align(graphed: Side, eager: Side) -> None:
    """Take over eager's numbers, so that allowed rounding does not grow from step to step."""
    with torch.no_grad():
        pairs = list(zip(state_of(graphed.module).values(), state_of(eager.module).values(), strict=True))
        for mine, its in zip(graphed.retired, eager.retired, strict=True):
            pairs += zip(state_of(mine).values(), state_of(its).values(), strict=True)
        for key, state in eager.optimizer.state_dict()["state"].items():
            own = graphed.optimizer.state_dict()["state"][key]
            pairs += [(own[name], value) for name, value in state.items()]
        for one, other in pairs:
            if isinstance(one, torch.Tensor):
                one.data.copy_(other.data)


@contextlib.contextmanager
def strict_warnings() -> Iterator[None]:
    """Warnings are errors, but for calls that may run eagerly."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for reason in MAY_RUN_EAGERLY:
            warnings.filterwarnings("ignore", f".*{reason}", fxgraph.EagerFallbackWarning)
        yield


def replay(blueprint: Blueprint, setup: Setup, steps: Sequence[Step], device: str = "cpu") -> Twins:
    """Take a course.

    Raises:
        Difference: as soon as the two sides are not the same.
    """
    with strict_warnings():
        twins = Twins(blueprint, setup, device)
        for step in steps:
            twins.take(*step)
        twins.finish()
    return twins


def as_program(blueprint: Blueprint, setup: Setup, steps: Sequence[Step], device: str) -> str:
    """A course as Python."""
    lines = "".join(f"    {step!r},\n" for step in steps)
    return (
        f"from machine import replay\nfrom strategies import Blueprint, Setup\n\n"
        f"replay({blueprint!r}, {setup!r}, [\n{lines}], {device!r})\n"
    )


def shorten(twins: Twins, seconds: float = 120.0) -> Difference | None:
    """A shorter course that differs too, found by leaving out steps, blocks and settings; None if it does not differ
    again."""
    best: tuple[Blueprint, Setup, list[Step]] = (twins.blueprint, twins.setup, list(twins.steps))
    error: Difference | None = None
    end = time.monotonic() + seconds

    def differs(blueprint: Blueprint, setup: Setup, steps: list[Step]) -> bool:
        nonlocal best, error
        if time.monotonic() > end:
            return False
        try:
            replay(blueprint, setup, steps, twins.device)
        except Difference as difference:
            best, error = (blueprint, setup, steps), difference
            return True
        return False

    if not differs(*best):
        return None
    size = max(1, len(best[2]) // 2)
    while size:
        start, before = 0, len(best[2])
        while start < len(best[2]):
            blueprint, setup, steps = best
            if not differs(blueprint, setup, [*steps[:start], *steps[start + size :]]):
                start += size
        if size > 1 or len(best[2]) == before:
            size //= 2
    for i in reversed(range(len(best[0].blocks))):
        blueprint, setup, steps = best
        if len(blueprint.blocks) > 1:
            blocks = (*blueprint.blocks[:i], *blueprint.blocks[i + 1 :])
            differs(dataclasses.replace(blueprint, blocks=blocks), setup, steps)
    for change in ({"image": False}, {"unused": False}, {"frozen": False}, {"form": "one"}):
        differs(dataclasses.replace(best[0], **change), best[1], best[2])
    differs(best[0], Setup(), best[2])
    return error
