"""The invariants of a replay: each call is what eager would have done, whatever was done before.

I1 signature, I2 outputs live, I3 activations live, I4 no trace of capture, I5 state is the module's, I6 autograd,
I7 randomness, I8 a failure leaves nothing broken. A test does its steps to a graphed module and to an eager twin, and
compares bit by bit (``twins.py``). That calls were replays, not eager runs, is checked too: a fallback warns, and a
warning is an error here.
"""

from __future__ import annotations

import copy
import gc
import itertools
import random
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils import checkpoint
from twins import Twins, assert_same, rng_state, set_rng_state

import fxgraph
from fxgraph import CaptureError, DoubleBackwardError, EagerFallbackWarning, engines, make_graphed_callables

Side = types.SimpleNamespace


class Mlp(nn.Module):
    """Pure: no buffer, no randomness."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(3, 4), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(self.inner(x).tanh())


class Net(nn.Module):
    """Buffers, randomness, Python attributes, an inner module with its own mode."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.bn, self.act = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh()
        self.drop, self.outer = nn.Dropout(0.25), nn.Linear(4, 3)
        self.scale, self.flag, self.shape, self.table = 0.5, True, [1, 1], {"a": 2.0, "b": 3.0}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.outer(self.drop(self.act(self.bn(self.inner(x)))))
        y = y * self.scale + self.table["a"]
        return (y if self.flag else -y) * self.shape[0]


class Apply(nn.Module):
    """A function with arguments of any kind, as a module without state."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def rows(device: str, count: int = 5, grad: bool = False) -> torch.Tensor:
    return torch.randn(count, 3, device=device, requires_grad=grad)


def step_of(device: str, count: int = 5, set_to_none: bool = True) -> Callable[[Side], Any]:
    """One training step: gives the loss and the input's gradient."""

    def step(side: Side) -> Any:
        if not hasattr(side, "optimizer"):
            side.optimizer = torch.optim.SGD(side.module.parameters(), lr=0.1, momentum=0.9)
        side.optimizer.zero_grad(set_to_none=set_to_none)
        x = rows(device, count, grad=True)
        loss = side.module(x).square().mean()
        loss.backward()
        side.optimizer.step()
        return loss.detach(), x.grad

    return step


def slots(twins: Twins) -> int:
    """How many slots the capture with the most of them has."""
    forward = vars(twins.graphed.module)["forward"]
    return max(len(capture.slots) for program in forward.programs() for capture in program.captures.values())


# == I1: a call never meets a capture that was made for another signature ==============================================

Maker = Callable[[str], Any]
T = torch


def _tensor(*shape: int, grad: bool = False, **kind: Any) -> Maker:
    return lambda device: (T.randn(shape, device=device, **kind).requires_grad_(grad),)


def _image(layout: torch.memory_format) -> Maker:
    return lambda device: (T.randn(2, 3, 4, 4, device=device).to(memory_format=layout),)


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2 + 1


def combine(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x - 2 * y, (x * y).sum()


def by_key(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    first = next(iter(batch))
    return batch["a"] - batch["b"] * (2 if first == "a" else 3)


def any_kind(value: Any, x: torch.Tensor) -> torch.Tensor:
    if isinstance(value, bool):
        return -x
    return x * value if value is not None else x + 100


SIGNATURES: list[tuple[str, Callable[..., Any], list[Maker]]] = [
    ("the last short batch", double, [_tensor(4, 3), _tensor(2, 3), _tensor(1, 3)]),
    ("a shape that would broadcast", double, [_tensor(4, 3), _tensor(1, 3), _tensor(3), _tensor(1, 1), _tensor()]),
    ("no element", double, [_tensor(4, 3), _tensor(0, 3), _tensor(4, 0)]),
    ("dtypes", double, [_tensor(4), _tensor(4, dtype=T.float64), _tensor(4, dtype=T.bfloat16)]),
    ("whole numbers", double, [_tensor(4), lambda d: (T.arange(4, device=d),), lambda d: (T.ones(4, device=d).int(),)]),
    ("complex", double, [_tensor(4), _tensor(4, dtype=T.complex64)]),
    ("a lazy conjugate", double, [
        _tensor(4, dtype=T.complex64), lambda d: (T.randn(4, dtype=T.complex64, device=d).conj(),),
    ]),
    ("memory formats", double, [_image(T.contiguous_format), _image(T.channels_last)]),
    ("transposed", double, [_tensor(3, 3), lambda d: (T.randn(3, 3, device=d).t(),)]),
    ("a slice with gaps", double, [_tensor(3, 2), lambda d: (T.randn(3, 4, device=d)[:, ::2],)]),
    ("a slice that starts later", double, [_tensor(2, 3), lambda d: (T.randn(5, 3, device=d)[3:],)]),
    ("expanded", double, [
        _tensor(4, 3),
        lambda d: (T.randn(3, device=d).expand(4, 3),),
        lambda d: (T.randn(4, 1, device=d).expand(4, 3),),
    ]),
    ("overlapping", double, [_tensor(3, 3), lambda d: (T.arange(5.0, device=d).unfold(0, 3, 1),)]),
    ("requires_grad", double, [_tensor(4), _tensor(4, grad=True)]),
    ("requires_grad of one of two", combine, [
        lambda d: (T.randn(3, device=d, requires_grad=True), T.randn(3, device=d)),
        lambda d: (T.randn(3, device=d), T.randn(3, device=d, requires_grad=True)),
        lambda d: (T.randn(3, device=d, requires_grad=True), T.randn(3, device=d, requires_grad=True)),
    ]),
    ("one tensor as two arguments", combine, [
        lambda d: (T.randn(3, device=d), T.randn(3, device=d)),
        lambda d: (lambda x: (x, x))(T.randn(3, device=d)),
        lambda d: (lambda x: (x, x))(T.randn(3, device=d, requires_grad=True)),
        lambda d: (lambda x: (x[:3], x[2:]))(T.randn(5, device=d)),
    ]),
    ("order of a dict", by_key, [
        lambda d: ({"a": T.randn(3, device=d), "b": T.randn(3, device=d)},),
        lambda d: ({"b": T.randn(3, device=d), "a": T.randn(3, device=d)},),
        lambda d: ({"a": T.randn(3, device=d), "b": T.randn(3, device=d), "c": T.randn(3, device=d)},),
    ]),
    ("length of a list", lambda xs: sum(x * (i + 1) for i, x in enumerate(xs)), [
        lambda d: ([T.randn(3, device=d)],), lambda d: ([T.randn(3, device=d)] * 2,),
        lambda d: ([T.randn(3, device=d), T.randn(3, device=d)],),
    ]),
    ("constants", any_kind, [lambda d, v=v: (v, T.randn(3, device=d)) for v in (1, 1.0, True, 2, -0.0, 0.0, None)]),
    ("None or a tensor", any_kind, [
        lambda d: (None, T.randn(3, device=d)), lambda d: (T.randn(3, device=d), T.randn(3, device=d)),
    ]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("function", "makers"), [s[1:] for s in SIGNATURES], ids=[s[0].replace(" ", "-") for s in SIGNATURES]
)
# The one that may run eagerly: an input whose elements share memory has no static buffer.
@pytest.mark.filterwarnings("ignore:.*overlaps itself in memory:fxgraph.EagerFallbackWarning")
def test_i1_signature_of_the_arguments(function: Callable[..., Any], makers: list[Maker], device: str) -> None:
    twins = Twins(Apply(function), *makers[0](device), device=device)

    def call(side: Side, make: Maker) -> Any:
        args = make(device)
        out = side.module(*args)
        result = [out]
        leaves = [t for t in torch.utils._pytree.tree_leaves(args) if isinstance(t, T.Tensor) and t.requires_grad]
        if leaves:
            loss = sum(t.square().sum() for t in torch.utils._pytree.tree_leaves(out))
            result.append(torch.autograd.grad(loss, leaves, allow_unused=True))
        return result

    for _ in range(2):
        for make in makers:
            twins.both(lambda side, make=make: call(side, make))
    for make in (*reversed(makers), makers[0], makers[0]):
        twins.both(lambda side, make=make: call(side, make))


MODES: dict[str, Callable[[str], Any]] = {
    "plain": lambda device: torch.enable_grad(),
    "no_grad": lambda device: torch.no_grad(),
    "inference": lambda device: torch.inference_mode(),
    "autocast": lambda device: torch.autocast(device, dtype=torch.bfloat16),
    "autocast without cache": lambda device: torch.autocast(device, dtype=torch.bfloat16, cache_enabled=False),
    "autocast off": lambda device: torch.autocast(device, enabled=False),
}


@pytest.mark.parametrize("first", ["plain", "no_grad", "autocast"])
def test_i1_signature_of_the_modes(first: str, device: str) -> None:
    with MODES[first](device):
        twins = Twins(Net(), rows(device), device=device)
    for mode in (first, *MODES, *MODES, first):

        def call(side: Side, mode: str = mode) -> Any:
            with MODES[mode](device):
                return side.module(rows(device))

        out = twins.both(call, mode)
        assert out.requires_grad == (mode not in ("no_grad", "inference"))
    assert twins.stats.eager_calls == 0


@pytest.mark.parametrize("first", [True, False])
def test_i1_signature_of_training_and_evaluation(first: bool, device: str) -> None:
    module = Net()
    twins = Twins(module.train(first), rows(device), device=device)
    for training in (first, not first, first, not first):
        twins.both(lambda side, training=training: side.module.train(training) and None)
        twins.both(step_of(device))
        twins.both(lambda side: side.module(rows(device)))
    twins.assert_replayed(8)


def test_i1_signature_of_flags_that_choose_kernels(device: str) -> None:
    twins = Twins(Apply(lambda x: x @ x.t()), rows(device), device=device)
    captures = []
    try:
        for deterministic, precision in ((False, "highest"), (True, "highest"), (False, "high"), (False, "highest")):
            torch.use_deterministic_algorithms(deterministic)
            torch.set_float32_matmul_precision(precision)
            twins.both(lambda side: side.module(rows(device)))
            captures.append(len(twins.stats.captures))
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_float32_matmul_precision("highest")
    assert captures[1] > captures[0], "a capture made without deterministic algorithms answered a call with them"


def test_i1_captures_past_max_captures_go_and_give_their_memory_back(device: str) -> None:
    twins = Twins(Mlp(), rows(device), device=device, options={"max_captures": 2})
    held = []
    for count in (5, 4, 3, 2, 5, 4, 3, 2):
        twins.both(step_of(device, count))
        assert len(twins.stats.captures) <= 2
        held.append(twins.stats.pool_bytes)
    assert held[-1] == held[3]  # the same shapes are held as a round before


def test_i1_stats_count_the_calls_of_captures_that_have_gone(device: str) -> None:
    twins = Twins(Mlp(), rows(device), device=device, options={"max_captures": 1})
    for count in (5, 4, 5, 4, 3):
        twins.both(lambda side, count=count: side.module(rows(device, count)))
    twins.assert_replayed(5)


# == I2: what the user or autograd still holds is not overwritten ======================================================


@pytest.mark.parametrize("grad", [True, False])
def test_i2_outputs_kept_across_calls(grad: bool, device: str) -> None:
    twins = Twins(Mlp(), rows(device), device=device)

    def call(side: Side) -> Any:
        side.kept = getattr(side, "kept", [])
        with torch.set_grad_enabled(grad):
            side.kept.append(side.module(rows(device)).detach())
        return side.kept

    for _ in range(5):
        twins.both(call)


KEEP: dict[str, Callable[[torch.Tensor], Any]] = {
    "a view": lambda y: y[1:, 0],
    "a detached tensor": lambda y: y.detach(),
    "an alias of the storage": lambda y: torch.empty(0, device=y.device).set_(y.detach()),
    "a loss that autograd keeps": lambda y: y.square().mean(),
    "a tensor in a graph": lambda y: y.exp() * y,
}


@pytest.mark.parametrize("keep", KEEP)
def test_i2_whatever_keeps_an_output_keeps_its_values(keep: str, device: str) -> None:
    twins = Twins(Mlp(), rows(device), device=device, options={"max_in_flight": 8})

    def call(side: Side) -> Any:
        side.kept = getattr(side, "kept", [])
        side.kept.append(KEEP[keep](side.module(rows(device))))
        return side.kept

    for _ in range(4):
        twins.both(call)


@pytest.mark.parametrize("share", [lambda t: t.numpy(), numpy.from_dlpack], ids=["numpy", "dlpack"])
def test_i2_memory_shared_with_numpy(share: Callable[[torch.Tensor], Any]) -> None:
    twins = Twins(Mlp(), rows("cpu"), device="cpu")

    def call(side: Side) -> Any:
        side.kept = getattr(side, "kept", [])
        with torch.no_grad():
            side.kept.append(share(side.module(rows("cpu"))))
        return [torch.from_numpy(array.copy()) for array in side.kept]

    for _ in range(4):
        twins.both(call)


def test_i2_nothing_is_copied_when_nobody_holds_anything(device: str) -> None:
    twins = Twins(Mlp(), rows(device), device=device)
    module, addresses, gradients = twins.graphed.module, set(), set()
    # The gradient of a sum is expanded, which the capture did not know: this backward runs op by op, the next is
    # captured.
    module(rows(device, grad=True)).sum().backward()
    module.zero_grad()
    for _ in range(5):
        x = rows(device, grad=True)
        y = module(x)
        addresses.add(y.data_ptr())
        y.sum().backward()
        gradients.add((x.grad.data_ptr(), module.inner.weight.grad.data_ptr()))
        module.zero_grad()
        del x, y
    assert len(addresses) == len(gradients) == 1
    assert slots(twins) == 1
    twins.assert_replayed(6)


@pytest.mark.parametrize("backwards", [1, 2, 3, 5])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_i2_gradients_accumulate_over_any_number_of_backwards(backwards: int, set_to_none: bool, device: str) -> None:
    twins = Twins(Net(), rows(device), device=device)

    def step(side: Side) -> Any:
        if not hasattr(side, "optimizer"):
            side.optimizer = torch.optim.SGD(side.module.parameters(), lr=0.1, momentum=0.9)
        for _ in range(backwards):
            (side.module(rows(device)).square().mean() / backwards).backward()
        norm = nn.utils.clip_grad_norm_(side.module.parameters(), 0.5)
        side.optimizer.step()
        seen = [p.grad.clone() for p in side.module.parameters()]
        side.optimizer.zero_grad(set_to_none=set_to_none)
        return seen, norm

    for _ in range(3):
        twins.both(step)
    twins.assert_replayed(3 * backwards)


def test_i2_set_to_none_in_turn(device: str) -> None:
    twins = Twins(Mlp(), rows(device), device=device)
    for turn in (True, False, False, True, True, False):
        twins.both(step_of(device, set_to_none=turn))


def test_i2_gradients_that_were_there_before(device: str) -> None:
    module = Mlp().to(device)
    for parameter in module.parameters():
        parameter.grad = torch.full_like(parameter, 3.0)
    twins = Twins(module, rows(device), device=device)
    for _ in range(3):
        twins.both(lambda side: side.module(rows(device)).sum().backward())
    assert (module.outer.bias.grad == 3.0 + 3 * 5).all()


def test_i2_gradients_kept_in_a_list(device: str) -> None:
    twins = Twins(Mlp(), rows(device), device=device)

    def step(side: Side) -> Any:
        side.kept = getattr(side, "kept", [])
        x = rows(device, grad=True)
        side.module(x).square().sum().backward()
        side.kept += [x.grad, *[p.grad for p in side.module.parameters()]]
        for parameter in side.module.parameters():
            parameter.grad = None
        return side.kept

    for _ in range(4):
        twins.both(step)


def test_i2_gradients_from_autograd_grad_kept(device: str) -> None:
    twins = Twins(Mlp(), rows(device), device=device)

    def step(side: Side) -> Any:
        side.kept = getattr(side, "kept", [])
        x = rows(device, grad=True)
        wanted = [x, side.module.outer.weight]
        side.kept += torch.autograd.grad(side.module(x).square().sum(), wanted)
        return side.kept

    for _ in range(4):
        twins.both(step)


def test_i2_gradients_changed_in_place_by_the_user(device: str) -> None:
    twins = Twins(Mlp(), rows(device), device=device)

    def step(side: Side) -> Any:
        x = rows(device, grad=True)
        side.module(x).square().sum().backward()
        for parameter in side.module.parameters():
            parameter.grad.mul_(0.5).add_(1.0)
        x.grad.zero_()
        return x.grad

    for _ in range(3):
        twins.both(step)


def test_i2_a_parameter_used_outside_too(device: str) -> None:
    twins = Twins(Mlp(), rows(device), device=device)

    def step(side: Side) -> Any:
        x = rows(device, grad=True)
        loss = side.module(x).square().sum() + side.module.inner.weight.square().sum() + x.sum()
        loss.backward()
        return loss.detach(), x.grad

    for _ in range(3):
        twins.both(step)


def test_i2_gradients_that_are_one_tensor_in_the_backward_are_apart(device: str) -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.a + self.b

    twins = Twins(Sum(), torch.randn(3, device=device), device=device)

    def step(side: Side) -> Any:
        x = torch.randn(3, device=device, requires_grad=True)
        upstream = torch.randn(3, device=device)
        side.module(x).backward(upstream)
        side.module.a.grad.add_(1.0)
        return upstream, x.grad

    for _ in range(3):
        twins.both(step)


def test_i2_grad_scaler_with_infinities(device: str) -> None:
    twins = Twins(Mlp(), rows(device), device=device)

    def step(side: Side, scale: float) -> Any:
        if not hasattr(side, "scaler"):
            side.scaler = torch.amp.GradScaler(device, init_scale=2.0**4, growth_interval=2)
            side.optimizer = torch.optim.SGD(side.module.parameters(), lr=0.1)
        side.optimizer.zero_grad(set_to_none=False)
        loss = side.module(rows(device)).square().mean() * scale
        side.scaler.scale(loss).backward()
        side.scaler.unscale_(side.optimizer)
        nn.utils.clip_grad_norm_(side.module.parameters(), 1.0)
        side.scaler.step(side.optimizer)
        side.scaler.update()
        return loss.detach(), side.scaler.get_scale()

    for scale in (1.0, float("inf"), 1.0, 1.0, float("inf"), 1.0):
        twins.both(lambda side, scale=scale: step(side, scale))


def test_i2_an_output_changed_in_place(device: str) -> None:
    twins = Twins(Mlp(), rows(device), device=device)

    def step(side: Side) -> Any:
        y = side.module(rows(device))
        y.mul_(2.0).add_(1.0)
        y[0].zero_()
        y.square().sum().backward()
        return y.detach()

    for _ in range(3):
        twins.both(step)


def test_i2_an_output_that_the_backward_needs_changed_in_place_is_autograds_error_or_right(device: str) -> None:
    graphed = make_graphed_callables(lambda x: x.exp(), (rows(device, grad=True),))
    errors = 0
    for _ in range(4):
        x = rows(device, grad=True)
        y = graphed(x)
        true = y.detach().clone()
        with torch.no_grad():
            y.mul_(2.0)
        try:
            y.sum().backward()
        except RuntimeError as error:
            assert "modified by an inplace operation" in str(error)
            errors += 1
        else:  # a copy had been handed out
            assert_same(x.grad, true)
    assert errors
    x = rows(device, grad=True)
    y = graphed(x)
    y.sum().backward()
    assert_same(x.grad, y.detach())


# == I3: a slot is not used again between a forward and its backward ===================================================


LOSSES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "output saved": lambda y: y.square().sum(),
    "output gone": lambda y: (y * 3.0).sum(),  # nobody holds the output: that the slot is pending alone protects it
}


@pytest.mark.parametrize("loss", LOSSES, ids=lambda name: name.replace(" ", "-"))
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_i3_forwards_before_backwards_in_any_order(order: tuple[int, ...], loss: str, device: str) -> None:
    loss_of = LOSSES[loss]
    twins = Twins(Net(), rows(device), device=device, options={"max_in_flight": 3})

    def step(side: Side) -> Any:
        inputs = [rows(device, grad=True) for _ in order]
        losses = [loss_of(side.module(x)) for x in inputs]
        for i in order:
            losses[i].backward()
        return [x.grad for x in inputs]

    for _ in range(2):
        twins.both(step)
    twins.assert_replayed(6)
    assert slots(twins) <= 3


def test_i3_past_max_in_flight_eager_with_one_warning(device: str) -> None:
    twins = Twins(Net(), rows(device), device=device, options={"max_in_flight": 2})

    def step(side: Side) -> Any:
        inputs = [rows(device, grad=True) for _ in range(4)]
        losses = [side.module(x).square().sum() for x in inputs]
        for loss in losses:
            loss.backward()
        return [x.grad for x in inputs]

    with pytest.warns(EagerFallbackWarning, match="max_in_flight=2") as caught:
        twins.both(step)
    assert len([w for w in caught if w.category is EagerFallbackWarning]) == 1
    twins.both(step)
    assert (twins.stats.replays, twins.stats.eager_calls) == (4, 4)


def test_i3_interleaved_with_calls_without_gradients_and_evaluation(device: str) -> None:
    twins = Twins(Net(), rows(device), device=device)

    def step(side: Side) -> Any:
        x = rows(device, grad=True)
        loss = side.module(x).square().sum()
        with torch.no_grad():
            first = side.module(rows(device))
        side.module.eval()
        second = side.module(rows(device)).detach()
        with torch.inference_mode():
            third = side.module(rows(device)).clone()
        side.module.train()
        loss.backward()
        return x.grad, first, second, third

    for _ in range(3):
        twins.both(step)


def test_i3_a_dropped_graph_gives_its_slot_back(device: str) -> None:
    twins = Twins(Net(), rows(device), device=device)
    for _ in range(10):
        twins.both(lambda side: side.module(rows(device)).sum().detach())
    twins.assert_replayed(10)
    assert slots(twins) == 1


def test_i3_an_exception_in_the_users_code_gives_the_slot_back(device: str) -> None:
    twins = Twins(Net(), rows(device), device=device)

    def step(side: Side) -> Any:
        loss = side.module(rows(device)).sum()
        raise KeyError(loss.shape)

    for _ in range(6):
        twins.both_raise(KeyError, step)
        twins.collect()  # an exception that somebody keeps has the graph in its traceback
    twins.both(lambda side: side.module(rows(device)).sum().backward())
    twins.assert_replayed(7)


def test_i3_backward_twice(device: str) -> None:
    twins = Twins(Net(), rows(device), device=device)

    def retained(side: Side) -> Any:
        x = rows(device, grad=True)
        loss = side.module(x).square().sum()
        loss.backward(retain_graph=True)
        with torch.no_grad():
            side.module(rows(device))  # another call must not disturb what is retained
        loss.backward()
        return x.grad

    def not_retained(side: Side) -> Any:
        loss = side.module(rows(device)).square().sum()
        loss.backward()
        loss.backward()

    for _ in range(2):
        twins.both(retained)
    for side in (twins.eager, twins.graphed):
        torch.manual_seed(4)
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            not_retained(side)
    twins.compare()
    twins.both(step_of(device))


def test_i3_backward_of_the_calls_own_output_twice(device: str) -> None:
    """Nothing of eager lies between the loss and the node: the node itself has to say that its graph is gone."""
    twins = Twins(Apply(lambda x: (x.exp() * x).sum()), rows(device, grad=True), device=device)

    def step(side: Side) -> Any:
        loss = side.module(rows(device, grad=True))
        loss.backward()
        loss.backward()

    twins.both_raise(RuntimeError, step, "backward through the graph a second time")


def test_i3_several_losses_through_one_forward(device: str) -> None:
    twins = Twins(Net(), rows(device), device=device)

    def step(side: Side) -> Any:
        x = rows(device, grad=True)
        y = side.module(x)
        first = torch.autograd.grad(y[0].sum(), side.module.outer.weight, retain_graph=True)[0]
        second = torch.autograd.grad(y[1].sum(), side.module.outer.weight, retain_graph=True)[0]
        (y.sum() * first.norm() / second.norm()).backward()
        return first, second, x.grad

    for _ in range(3):
        twins.both(step)


def test_i3_recurrent_calls_with_one_backward(device: str) -> None:
    twins = Twins(Mlp(), rows(device), device=device, options={"max_in_flight": 4})

    def step(side: Side) -> Any:
        x = state = rows(device, grad=True)
        total = torch.zeros((), device=device)
        for _ in range(4):
            state = side.module(state)
            total = total + state.square().mean()
        total.backward()
        return x.grad, total.detach()

    for _ in range(3):
        twins.both(step)


def test_i3_truncated_recurrence(device: str) -> None:
    twins = Twins(Mlp(), rows(device), device=device)

    def step(side: Side) -> Any:
        state = getattr(side, "state", torch.zeros(5, 3, device=device)).detach()
        side.state = side.module(state + 1.0)
        side.state.square().sum().backward()
        return side.state.detach()

    for _ in range(5):
        twins.both(step)


@pytest.mark.parametrize("reentrant", [True, False])
def test_i3_checkpointed(reentrant: bool, device: str) -> None:
    twins = Twins(Net(), rows(device), device=device)

    def step(side: Side) -> Any:
        x = rows(device, grad=True)
        y = checkpoint.checkpoint(side.module, x, use_reentrant=reentrant)
        y.square().sum().backward()
        return x.grad, y.detach()

    for _ in range(3):
        twins.both(step)


def test_i3_calls_from_several_threads(device: str) -> None:
    module = Mlp().to(device)
    twin = copy.deepcopy(module)
    make_graphed_callables(module, (rows(device),), options={"max_in_flight": 4})
    failures: list[BaseException] = []
    batches = [[rows(device) for _ in range(20)] for _ in range(3)]

    def work(batch: list[torch.Tensor]) -> None:
        try:
            kept = []
            for x in batch:
                mine = x.clone().requires_grad_()
                y = module(mine)
                kept.append((x, y.detach(), torch.autograd.grad(y.square().sum(), mine)[0]))
            for x, y, gradient in kept:
                mine = x.clone().requires_grad_()
                expected = twin(mine)
                assert_same(y, expected.detach())
                assert_same(gradient, torch.autograd.grad(expected.square().sum(), mine)[0])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(batch,)) for batch in batches]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not failures, failures[0]


# == I4: no trace of the capture =======================================================================================


def _marks(module: nn.Module) -> dict[str, Any]:
    tensors = dict([*module.named_parameters(), *module.named_buffers()])
    return {
        "versions": {name: t._version for name, t in tensors.items()},
        "addresses": {name: t.data_ptr() for name, t in tensors.items()},
        "identities": {name: id(t) for name, t in tensors.items()},
        "hooks": [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in module.modules()],
    }


def test_i4_graphing_changes_nothing_of_the_module_the_samples_or_the_generators(device: str) -> None:
    module, x = Net().to(device), rows(device, grad=True)
    module(x).sum().backward()
    module.bn.momentum = 0.3
    marks, state = _marks(module), copy.deepcopy(module.state_dict())
    gradients = {name: p.grad.clone() for name, p in module.named_parameters()}
    given, gradient, version = x.detach().clone(), x.grad.clone(), x._version
    generators = (rng_state(device), random.getstate(), numpy.random.get_state()[1].tolist())
    make_graphed_callables(module, (x,), 5)
    assert _marks(module) == marks
    assert_same(dict(module.state_dict()), dict(state))
    assert_same({name: p.grad for name, p in module.named_parameters()}, gradients)
    assert_same([x.detach(), x.grad], [given, gradient])
    assert x._version == version
    after = (rng_state(device), random.getstate(), numpy.random.get_state()[1].tolist())
    assert_same(after, generators)


def test_i4_a_capture_at_a_later_call_leaves_no_trace_either(device: str) -> None:
    twins = Twins(Net(), rows(device), device=device)
    for count in (5, 4, 5, 4, 2):
        twins.both(step_of(device, count))  # BatchNorm counts one call, dropout draws once
    twins.assert_replayed(5)


def test_i4_a_second_slot_captured_at_a_later_call_leaves_no_trace_either(device: str) -> None:
    twins = Twins(Net(), rows(device), device=device)

    def step(side: Side) -> Any:
        losses = [side.module(rows(device)).square().sum() for _ in range(2)]
        losses[0].backward()
        losses[1].backward()

    twins.both(step)
    assert slots(twins) == 2


def test_i4_the_tensors_of_a_call_are_not_kept_alive(device: str) -> None:
    sample, module = rows(device, grad=True), Mlp().to(device)
    watched = [weakref.ref(sample)]
    make_graphed_callables(module, (sample,))
    del sample
    for count in (4, 5, 4):  # the first one is traced anew
        x = rows(device, count, grad=True)
        module(x).sum().backward()
        watched += [weakref.ref(x), weakref.ref(x.grad)]
        del x
    gc.collect()
    assert [i for i, tensor in enumerate(watched) if tensor() is not None] == []


def test_i4_mutated_samples_are_put_back(device: str) -> None:
    def f(cache: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        cache.add_(x)
        return cache * 2

    cache, x = torch.zeros(3, device=device), torch.ones(3, device=device)
    graphed = make_graphed_callables(f, (cache, x))
    assert_same(cache, torch.zeros(3, device=device))
    assert_same(graphed(cache, x), torch.full((3,), 2.0, device=device))
    assert_same(cache, torch.ones(3, device=device))


class GivesMemory(nn.Module):
    """Its forward gives a buffer other memory, of another shape at the first call."""

    def __init__(self, follow: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("counts", torch.zeros(1, 3))
        self.follow = follow

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        self.seen.data = self.seen.data + 1
        self.counts.data = (self.counts + x.detach().sum(0)).view(3)
        y = x + self.seen * self.counts
        return y, self.follow(y)


@pytest.mark.filterwarnings("ignore:.*:fxgraph.EagerFallbackWarning")
@pytest.mark.parametrize(
    "follow",
    [torch.sin, lambda y: y[y.sum(1) > 0].sum(), lambda y: y.exp() if y.sum() > 0 else y.cos()],
    ids=["whole", "in parts", "in Python's parts"],
)
def test_i4_a_buffer_that_the_forward_gives_other_memory_has_its_own_afterwards(
    follow: Callable[[torch.Tensor], torch.Tensor], device: str
) -> None:
    module, x = GivesMemory(follow).to(device), torch.linspace(-1, 2, 6, device=device).view(2, 3)
    twin = copy.deepcopy(module)
    before = {name: (b.data_ptr(), b.size(), b._version, b.clone()) for name, b in module.named_buffers()}
    graphed = make_graphed_callables(module, (x,))
    for name, buffer in module.named_buffers():
        assert (buffer.data_ptr(), buffer.size(), buffer._version) == before[name][:3]
        assert_same(buffer, before[name][3])
    for _ in range(3):
        assert_same(graphed(x), twin(x))
        assert_same(dict(module.named_buffers()), dict(twin.named_buffers()))


# == I5: state is the module's =========================================================================================


def _state(side: Side) -> dict[str, torch.Tensor]:
    return side.module.state_dict()


def _assign(side: Side) -> None:
    side.module.load_state_dict({k: v.clone() + 1 for k, v in _state(side).items()}, assign=True)


def _swap_all(side: Side) -> None:
    for parameter in side.module.parameters():
        parameter.data = parameter.data.clone() * 0.5


def _ema(side: Side) -> None:
    side.shadow = getattr(side, "shadow", [p.detach().clone() * 0.9 for p in side.module.parameters()])
    for i, parameter in enumerate(side.module.parameters()):
        side.shadow[i], parameter.data = parameter.data, side.shadow[i]


def _set_data(tensor: torch.Tensor) -> None:
    tensor.data = torch.ones_like(tensor)


def _set_strides(tensor: torch.Tensor) -> None:
    tensor.data = tensor.data.as_strided(tensor.size(), (1, tensor.size(0)))


def _freeze(side: Side, on: bool, name: str = "inner") -> None:
    getattr(side.module, name).requires_grad_(not on)


def _hook(side: Side, pre: bool = False) -> None:
    if pre:
        side.module.outer.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    else:
        side.module.inner.register_forward_hook(lambda module, args, out: out * 2)


def _replace(path: str, make: Callable[[], Any]) -> Callable[[Side], None]:
    def change(side: Side) -> None:
        generator = torch.get_rng_state()
        torch.manual_seed(3)
        value = make()
        torch.set_rng_state(generator)
        device = next(side.module.parameters()).device
        owner, _, name = path.rpartition(".")
        if isinstance(value, nn.Parameter):
            value = nn.Parameter(value.detach().to(device), value.requires_grad)
        else:
            value = value.to(device)
        setattr(side.module.get_submodule(owner), name, value)

    return change


def _hide(module: nn.Module, name: str, value: Any = None) -> None:
    vars(module)[name] = torch.ones_like(getattr(module, name).detach()) if value is None else value


CHANGES: dict[str, Callable[[Side], Any]] = {
    "copy_ into a parameter": lambda side: side.module.inner.weight.data.copy_(torch.ones(4, 3)),
    "load_state_dict": lambda side: side.module.load_state_dict({k: v + 1 for k, v in _state(side).items()}),
    "load_state_dict assign": _assign,
    "data of a parameter": _swap_all,
    "swapped averages": _ema,
    "a new parameter": _replace("inner.weight", lambda: nn.Parameter(torch.randn(4, 3))),
    "a frozen new parameter": _replace("inner.weight", lambda: nn.Parameter(torch.randn(4, 3), False)),
    "a parameter removed": lambda side: setattr(side.module.inner, "bias", None),
    "a new buffer": _replace("bn.running_mean", lambda: torch.randn(4)),
    "data of a buffer": lambda side: _set_data(side.module.bn.running_mean),
    "frozen": lambda side: _freeze(side, True),
    "all frozen": lambda side: side.module.requires_grad_(False) and None,
    "an inner module set to evaluation": lambda side: side.module.bn.eval() and None,
    "dropout set to evaluation": lambda side: side.module.drop.eval() and None,
    "dropout's p": lambda side: setattr(side.module.drop, "p", 0.75),
    "BatchNorm's momentum": lambda side: setattr(side.module.bn, "momentum", 0.9),
    "a number": lambda side: setattr(side.module, "scale", 2.0),
    "a flag": lambda side: setattr(side.module, "flag", False),
    "a list": lambda side: side.module.shape.__setitem__(0, 5),
    "a dict": lambda side: side.module.table.update(a=-1.0),
    "an inner module replaced": _replace("act", nn.ReLU),
    "an inner module with parameters replaced": _replace("outer", lambda: nn.Linear(4, 3)),
    "an inner module's forward replaced": lambda side: setattr(side.module.act, "forward", torch.relu),
    "another class of an inner module": lambda side: setattr(side.module.act, "__class__", nn.Sigmoid),
    "other strides in the same memory": lambda side: _set_strides(side.module.inner.weight),
    "double and back": lambda side: side.module.double().float() and None,
    "a hook on an inner module": _hook,
    "a pre-hook on an inner module": lambda side: _hook(side, pre=True),
    "an entry that hides a parameter": lambda side: _hide(side.module.inner, "weight"),
    "an entry that hides a buffer": lambda side: _hide(side.module.bn, "running_mean"),
    "an entry that hides a module": lambda side: _hide(side.module, "act", nn.ReLU()),
    "gradients set": lambda side: [setattr(p, "grad", torch.ones_like(p)) for p in side.module.parameters()],
    "weights changed in place": lambda side: nn.init.constant_(side.module.outer.weight, 0.5),
}  # fmt: skip


# Where a parameter's strides are others than its gradient's, torch says once that this may be slow.
@pytest.mark.filterwarnings("ignore:grad and param do not obey the gradient layout contract:UserWarning")
@pytest.mark.parametrize("change", CHANGES, ids=lambda name: name.replace(" ", "-"))
def test_i5_a_change_of_the_modules_state_is_seen_at_the_next_call(change: str, device: str) -> None:
    twins = Twins(Net(), rows(device), device=device)

    def step(side: Side) -> Any:
        x = rows(device, grad=True)
        y = side.module(x)
        y.square().mean().backward()
        with torch.no_grad():
            for parameter in side.module.parameters():
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=0.1)
        gradient = x.grad
        return y.detach(), gradient

    twins.both(step, "before")
    twins.both(lambda side: CHANGES[change](side) is NotImplemented)
    for _ in range(2):
        twins.both(step, "after")
    assert twins.stats.eager_calls == 0


def test_i5_frozen_and_unfrozen_in_turn(device: str) -> None:
    twins = Twins(Net(), rows(device, grad=True), device=device)
    for on in (True, False, True, False):
        twins.both(lambda side, on=on: _freeze(side, on))
        twins.both(step_of(device))
        twins.both(step_of(device))
    assert len(twins.stats.captures) == 2  # going back finds the capture that was there


def test_i5_tied_and_untied(device: str) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(x).tanh())

    def tie(side: Side) -> None:
        side.module.b.weight = side.module.a.weight

    def untie(side: Side) -> None:
        side.module.b.weight = nn.Parameter(side.module.a.weight.detach().clone())

    def step(side: Side) -> Any:
        x = rows(device, grad=True)
        side.module(x).square().sum().backward()
        return x.grad

    twins = Twins(Tied(), rows(device), device=device)
    for change in (tie, untie, tie):
        twins.both(step)
        twins.both(change)
        twins.both(step)


@pytest.mark.parametrize("kind", ["SGD", "Adam", "AdamW foreach", "RMSprop", "LBFGS"])
def test_i5_optimizers(kind: str, device: str) -> None:
    make: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        "SGD": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True),
        "Adam": lambda p: torch.optim.Adam(p, 0.01),
        "AdamW foreach": lambda p: torch.optim.AdamW(p, 0.01, foreach=True),
        "RMSprop": lambda p: torch.optim.RMSprop(p, 0.01),
        "LBFGS": lambda p: torch.optim.LBFGS(p, 0.1, max_iter=3),
    }
    twins = Twins(Mlp(), rows(device), device=device)
    x, target = rows(device), rows(device)

    def step(side: Side) -> Any:
        side.optimizer = getattr(side, "optimizer", None) or make[kind](side.module.parameters())

        def closure() -> torch.Tensor:
            side.optimizer.zero_grad()
            loss = F.mse_loss(side.module(x), target)
            loss.backward()
            return loss

        return side.optimizer.step(closure).detach()

    for _ in range(3):
        twins.both(step)
    assert twins.stats.eager_calls == 0


def test_i5_a_global_and_a_closure_that_the_forward_reads(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    factor = 2.0
    twins = Twins(Apply(lambda x: x * factor + GLOBAL), rows(device), device=device)
    twins.both(lambda side: side.module(rows(device)))
    factor = 3.0
    twins.both(lambda side: side.module(rows(device)))
    monkeypatch.setitem(globals(), "GLOBAL", 7)
    twins.both(lambda side: side.module(rows(device)))


GLOBAL = 1


# == I6: autograd is eager's ===========================================================================================


class Heads(nn.Module):
    """Outputs with and without gradient; one parameter that nothing uses, one that only the second head uses."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.one, self.two, self.idle = nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(4, 2), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = self.trunk(x).tanh()
        one, two = self.one(h), self.two(h)
        return one, two, one.argmax(1), h > 0, two.detach() * 2, two.max(dim=1)[0]


def test_i6_requires_grad_of_each_output_and_gradients_that_are_none(device: str) -> None:
    twins = Twins(Heads(), rows(device), device=device)

    def step(side: Side) -> Any:
        outs = side.module(rows(device))
        (outs[0].sum() + outs[1].square().sum() + outs[5].sum()).backward()
        return [out.detach() for out in outs], [out.requires_grad for out in outs]

    _, flags = twins.both(step)
    assert flags == [True, True, False, False, False, True]
    assert twins.graphed.module.idle.weight.grad is None
    twins.both(step)
    twins.assert_replayed(2)


@pytest.mark.parametrize("used", [(0,), (1,), (5,), (0, 5), (1, 5)], ids=str)
def test_i6_a_loss_on_some_of_the_outputs(used: tuple[int, ...], device: str) -> None:
    twins = Twins(Heads(), rows(device), device=device)

    def step(side: Side) -> Any:
        x = rows(device, grad=True)
        outs = side.module(x)
        sum(outs[i].square().sum() for i in used).backward()
        fired = {name for name, p in side.module.named_parameters() if p.grad is not None}
        return x.grad, sorted(fired)

    for _ in range(2):
        twins.both(step)


def test_i6_a_loss_on_one_output_after_the_other(device: str) -> None:
    twins = Twins(Heads(), rows(device), device=device)

    def step(side: Side) -> Any:
        one, two, *_ = side.module(rows(device))
        one.sum().backward(retain_graph=True)
        two.square().sum().backward()

    for _ in range(2):
        twins.both(step)


def test_i6_subsets_of_inputs_for_autograd_grad(device: str) -> None:
    twins = Twins(Mlp(), rows(device), device=device)
    names = [name for name, _ in Mlp().named_parameters()]
    for subset in ([], ["inner.weight"], ["outer.bias"], ["outer.weight", "inner.bias"], names):

        def step(side: Side, subset: list[str] = subset) -> Any:
            x = rows(device, grad=True)
            loss = side.module(x).square().sum()
            return torch.autograd.grad(loss, [x, *[side.module.get_parameter(name) for name in subset]])

        twins.both(step)


def test_i6_backward_with_inputs(device: str) -> None:
    twins = Twins(Mlp(), rows(device), device=device)

    def step(side: Side) -> Any:
        x = rows(device, grad=True)
        side.module(x).square().sum().backward(inputs=[x, side.module.inner.weight])
        return x.grad

    for _ in range(2):
        twins.both(step)


def test_i6_hooks_fire_as_in_eager(device: str) -> None:
    twins = Twins(Heads(), rows(device), device=device)

    def register(side: Side) -> None:
        side.log = []
        for name, parameter in side.module.named_parameters():
            parameter.register_hook(lambda grad, name=name: side.log.append((name, grad.clone())))
            parameter.register_post_accumulate_grad_hook(lambda p, name=name: side.log.append((name, p.grad.clone())))
        side.module.trunk.weight.register_hook(lambda grad: grad * 2)

    def step(side: Side) -> Any:
        side.log.clear()
        x = rows(device, grad=True)
        x.register_hook(lambda grad: side.log.append(("x", grad.clone())))
        outs = side.module(x)
        outs[0].register_hook(lambda grad: grad * 3)
        (outs[0].sum() + outs[1].sum()).backward()
        return x.grad, sorted(side.log, key=lambda entry: entry[0])

    twins.both(lambda side: register(side))
    for _ in range(3):
        twins.both(step)
    twins.assert_replayed(3)


def test_i6_module_hooks_registered_afterwards(device: str) -> None:
    twins = Twins(Mlp(), rows(device), device=device)

    def register(side: Side) -> None:
        side.log = []
        side.module.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
        side.module.register_forward_hook(lambda module, args, out: out + 1)
        side.module.register_full_backward_hook(lambda module, gi, go: side.log.append((gi[0].clone(), go[0].clone())))

    def step(side: Side) -> Any:
        x = rows(device, grad=True)
        y = side.module(x)
        y.square().sum().backward()
        return y.detach(), x.grad, list(side.log)

    twins.both(lambda side: register(side))
    for _ in range(2):
        twins.both(step)
    twins.assert_replayed(2)


@pytest.mark.parametrize(
    "upstream",
    [
        lambda y: torch.ones_like(y),
        lambda y: torch.ones((), device=y.device).expand(y.shape),
        lambda y: torch.arange(float(y.numel()), device=y.device).view(y.shape[1], y.shape[0]).t(),
        lambda y: torch.randn_like(y).requires_grad_(),
        lambda y: torch.zeros_like(y),
    ],
    ids=["plain", "expanded", "transposed", "requires grad", "zeros"],
)
def test_i6_gradients_given_to_backward(upstream: Callable[[torch.Tensor], torch.Tensor], device: str) -> None:
    twins = Twins(Heads(), rows(device), device=device)

    def step(side: Side) -> Any:
        x = rows(device, grad=True)
        outs = side.module(x)
        torch.autograd.backward([outs[0]], [upstream(outs[0])], retain_graph=True)
        torch.autograd.backward([outs[0], outs[1]], [upstream(outs[0]), upstream(outs[1])])
        return x.grad

    for _ in range(2):
        twins.both(step)


def test_i6_non_leaf_inputs_and_retained_gradients(device: str) -> None:
    twins = Twins(Mlp(), rows(device), device=device)

    def step(side: Side) -> Any:
        x = rows(device, grad=True)
        h = x * 3
        h.retain_grad()
        y = side.module(h)
        y.retain_grad()
        y.square().sum().backward()
        return x.grad, h.grad, y.grad

    for _ in range(2):
        twins.both(step)


def test_i6_higher_order_by_running_the_forward_again(device: str) -> None:
    twins = Twins(Mlp(), rows(device), device=device)

    def penalty(side: Side) -> Any:
        x = rows(device, grad=True)
        y = side.module(x)
        (gradient,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        loss = y.sum() + gradient.norm(dim=1).sub(1).square().sum()
        loss.backward()
        return gradient.detach(), x.grad

    # Not bit by bit: eager adds the two gradients of each inner value before it goes on with the sum, a node that runs
    # the forward again goes on with each and adds at the end.
    for _ in range(3):
        twins.both(penalty, exact=False)


def test_i6_third_order(device: str) -> None:
    twins = Twins(Apply(lambda x: x**4), rows(device, grad=True), device=device)

    def step(side: Side) -> Any:
        x = rows(device, grad=True)
        value, seen = side.module(x), []
        for _ in range(3):
            (value,) = torch.autograd.grad(value.sum(), x, create_graph=True)
            seen.append(value.detach())
        return seen

    twins.both(step)


@pytest.mark.parametrize("kind", ["random", "batch norm", "both"])
def test_i6_higher_order_through_random_ops_and_batch_norm(kind: str, device: str) -> None:
    # Without a bias: before a batch norm its gradient is zero but for rounding.
    layers: list[nn.Module] = [nn.Linear(3, 3, bias=False)]
    layers += [] if kind == "random" else [nn.BatchNorm1d(3)]
    layers += [] if kind == "batch norm" else [nn.Dropout(0.5)]
    twins = Twins(nn.Sequential(*layers, nn.Linear(3, 3), nn.Tanh()), rows(device), device=device)

    def step(side: Side) -> Any:
        x = rows(device, grad=True)
        out = side.module(x)
        torch.rand(3, device=device)  # the generator has gone on when the forward is run again
        (grad,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        grad.square().sum().backward()
        return grad.detach(), x.grad, torch.rand(3, device=device)

    for _ in range(3):
        twins.both(step, exact=False)  # as in the test of the gradient penalty


def test_i6_higher_order_through_what_cannot_run_again_is_refused(device: str) -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("steps", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.steps.add_(1)
            return x.square() * self.steps

    twins = Twins(Counts(), rows(device), device=device)
    x = rows(device, grad=True)
    loss = twins.graphed.module(x).square().sum()
    with pytest.raises(DoubleBackwardError) as caught:
        torch.autograd.grad(loss, x, create_graph=True)
    assert caught.value.id == "double-backward"
    assert "steps" in caught.value.where
    del loss
    twins.eager.module.steps.add_(1)  # the eager one has not counted that call
    twins.both(lambda side: side.module(x).detach())


VIEWS: dict[str, Callable[[torch.Tensor], Any]] = {
    "the input itself": lambda x: (x, x * 2),
    "a view of the input": lambda x: (x.t(), x * 2),
    "a slice of the input": lambda x: (x[1:], x[:, 0].sum()),
    "views of each other": lambda x: (lambda y: (y, y.t(), y[0]))(x * 2),
    "only views": lambda x: (lambda y: (y[1:], y[0], y.reshape(-1)))(x * 2),
    "split": lambda x: (x * 2).split(2),
    "unbind of the input": lambda x: x.unbind(0),
    "a view of a view": lambda x: (x * 2).view(-1)[1:].view(2, 7),
    "expanded": lambda x: (x * 2).sum(1, keepdim=True).expand(5, 4),
    "detached": lambda x: ((x * 2).detach(), x.detach(), x * 3),
    "a constant": lambda x: (x * 2, torch.ones(3, device=x.device), None, 5),
}


@pytest.mark.parametrize("kind", VIEWS, ids=lambda name: name.replace(" ", "-"))
@pytest.mark.parametrize("grad", [True, False])
# The one that may run eagerly: views of an input that only one op makes all at once.
@pytest.mark.filterwarnings("ignore:.*in a way that cannot be made again outside:fxgraph.EagerFallbackWarning")
def test_i6_outputs_that_alias_inputs_or_each_other(kind: str, grad: bool, device: str) -> None:
    def flat(out: Any) -> list[Any]:
        return [out] if isinstance(out, torch.Tensor) else list(out)

    twins = Twins(Apply(VIEWS[kind]), rows(device, grad=grad), device=device)

    def aliasing(x: torch.Tensor, outs: list[Any]) -> list[list[bool]]:
        tensors = [x, *[out for out in outs if isinstance(out, torch.Tensor)]]
        address = [t.untyped_storage().data_ptr() for t in tensors]
        return [[a == b for b in address] for a in address]

    def step(side: Side) -> Any:
        # Whole numbers: eager and a node add the gradients of x in different orders, which must not show as rounding.
        x = torch.randint(-4, 5, (5, 3), device=device).float().requires_grad_(grad)
        outs = flat(side.module(x))
        result: list[Any] = [aliasing(x, outs), [out is x for out in outs]]
        tensors = [out for out in outs if isinstance(out, torch.Tensor)]
        result.append([t.requires_grad for t in tensors])
        result.append([t.detach().clone() for t in tensors])
        if grad:
            loss = sum((t.square().sum() * (i + 1) for i, t in enumerate(tensors) if t.requires_grad), x.sum())
            result.append(torch.autograd.grad(loss, x))
        return result

    for _ in range(3):
        twins.both(step)


@pytest.mark.parametrize("grad", [True, False])
def test_i6_changing_an_output_changes_what_shares_its_memory(grad: bool, device: str) -> None:
    twins = Twins(Apply(lambda x: (lambda y: (y, y.t()))(x * 2)), rows(device, grad=grad), device=device)

    def step(side: Side) -> Any:
        x = rows(device, grad=grad)
        y, view = side.module(x)
        view[0].mul_(10.0)
        result = [y.detach().clone(), view.detach().clone()]
        if grad:
            result += torch.autograd.grad(y.square().sum() + view.sum(), x)
        return result

    for _ in range(2):
        twins.both(step)


@pytest.mark.parametrize("grad", [True, False])
def test_i6_an_output_changed_in_place_while_autograd_needs_a_view_of_it(grad: bool, device: str) -> None:
    twins = Twins(Apply(lambda x: (lambda y: (y, y.t()))(x * 2)), rows(device, grad=grad), device=device)

    def step(side: Side) -> Any:
        weight = torch.ones(3, 5, device=device, requires_grad=True)
        y, view = side.module(rows(device, grad=grad))
        loss = (weight * view).sum()
        with torch.no_grad():
            y.add_(1.0)
        loss.backward()

    twins.both_raise(RuntimeError, step, "modified by an inplace operation")


def _rolled(cache: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    cache[1:] = cache[:-1].clone()
    cache[0] = x
    return cache.sum(0)


def _scaled(cache: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    cache.mul_(2.0)
    return cache[0] + x


def _returned(cache: torch.Tensor, x: torch.Tensor) -> Any:
    cache.add_(x)
    return cache, cache[0]


@pytest.mark.parametrize("function", [_rolled, _scaled, _returned], ids=lambda f: f.__name__.strip("_"))
@pytest.mark.parametrize("where", ["neither", "x", "cache"])
def test_i6_mutated_arguments(function: Callable[..., Any], where: str, device: str) -> None:
    """``where`` requires grad."""

    def make() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        source = torch.randn(4, 3, device=device, requires_grad=where == "cache")
        return source, source.clone(), torch.randn(3, device=device, requires_grad=where == "x")

    _, *sample = make()
    twins = Twins(
        Apply(function), *[t.detach().requires_grad_(t.requires_grad and t.is_leaf) for t in sample], device=device
    )

    def step(side: Side) -> Any:
        source, cache, x = make()
        out = side.module(cache, x)
        again = side.module(cache, x)
        flat = torch.utils._pytree.tree_leaves((out, again))
        result: list[Any] = [
            cache.detach().clone(),
            cache._version > 0,
            cache.requires_grad,
            [t.detach() for t in flat],
        ]
        leaves = [t for t in (source, x) if t.requires_grad]
        if leaves:
            loss = cache.square().sum() + sum(t.sum() for t in flat)
            result.append(torch.autograd.grad(loss, leaves, allow_unused=True))
        return result

    for _ in range(3):
        twins.both(step)


def test_i6_complex_numbers(device: str) -> None:
    class Phase(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.phase = nn.Parameter(torch.randn(3, dtype=torch.complex64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.fft.fft(x * self.phase).abs().square()

    twins = Twins(Phase(), rows(device), device=device)

    def step(side: Side) -> Any:
        x = rows(device, grad=True)
        side.module(x).sum().backward()
        return x.grad

    for _ in range(2):
        twins.both(step)
    twins.assert_replayed(2)


def test_i6_saved_tensors_moved_away_by_hooks(device: str) -> None:
    twins = Twins(Mlp(), rows(device), device=device)

    def step(side: Side) -> Any:
        x = rows(device, grad=True)
        with torch.autograd.graph.save_on_cpu():
            loss = side.module(x).square().sum()
        loss.backward()
        return x.grad

    for _ in range(2):
        twins.both(step)


@pytest.mark.filterwarnings("ignore:.*hooks for saved tensors are on:fxgraph.EagerFallbackWarning")
def test_i6_saved_tensors_changed_by_hooks(device: str) -> None:
    """As by those that keep activations in fewer bits."""
    twins = Twins(Mlp(), rows(device), device=device)

    def step(side: Side) -> Any:
        x = rows(device, grad=True)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.bfloat16(), lambda t: t.float()):
            loss = side.module(x).square().sum()
        loss.backward()
        return x.grad

    for _ in range(2):
        twins.both(step)


def test_i6_an_output_changed_in_place_is_an_error_whoever_held_earlier_ones(device: str) -> None:
    """Outputs that were found held are handed out as copies, which no backward reads."""
    graphed = make_graphed_callables(lambda x: x.sigmoid(), (rows(device, grad=True),))
    kept = []
    for _ in range(4):
        x = rows(device, grad=True)
        y = graphed(x)
        kept.append(y)
        y.detach().mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_i6_a_parameter_changed_between_forward_and_backward_is_autograds_error(device: str) -> None:
    twins = Twins(Mlp(), rows(device), device=device)

    def step(side: Side) -> Any:
        loss = side.module(rows(device, grad=True)).square().sum()
        with torch.no_grad():
            side.module.outer.weight.add_(1.0)
        loss.backward()

    for side in (twins.eager, twins.graphed):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            step(side)
    del side
    for parameter in (*twins.eager.module.parameters(), *twins.graphed.module.parameters()):
        parameter.grad = None
    twins.both(step_of(device))


@pytest.mark.filterwarnings("ignore:Error detected in:UserWarning")  # eager's, beside the error
def test_i6_anomaly_mode_names_nan_as_in_eager(device: str) -> None:
    twins = Twins(Apply(lambda x: x.sqrt().sum()), torch.ones(3, device=device, requires_grad=True), device=device)

    def step(side: Side, value: float) -> Any:
        x = torch.full((3,), value, device=device, requires_grad=True)
        return torch.autograd.grad(side.module(x) * 0.0, x)

    with pytest.warns(UserWarning, match="Anomaly Detection"), torch.autograd.detect_anomaly():
        twins.both(lambda side: step(side, 2.0))
        for side in (twins.eager, twins.graphed):
            with pytest.raises(RuntimeError, match="returned nan values"):
                step(side, 0.0)


# == I7: randomness ====================================================================================================


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.dropout(self.lin(x), 0.5, self.training)
        x = x + torch.randn_like(x) * torch.rand(3, device=x.device)
        return F.rrelu(x, training=self.training) * torch.bernoulli(torch.full_like(x, 0.5))


def test_i7_a_seeded_run_draws_what_eager_draws(device: str) -> None:
    twins = Twins(Noisy(), rows(device), device=device)
    for _ in range(5):
        twins.both(step_of(device))  # compares the generators too
    twins.assert_replayed(5)


def test_i7_two_replays_differ_and_a_seed_brings_the_same_back(device: str) -> None:
    module = make_graphed_callables(nn.Dropout(0.5), (torch.ones(64, device=device),))
    x = torch.ones(64, device=device)
    torch.manual_seed(1)
    first, second = module(x).clone(), module(x).clone()
    assert not torch.equal(first, second)
    torch.manual_seed(1)
    assert torch.equal(module(x), first)
    state = rng_state(device)
    third = module(x).clone()
    torch.manual_seed(99)
    module(x)
    set_rng_state(state)
    assert torch.equal(module(x), third) and torch.equal(third, second)


def test_i7_the_backward_uses_the_forwards_mask(device: str) -> None:
    graphed = make_graphed_callables(lambda x: F.dropout(x, 0.5), (torch.ones(256, device=device, requires_grad=True),))
    pairs = []
    for _ in range(2):
        x = torch.ones(256, device=device, requires_grad=True)
        y = graphed(x)
        torch.rand(3, device=device)  # what is drawn in between changes nothing
        pairs.append((x, y))
    for x, y in reversed(pairs):
        y.sum().backward()
        assert torch.equal(x.grad, y.detach())  # 2 where it was kept, 0 where not
    assert not torch.equal(pairs[0][0].grad, pairs[1][0].grad)


def test_i7_random_draws_in_between_and_forked_generators(device: str) -> None:
    twins = Twins(Noisy(), rows(device), device=device)

    def step(side: Side) -> Any:
        first = side.module(rows(device)).detach()
        with torch.random.fork_rng(devices=[0] if device == "cuda" else []):
            torch.manual_seed(3)
            second = side.module(rows(device)).detach()
        drawn = torch.randn(2, device=device)
        with torch.no_grad():
            third = side.module(rows(device))
        return first, second, drawn, third

    for _ in range(3):
        twins.both(step)


@pytest.mark.parametrize("name", ["LSTM", "GRU", "TransformerEncoderLayer", "MultiheadAttention"])
def test_i7_layers_that_drop_inside(name: str, device: str) -> None:
    # cuDNN's recurrent layers drop by a state of their own, drawn once per process and advanced by each call: in eager
    # too, no seed brings the same numbers back.
    with torch.backends.cudnn.flags(enabled=name not in ("LSTM", "GRU")):
        _layers_that_drop_inside(name, device)


def _layers_that_drop_inside(name: str, device: str) -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            make = {
                "LSTM": lambda: nn.LSTM(4, 4, 2, dropout=0.5),
                "GRU": lambda: nn.GRU(4, 4, 2, dropout=0.5),
                "TransformerEncoderLayer": lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.25),
                "MultiheadAttention": lambda: nn.MultiheadAttention(4, 2, dropout=0.25),
            }
            self.layer = make[name]()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = self.layer(x, x, x) if name == "MultiheadAttention" else self.layer(x)
            return out[0] if isinstance(out, tuple) else out

    twins = Twins(Layer(), torch.randn(3, 2, 4, device=device), device=device)

    def step(side: Side) -> Any:
        x = torch.randn(3, 2, 4, device=device, requires_grad=True)
        y = side.module(x)
        y.square().sum().backward()
        return y.detach(), x.grad

    for _ in range(2):
        twins.both(step)
    twins.both(lambda side: side.module.eval()(torch.randn(3, 2, 4, device=device)).detach())


# == I8: a failure leaves nothing broken ===============================================================================


class Stop(Exception):
    pass


@pytest.fixture
def failing(device: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """``failing(n, error)``: the engine's n-th capture from now on raises half way; ``failing()``: none does."""
    kind = type(engines.get(device))
    original = kind.capture
    left: list[Any] = [None, None]

    def capture(self: Any, pool: Any, region: Any, inputs: Any, warmup: int) -> Any:
        if left[0] is not None:
            left[0] -= 1
            if left[0] == 0:

                def broken(*args: Any) -> Any:
                    region(*args)
                    raise left[1]

                return original(self, pool, broken, inputs, warmup)
        return original(self, pool, region, inputs, warmup)

    def arm(count: int | None = None, error: BaseException | None = None) -> None:
        left[:] = [count, error]

    monkeypatch.setattr(kind, "capture", capture)
    yield arm


def pool_bytes_of(pools: list[Any]) -> int:
    return sum(pool.bytes_held() for pool in pools)


@pytest.mark.parametrize(
    ("count", "error"),
    [
        pytest.param(1, Stop("own"), id="forward"),
        pytest.param(2, Stop("own"), id="forward of the second"),
        pytest.param(3, RuntimeError("device"), id="backward of the second"),
        pytest.param(4, RuntimeError("device"), id="backward"),
        pytest.param(4, KeyboardInterrupt(), id="interrupted"),
    ],
)
def test_i8_a_capture_that_fails_leaves_the_callables_as_they_were(
    count: int, error: BaseException, failing: Callable[..., None], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pools: list[Any] = []
    kind = type(engines.get(device))
    new_pool = kind.new_pool
    monkeypatch.setattr(kind, "new_pool", lambda self, *args: pools.append(new_pool(self, *args)) or pools[-1])
    first, second = Net().to(device), Net().to(device)
    before = copy.deepcopy((first, second))
    x = rows(device)
    generators = rng_state(device)
    failing(count, error)
    with pytest.raises(BaseException) as caught:
        make_graphed_callables((first, second), ((x,), (x,)))
    failing()
    if isinstance(error, Exception):
        assert isinstance(caught.value, CaptureError)
        assert caught.value.__cause__ is error
        assert "capturing the" in str(caught.value)
    else:
        assert caught.value is error
    assert all(map(torch.equal, rng_state(device), generators))
    del caught
    gc.collect()
    assert pools and pool_bytes_of(pools) == 0
    for module, twin in zip((first, second), before, strict=True):
        assert "forward" not in vars(module)
        assert_same(dict(module.state_dict()), dict(twin.state_dict()))
    Twins(first, x, device=device).both(step_of(device))  # and it can be graphed after all


def test_i8_a_capture_that_fails_at_a_later_call_runs_that_call_eagerly(
    failing: Callable[..., None], device: str
) -> None:
    twins = Twins(Net(), rows(device), device=device)
    twins.both(step_of(device))
    failing(1, RuntimeError("device"))
    with pytest.warns(EagerFallbackWarning, match="the capture failed: RuntimeError: device"):
        twins.both(step_of(device, 2))
    failing()
    for count in (5, 2, 5):
        twins.both(step_of(device, count))


def test_i8_no_memory_for_a_capture_at_a_later_call(failing: Callable[..., None], device: str) -> None:
    twins = Twins(Net(), rows(device), device=device)
    failing(1, torch.OutOfMemoryError("out of memory"))
    with pytest.warns(EagerFallbackWarning, match="no memory for a capture"):
        twins.both(step_of(device, 2))
    failing()
    twins.both(step_of(device))
    twins.both(step_of(device, 2))


def test_i8_a_replay_that_fails_leaves_the_callable_usable(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    twins = Twins(Mlp(), rows(device, grad=True), device=device)
    twins.both(step_of(device))
    forward = vars(twins.graphed.module)["forward"]
    (program,) = forward.programs()
    (capture,) = program.captures.values()
    region = capture.slots[0].forward

    def broken(self: Any) -> None:
        raise Stop("in a replay")

    with monkeypatch.context() as patch:
        patch.setattr(type(region), "replay", broken)
        for _ in range(4):
            with pytest.raises(Stop, match="in a replay"):
                twins.graphed.module(rows(device, grad=True))
    twins.both(step_of(device))
    assert slots(twins) == 1


def test_i8_hooks_of_the_users_that_raise_in_the_backward(device: str) -> None:
    twins = Twins(Net(), rows(device), device=device)

    def step(side: Side, where: str) -> Any:
        def stop(grad: torch.Tensor) -> None:
            raise Stop(where)

        torch.manual_seed(6)
        x = rows(device, grad=True)
        y = side.module(x)
        (y if where == "output" else x).register_hook(stop)
        y.square().sum().backward()

    for where in ("output", "input") * 3:
        for side in (twins.eager, twins.graphed):
            with pytest.raises(Stop, match=where):
                step(side, where)
            side.module.zero_grad()
    for _ in range(2):
        twins.both(step_of(device))
    assert twins.stats.eager_calls == 0


def test_i8_an_op_that_fails_at_a_later_call_raises_as_in_eager(device: str) -> None:
    twins = Twins(Net(), rows(device), device=device)
    twins.both(step_of(device))
    for _ in range(2):
        with pytest.raises(RuntimeError):
            twins.eager.module(torch.ones(5, 4, device=device))
        with pytest.raises(RuntimeError) as caught:
            twins.graphed.module(torch.ones(5, 4, device=device))
        assert isinstance(caught.value, fxgraph.FxgraphError)
    twins.both(step_of(device))
    twins.assert_replayed(2)


def test_i8_poisoned_slots_are_never_read(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[type(engines.get(device)).__module__], "POISON", True)
    twins = Twins(Net(), rows(device), device=device)

    def step(side: Side) -> Any:
        losses = [side.module(rows(device)).square().sum() for _ in range(2)]
        kept = side.module.eval()(rows(device)).detach()
        side.module.train()
        losses[1].backward(retain_graph=True)
        losses[0].backward()
        losses[1].backward()
        return kept, [loss.detach() for loss in losses]

    for _ in range(3):
        twins.both(step)


@pytest.mark.filterwarnings("ignore:.*with autocast on:fxgraph.EagerFallbackWarning")
@pytest.mark.parametrize("grads", ["autograd", "in_graph"])
@pytest.mark.parametrize("forward", [False, True])
def test_i6_a_backward_with_autocast_on(forward: bool, grads: str, device: str) -> None:
    """Autograd's formulas cast their inputs then, and between its nodes gradients are cast back."""
    twins = Twins(Net(), rows(device), device=device, options={"grads": grads})

    def step(side: Side) -> Any:
        x = rows(device, grad=True)
        with torch.autocast(device, dtype=torch.bfloat16, enabled=forward):
            y = side.module(x)
        with torch.autocast(device, dtype=torch.bfloat16):
            y.float().square().sum().backward()
        return y.detach(), x.grad

    for _ in range(2):
        twins.both(step)
