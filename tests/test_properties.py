"""Random modules and random courses of calls: a graphed module and its eager twin never differ."""

from __future__ import annotations

import types
import warnings
from typing import Any

import pytest
import torch
from hypothesis import event, example, given, settings
from hypothesis import strategies as st
from strategies import Blueprint, blueprints, courses, rows
from torch.utils import _pytree as pytree
from twins import Twins, assert_same

import fxgraph
from fxgraph import EagerFallbackWarning

Side = types.SimpleNamespace

# Not bit by bit where a value has three or more gradients to be summed, of which some come from outside of the node
# (the loss's own, a view's): eager's engine and a node with several outputs add them up in different orders.
EXACT_FORMS = {"one", "sum", "whole numbers", "nothing to learn", "detached"}


def loss_of(out: Any) -> torch.Tensor | None:
    """A number that every output which can be differentiated has its part in."""
    leaves = [t for t in pytree.tree_leaves(out) if isinstance(t, torch.Tensor) and t.requires_grad]
    return sum(t.square().mean() * (i + 1) for i, t in enumerate(leaves)) if leaves else None


def optimizer_of(module: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([*module.parameters(), torch.zeros(1)], lr=0.05, momentum=0.9)  # some have no parameter


class Boom(Exception):
    pass


def act(side: Side, action: tuple[Any, ...], blueprint: Blueprint, device: str) -> Any:
    """Carry out one action; gives whatever can be seen of it."""
    name, *rest = action
    if not hasattr(side, "pending"):
        side.pending, side.kept = [], []
        side.optimizer = optimizer_of(side.module)
    if name in ("forward", "forward and backward"):
        x = blueprint.sample(rest[0], device, rest[1])
        out = side.module(x)
        loss = loss_of(out)
        if name == "forward":
            side.pending.append((x, loss))
            return detached(out)
        if loss is not None:
            loss.backward()
        return detached(out), x.grad
    if name in ("backward", "drop"):
        if not side.pending:
            return None
        index = rest[0] % len(side.pending)
        x, loss = side.pending[index]
        if name == "drop" or not rest[1]:
            del side.pending[index]
        if name == "drop" or loss is None:
            return None
        loss.backward(retain_graph=rest[1])
        return x.grad
    if name == "no_grad":
        with torch.no_grad():
            return detached(side.module(blueprint.sample(rest[0], device)))
    if name == "inference":
        with torch.inference_mode():
            out = side.module(blueprint.sample(rest[0], device))
            return pytree.tree_map_only(torch.Tensor, lambda t: t.clone(), out)
    if name == "keep":
        side.kept.append(detached(side.module(blueprint.sample(rest[0], device))))
    elif name == "mode":
        side.module.train(rest[0])
    elif name == "step":
        side.pending.clear()  # eager's saved weights would be too new for them
        side.optimizer.step()
    elif name == "zero":
        side.optimizer.zero_grad(set_to_none=rest[0])
    elif name == "seed":
        torch.manual_seed(rest[0])
    elif name == "draw":
        return torch.randn(3, device=device)
    elif name == "assign":
        side.pending.clear()
        state = {key: value.detach().clone() for key, value in side.module.state_dict().items()}
        side.module.load_state_dict(state, assign=True)
        side.optimizer = optimizer_of(side.module)
    elif name == "data":
        side.pending.clear()
        for parameter in side.module.parameters():
            parameter.data = parameter.data * 0.5
    elif name == "freeze":
        side.pending.clear()
        for parameter in list(side.module.parameters())[::2]:
            parameter.requires_grad_(not rest[0])
    elif name == "raise":
        try:
            loss = loss_of(side.module(blueprint.sample(rest[0], device)))
            raise Boom(loss is None)
        except Boom:
            pass
    return None


def detached(out: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, lambda t: t.detach(), out)


@given(blueprint=blueprints, grad=st.booleans(), count=rows)
@example(blueprint=Blueprint(("linear", "dropout", "batch_norm"), "views", True, True), grad=True, count=3)
@example(blueprint=Blueprint(("tied", "relu_", "tied", "count"), "dict", frozen=True), grad=True, count=2)
@example(blueprint=Blueprint(("scale", "views", "batch_norm")), grad=False, count=3)
def test_a_training_step_is_eagers(blueprint: Blueprint, grad: bool, count: int, device: str) -> None:
    torch.manual_seed(17)
    twins = Twins(blueprint.make(), blueprint.sample(3, device, grad), device=device)
    exact = blueprint.form in EXACT_FORMS
    for action in (("forward and backward", count, grad), ("step",), ("zero", True), ("forward and backward", 3, grad)):
        twins.both(lambda side, action=action: act(side, action, blueprint, device), str(action), exact)
        if not exact:
            align(twins)
    assert twins.stats.eager_calls == 0
    event(f"form {blueprint.form}")


@given(blueprint=blueprints, course=courses)
@example(
    blueprint=Blueprint(("linear", "dropout", "linear")),
    course=[("forward", 3, True), ("forward", 3, True), ("backward", 1, True), ("keep", 3), ("backward", 0, False)],
)
@example(
    blueprint=Blueprint(("batch_norm", "linear"), "pair"),
    course=[("forward and backward", 3, False), ("zero", False), ("forward and backward", 3, False), ("step",)],
)
def test_a_course_of_calls_is_eagers(blueprint: Blueprint, course: list[tuple[Any, ...]], device: str) -> None:
    torch.manual_seed(23)
    twins = Twins(blueprint.make(), blueprint.sample(3, device), device=device, options={"max_in_flight": 3})
    exact = blueprint.form in EXACT_FORMS
    with warnings.catch_warnings():
        # A course may have more forwards outstanding than there are slots.
        warnings.filterwarnings("ignore", ".*max_in_flight", EagerFallbackWarning)
        for i, action in enumerate(course):
            what = f"action {i}, {action}"
            twins.both(lambda side, action=action: act(side, action, blueprint, device), what, exact)
            assert_same(twins.graphed.kept, twins.eager.kept, f"kept outputs after {what}", exact)
            if not exact:
                align(twins)
    for reason in twins.stats.eager_reasons:
        assert "max_in_flight" in reason, reason
    event(f"replays: {min(twins.stats.replays, 5)}")


def align(twins: Twins) -> None:
    """Take over the eager one's weights and gradients, so that allowed rounding does not grow from step to step."""
    with torch.no_grad():
        for mine, its in zip(twins.graphed.module.parameters(), twins.eager.module.parameters(), strict=True):
            mine.data.copy_(its.data)
            if mine.grad is not None:
                mine.grad.data.copy_(its.grad.data)
    if hasattr(twins.eager, "optimizer"):
        mine, its = twins.graphed.optimizer.state_dict(), twins.eager.optimizer.state_dict()
        for key, state in its["state"].items():
            for name, value in state.items():
                if isinstance(value, torch.Tensor):
                    mine["state"][key][name].copy_(value)


@settings(max_examples=settings().max_examples // 2)
@given(blueprint=blueprints)
def test_check_agrees_with_what_capture_does(blueprint: Blueprint, device: str) -> None:
    torch.manual_seed(29)
    module = blueprint.make().to(device)
    report = fxgraph.check(module, (blueprint.sample(3, device),))
    assert report.ok, str(report)


@pytest.mark.parametrize("form", ["one", "pair"])
def test_the_comparison_can_fail(form: str) -> None:
    """A twin that is off by the least bit in one weight is noticed."""
    blueprint = Blueprint(("linear", "tanh"), form)
    twins = Twins(blueprint.make(), blueprint.sample(3, "cpu"), device="cpu")
    weight = twins.eager.module.layers[0].weight
    with torch.no_grad():
        weight[0, 0] = torch.nextafter(weight[0, 0], torch.tensor(9.0))
    with pytest.raises(AssertionError):
        twins.both(lambda side: act(side, ("forward and backward", 3, True), blueprint, "cpu"))
