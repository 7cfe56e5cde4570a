"""GraphModules of symbolic_trace, make_fx, torch.export and Dynamo, through both entries: training equals eager's."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from strategies_fx import describe
from test_tracers import TRACERS, Net, Traced, X
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

import fxgraph
from passes import (
    LowerToAten,
    MergeCommonSubexpressions,
    MoveConstantsToDevice,
    RemoveDeadCode,
    RemoveNoOps,
    apply,
    check,
)
from passes.verify import verify


class Block(torch.nn.Module):
    """A convolution, batch statistics, an in-place op, dropout, and two outputs of which one does not need grad."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.conv = torch.nn.Conv2d(2, 3, 2)
        self.norm = torch.nn.BatchNorm2d(3)
        self.relu = torch.nn.ReLU(inplace=True)
        self.drop = torch.nn.Dropout(0.3)
        self.last = torch.nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.drop(self.relu(self.norm(self.conv(x))))
        return self.last(y.mean((2, 3))), y.detach().amax()


NETS: dict[str, tuple[Callable[[], torch.nn.Module], torch.Tensor, bool]] = {
    "linear layers": (Net, X, True),
    "a convolution": (Block, torch.linspace(-1, 1, 48).reshape(2, 2, 3, 4), False),
}
"""How a net is made, an input, and whether the input requires grad in training."""


def by_fake_make_fx(module: torch.nn.Module, x: torch.Tensor) -> Traced:
    # Parameters and buffers stay real: they become attributes of the graph module.
    return Traced(make_fx(module, tracing_mode="fake", _allow_non_fake_inputs=True)(x), module)


def by_export_without_hooks(module: torch.nn.Module, x: torch.Tensor) -> Traced:
    # Its hooks check the inputs' sizes, which a signature does too; a module with hooks is refused.
    gm = torch.export.export(module, (x,)).module()
    for hooks in (gm._forward_pre_hooks, gm._forward_hooks):
        for handle in list(hooks):
            del hooks[handle]
    return Traced(gm, gm)


def by_rebuilt_dynamo(module: torch.nn.Module, x: torch.Tensor) -> Traced:
    # Dynamo never reads a graph module again that a backend has returned to it; one of the same graph it does.
    found = TRACERS["dynamo"](module, x)
    return Traced(GraphModule(found.gm, found.gm.graph), module, found.inputs)


ALL = {
    "symbolic_trace": TRACERS["symbolic_trace"],
    "make_fx, real": TRACERS["make_fx"],
    "make_fx, fake": by_fake_make_fx,
    "torch.export": by_export_without_hooks,
    "dynamo": by_rebuilt_dynamo,
}


@dataclass
class Side:
    """A graph module with memory of its own, and how it is called."""

    gm: GraphModule
    inputs: tuple[Any, ...]
    call: Callable[..., Any]

    def arguments(self, x: torch.Tensor) -> tuple[Any, ...]:
        """The arguments of the graph module: ``x``, and what its tracer made inputs of."""
        return tuple(x if one is None else one for one in self.inputs)

    def learnt(self) -> list[torch.Tensor]:
        """All that gets a gradient, but ``x``."""
        return [*self.gm.parameters(), *(one for one in self.inputs if one is not None and one.requires_grad)]

    def state(self) -> list[Any]:
        """Parameters, their gradients, and buffers, where the tracer left them."""
        tensors = [*self.gm.parameters(), *self.gm.buffers(), *(one for one in self.inputs if one is not None)]
        return [(describe(one), None if one.grad is None else describe(one.grad)) for one in tensors]


def side(tracer: str, net: str) -> tuple[Side, torch.Tensor]:
    """A new graph module of the net; two of them are equal."""
    make, x, _ = NETS[net]
    traced = ALL[tracer](make(), x)
    # What is an input is the example itself, or the one that stands for it in test_tracers.
    inputs = tuple(None if one is x or one is X else one for one in traced.inputs)
    return Side(traced.gm, inputs, traced.gm), x


def train(one: Side, x: torch.Tensor, requires_grad: bool) -> list[Any]:
    """Three steps of training, two backwards each: all that can be seen of them."""
    seen: list[Any] = []
    optimizer = torch.optim.SGD(one.learnt(), lr=0.1, momentum=0.9)
    for step in range(3):
        torch.manual_seed(step)
        optimizer.zero_grad(set_to_none=step != 1)
        for factor in (1.0, 0.5):
            given = (x * factor + step).requires_grad_(requires_grad)
            outputs = pytree.tree_leaves(one.call(*one.arguments(given)))
            outputs[0].square().mean().backward()
            seen += [(describe(out), out.requires_grad) for out in outputs]
            seen += [None if given.grad is None else describe(given.grad)]
        seen += one.state()
        optimizer.step()
        seen += [one.state(), bytes(torch.get_rng_state().tolist())]
    return seen


@pytest.mark.parametrize("entry", ["make_graphed_callables", "torch.compile"])
@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("tracer", ALL)
def test_training_with_each_tracers_graph_is_eagers(tracer: str, net: str, entry: str) -> None:
    eager, x = side(tracer, net)
    requires_grad = NETS[net][2]
    graphed, _ = side(tracer, net)
    assert graphed.state() == eager.state()
    if entry == "torch.compile":
        torch._dynamo.reset()
        gc.collect()  # programs of tests before this one count until they are gone
        assert not fxgraph.stats().eager_reasons
        graphed.call = torch.compile(graphed.gm, backend="graphed", fullgraph=True)
    else:
        sample = graphed.arguments(x.clone().requires_grad_(requires_grad))
        graphed.call = fxgraph.make_graphed_callables(graphed.gm, sample, allow_unused_input=True)
        assert graphed.call is graphed.gm
        assert graphed.state() == eager.state()
    expected = train(eager, x, requires_grad)
    assert train(graphed, x, requires_grad) == expected
    counts = fxgraph.stats() if entry == "torch.compile" else fxgraph.stats(graphed.gm)
    assert counts.eager_calls == 0, counts.eager_reasons
    assert counts.replays >= 6


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("tracer", ALL)
def test_evaluation_with_each_tracers_graph_is_eagers(tracer: str, net: str) -> None:
    eager, x = side(tracer, net)
    graphed, _ = side(tracer, net)
    with torch.no_grad():
        call = fxgraph.make_graphed_callables(graphed.gm, graphed.arguments(x))
        for factor in (1.0, 2.0):
            torch.manual_seed(3)
            expected = pytree.tree_leaves(eager.call(*eager.arguments(x * factor)))
            torch.manual_seed(3)
            found = pytree.tree_leaves(call(*graphed.arguments(x * factor)))
            assert list(map(describe, found)) == list(map(describe, expected))
            assert graphed.state() == eager.state()
    assert fxgraph.stats(graphed.gm).eager_calls == 0


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("tracer", ALL)
def test_rules_find_nothing_and_change_nothing(tracer: str, net: str) -> None:
    one, x = side(tracer, net)
    before, drawn, code = one.state(), torch.get_rng_state(), one.gm.code
    report = fxgraph.check(one.gm, one.arguments(x))
    assert report.ok, str(report)
    report = check(one.gm)
    assert report.ok, str(report)
    assert (one.state(), one.gm.code) == (before, code)
    assert torch.equal(torch.get_rng_state(), drawn)


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("tracer", ALL)
def test_a_rewritten_graph_trains_as_the_one_that_was_traced(tracer: str, net: str) -> None:
    eager, x = side(tracer, net)
    rewritten, _ = side(tracer, net)
    inputs = rewritten.arguments(x) if tracer == "symbolic_trace" else None
    rewrites = (RemoveDeadCode(), RemoveNoOps(), MergeCommonSubexpressions(), MoveConstantsToDevice())
    rewritten.gm = apply(rewritten.gm, [LowerToAten(inputs), *rewrites])
    assert verify(rewritten.gm)
    graphed = fxgraph.make_graphed_callables(
        rewritten.gm, rewritten.arguments(x.clone().requires_grad_()), allow_unused_input=True
    )
    rewritten.call = graphed
    for factor in (1.0, 2.0):
        torch.manual_seed(3)
        given = (x * factor).requires_grad_()
        expected = pytree.tree_leaves(eager.call(*eager.arguments(given)))
        expected[0].square().mean().backward()
        torch.manual_seed(3)
        mine = (x * factor).requires_grad_()
        found = pytree.tree_leaves(rewritten.call(*rewritten.arguments(mine)))
        found[0].square().mean().backward()
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        torch.testing.assert_close(mine.grad, given.grad, rtol=0, atol=0)
    assert fxgraph.stats(graphed).eager_calls == 0
