"""A callable to be graphed and its eager twin: everything is done to both, and after each step both must be the same.

What a step gives, parameters, buffers, gradients, flags and the state of the random generators are compared bit by bit:
with aten kernels a replay runs the kernels that eager runs.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

import fxgraph

Step = Callable[[types.SimpleNamespace], Any]


def rng_state(device: str) -> list[torch.Tensor]:
    """The states of the default generators."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if device == "cuda" else [])]


def set_rng_state(states: list[torch.Tensor]) -> None:
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state(states[1])


def significant_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """The strides that say where an element lies: none of dimensions of size 1 or of tensors without elements."""
    if not tensor.numel():
        return ()
    if 0 in tensor.stride():  # eager's gradients may be expanded, fxgraph's have memory of their own
        tensor = tensor.contiguous()
    return tuple(stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True) if size > 1)


CLOSE: dict[str, float] = {}
"""``rtol`` and ``atol`` for what need not be equal bit by bit; empty: torch's usual ones."""


def assert_same(found: Any, expected: Any, what: str = "", exact: bool = True, largest: float = 0.0) -> None:
    """Equal in values (bit by bit, or with torch's usual tolerance), type, strides, ``requires_grad`` and structure.

    Where sums run over terms that cancel, their rounding goes with the terms: ``largest`` is the size of those, and a
    thousand roundings of it are allowed.
    """
    tolerance: dict[str, Any] = {"rtol": 0, "atol": 0} if exact else {**CLOSE}
    flat, spec = pytree.tree_flatten(found)
    wanted, wanted_spec = pytree.tree_flatten(expected)
    assert spec == wanted_spec, f"{what}: {spec} but {wanted_spec} in eager"
    for i, (one, other) in enumerate(zip(flat, wanted, strict=True)):
        place = f"{what} value {i}"
        if not isinstance(other, torch.Tensor):
            assert type(one) is type(other) and one == other, f"{place}: {one!r} but {other!r} in eager"
            continue
        assert isinstance(one, torch.Tensor), f"{place}: {one!r} but a tensor in eager"
        for name in ("requires_grad", "is_leaf", "dtype", "device", "shape"):
            a, b = getattr(one, name), getattr(other, name)
            assert a == b, f"{place}: {name} is {a} but {b} in eager"
        assert one.is_inference() == other.is_inference(), f"{place}: inference tensor or not"
        assert significant_strides(one) == significant_strides(other), (
            f"{place}: strides {one.stride()}, {other.stride()}"
        )
        if largest and other.is_floating_point():
            tolerance = {"rtol": 1e-5, "atol": max(1e-5, 1000 * torch.finfo(other.dtype).eps * largest)}
        torch.testing.assert_close(
            one.detach(), other.detach(), **tolerance, equal_nan=True, msg=lambda text, p=place: f"{p}: {text}"
        )


def state_of(module: nn.Module) -> dict[str, Any]:
    """Everything of a module that training changes."""
    state: dict[str, Any] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        grad = parameter.grad
        state[f"parameter {name}"] = parameter
        state[f"gradient of {name}"] = None if grad is None else grad
    state |= {f"buffer {name}": buffer for name, buffer in module.named_buffers()}
    state |= {f"training of {name}": child.training for name, child in module.named_modules()}
    return state


class Twins:
    """``eager`` and ``graphed`` are namespaces with ``module`` and whatever the steps put there (optimizers, lists)."""

    def __init__(self, module: nn.Module, *samples: Any, device: str, options: Any = None, **more: Any) -> None:
        module = module.to(device)
        self.device = device
        self.eager = types.SimpleNamespace(module=copy.deepcopy(module))
        for mine, its in zip(self.eager.module.parameters(), module.parameters(), strict=True):
            mine.grad = None if its.grad is None else its.grad.clone()  # which deepcopy leaves out
        before = rng_state(device)
        self.graphed = types.SimpleNamespace(
            module=fxgraph.make_graphed_callables(module, samples, allow_unused_input=True, options=options, **more)
        )
        assert all(map(torch.equal, rng_state(device), before)), "graphing drew random numbers"
        self.compare("after graphing")

    def both(self, step: Step, what: str = "", exact: bool = True) -> Any:
        """Do a step to each; what it gives and all state must be the same. Gives the graphed one's result."""
        before = rng_state(self.device)
        expected = step(self.eager)
        after = rng_state(self.device)
        set_rng_state(before)
        found = step(self.graphed)
        assert all(map(torch.equal, rng_state(self.device), after)), f"{what}: other random numbers were drawn"
        assert_same(found, expected, what, exact)
        self.compare(what, exact)
        return found

    def both_raise(self, kind: type[BaseException], step: Step, match: str = "") -> BaseException:
        """A step that raises the same kind of exception on each. Gives the graphed one's."""
        errors = []
        before = rng_state(self.device)
        for side in (self.eager, self.graphed):
            set_rng_state(before)
            try:
                step(side)
            except kind as error:
                errors.append(error)
            else:
                raise AssertionError(f"{'eager' if side is self.eager else 'graphed'}: no {kind.__name__}")
            assert match in str(errors[-1])
        self.compare("after an exception")
        return errors[1]

    def compare(self, what: str = "", exact: bool = True) -> None:
        """All state of the two is the same."""
        assert_same(state_of(self.graphed.module), state_of(self.eager.module), what, exact)

    @property
    def stats(self) -> fxgraph.Stats:
        return fxgraph.stats(self.graphed.module)

    def assert_replayed(self, calls: int) -> None:
        """That many calls were answered by replays, none ran eagerly."""
        stats = self.stats
        assert (stats.replays, stats.eager_calls) == (calls, 0), dataclasses.asdict(stats)

    def collect(self) -> None:
        """Free autograd graphs that only cycles keep."""
        gc.collect()
