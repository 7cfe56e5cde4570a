"""``verify=n`` lets right replays pass, and names the op of a wrong one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from twins import Twins

import fxgraph
from fxgraph import VerifyError, engines, verifying
from fxgraph.plan import Plan


class Apply(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(x, self.weight)


def changes_its_input(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    x.mul_(2)
    return x @ w


MODULES: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU()),
    "dropout": lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)),
    "noise": lambda: Apply(lambda x, w: x @ w + torch.randn_like(x)),
    "views": lambda: Apply(lambda x, w: (lambda y: (y, y.t(), y[0], x.t()))(x @ w)),
    "views only": lambda: Apply(lambda x, w: (lambda y: (y[0], y[1:].t()))(x @ w)),
    "constants": lambda: Apply(lambda x, w: {"y": x @ w, "n": 3, "none": None}),
    "detached": lambda: Apply(lambda x, w: (x @ w, (x @ w).detach(), x.argmax(1))),
    "checkpoint": lambda: Apply(lambda x, w: checkpoint(lambda y: (y @ w).tanh(), x, use_reentrant=False)),
    "checkpoint of dropout": lambda: Apply(
        lambda x, w: checkpoint(lambda y: F.dropout(y @ w).sin(), x, use_reentrant=False)
    ),
    "several uses": lambda: Apply(lambda x, w: x @ w @ w @ w.softmax(0)),
    "input changed in place": lambda: Apply(changes_its_input),
}


def loss_of(out: Any) -> torch.Tensor:
    leaves = torch.utils._pytree.tree_leaves(out)
    floats = [t for t in leaves if isinstance(t, torch.Tensor) and t.requires_grad]
    return sum(t.float().square().sum() for t in floats)


@pytest.mark.parametrize("name", MODULES, ids=lambda name: name.replace(" ", "-"))
@pytest.mark.parametrize("autocast", [False, True])
def test_right_replays_pass(name: str, autocast: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []

    def counting(name: str, *args: Any) -> Any:
        compared.append(name)
        return original(name, *args)

    original = verifying.difference
    monkeypatch.setattr(verifying, "difference", counting)
    given = torch.randn(3, 4, device=device)
    with torch.autocast(device, dtype=torch.bfloat16, enabled=autocast):
        twins = Twins(MODULES[name](), given.clone(), device=device, options={"verify": 2})

    def step(side: Any) -> Any:
        x = torch.randn(3, 4, device=device, requires_grad=name != "input changed in place")
        with torch.autocast(device, dtype=torch.bfloat16, enabled=autocast):
            out = side.module(x)
        loss_of(out).backward()
        return x.grad

    # Autograd adds the gradients of several outputs and views one by one; see the module's text of twins.
    exact = "views" not in name and not autocast
    for i in range(3):
        twins.both(step, exact=exact)
        assert bool(compared) is (i < 2)
        assert i == 2 or any("gradient" in name for name in compared)
        compared.clear()


def test_only_some_gradients_asked_for(device: str) -> None:
    graphed = fxgraph.make_graphed_callables(
        nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4)).to(device),
        (torch.randn(3, 4, device=device),),
        options={"verify": 5},
    )
    loss = graphed(torch.randn(3, 4, device=device)).square().sum()
    with torch.no_grad():
        graphed[0].weight.mul_(2)
    torch.autograd.grad(loss, graphed[1].weight)


def three(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    hidden = x @ w
    wide = hidden.exp()
    return (wide.cos() * v).tanh()


def graph_three(device: str, verify: int) -> tuple[Callable[..., torch.Tensor], list[torch.Tensor]]:
    inputs = [torch.randn(4, 4, device=device, requires_grad=True) for _ in range(3)]
    return fxgraph.make_graphed_callables(three, tuple(inputs), options={"verify": verify}), inputs


def spoil(graphed: Any, region: str, monkeypatch: pytest.MonkeyPatch, target: Any) -> None:
    """After each replay of a region, add one to the buffer that holds this op's value."""
    (program,) = graphed.programs()
    (capture,) = program.captures.values()
    (slot,) = capture.slots
    captured = getattr(slot, region)
    graph = getattr(capture.plan, region).graph
    (results,) = graph.output_node().args
    (buffer,) = (value for node, value in zip(results, captured.outputs, strict=True) if node.target is target)
    replay = captured.replay

    def wrong() -> None:
        replay()
        buffer.add_(1)

    monkeypatch.setattr(captured, "replay", wrong)


def test_the_first_op_of_a_forward_that_differs_is_named(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    graphed, inputs = graph_three(device, 1)
    spoil(graphed, "forward", monkeypatch, torch.ops.aten.tanh.default)
    with pytest.raises(VerifyError) as caught:
        graphed(*inputs)
    assert caught.value.id == "verify-forward"
    assert "aten.tanh.default" in caught.value.where
    assert "test_verifying.py" in caught.value.where  # the user's line
    assert caught.value.observed.startswith("output 0")
    graphed(*inputs)  # only the first was to be verified


def test_the_first_op_of_a_backward_that_differs_is_named(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    graphed, inputs = graph_three(device, 1)
    (program,) = graphed.programs()
    (capture,) = program.captures.values()
    (results,) = capture.plan.backward.graph.output_node().args
    first = next(node for node in capture.plan.backward.graph.nodes if node in results)
    spoil(graphed, "backward", monkeypatch, first.target)
    loss = graphed(*inputs).square().sum()
    with pytest.raises(VerifyError) as caught:
        loss.backward()
    assert caught.value.id == "verify-backward"
    assert str(first.target) in caught.value.where
    assert "gradient of the user input" in caught.value.observed


def test_a_fault_of_the_trace_is_told_apart(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make = Plan.__init__

    def with_another_op(self: Plan, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        for node in self.forward.graph.find_nodes(op="call_function", target=torch.ops.aten.cos.default):
            node.target = torch.ops.aten.sin.default
        self.forward.recompile()

    monkeypatch.setattr(Plan, "__init__", with_another_op)
    graphed, inputs = graph_three(device, 1)
    with pytest.raises(VerifyError, match="verify-forward") as caught:
        graphed(*inputs)
    assert caught.value.where.startswith("the trace")


def test_numbers_drawn_too_often_are_noticed(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(4, device=device)
    graphed = fxgraph.make_graphed_callables(lambda x: x * 2, (x,), options={"verify": 1})
    (program,) = graphed.programs()
    (capture,) = program.captures.values()
    region = capture.slots[0].forward
    replay = region.replay
    monkeypatch.setattr(region, "replay", lambda: (replay(), torch.rand(1, device=device)))
    with pytest.raises(VerifyError, match="other random numbers were drawn"):
        graphed(x)


def test_without_verify_nothing_runs_eagerly(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    graphed, inputs = graph_three(device, 0)

    def never(*args: Any) -> Any:
        raise AssertionError("verified although verify=0")

    monkeypatch.setattr(verifying, "verified", never)
    graphed(*inputs).sum().backward()


def test_differences_in_words() -> None:
    one = torch.ones(3)
    assert list(verifying.difference("x", one, one)) == []
    assert "expected a tensor" in next(verifying.difference("x", None, one))
    assert "x" in next(verifying.difference("x", one * 1.1, one))
    assert "dtype" in next(verifying.difference("x", one.double(), one))
    assert "requires_grad" in next(verifying.difference("x", one, one.clone().requires_grad_()))
    # Rounding of the largest element is allowed to all; one part in a thousand of it is not.
    big = torch.tensor([1e6, 1.0])
    assert list(verifying.difference("x", big + torch.tensor([0.0, 0.5]), big)) == []
    assert next(verifying.difference("x", big + torch.tensor([0.0, 1e3]), big), None) is not None
    infinite = torch.tensor([float("inf"), float("nan"), 1.0])
    assert list(verifying.difference("x", infinite.clone(), infinite)) == []


def test_every_engine_gives_its_random_state_back(device: str) -> None:
    engine, where = engines.get(device), torch.device(device)
    state = engine.random_state(where)
    first = torch.rand(3, device=device)
    with engine.from_random_state(where, state):
        assert torch.equal(torch.rand(3, device=device), first)
    second = torch.rand(3, device=device)
    with engine.from_random_state(where, state):
        torch.rand(3, device=device)
        assert torch.equal(torch.rand(3, device=device), second)
    assert not torch.equal(first, second)
