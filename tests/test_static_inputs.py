"""Inputs that are the user's to fill, and are read where they lie. Note [Static inputs], ``places.py``."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import fxgraph
from fxgraph.slots import Slot


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many inputs each call copies."""
    found: list[int] = []
    fill = Slot.fill

    def counted(slot: Slot, inputs: Any) -> None:
        found.append(len(slot._copied))
        fill(slot, inputs)

    monkeypatch.setattr(Slot, "fill", counted)
    yield found


def pair(device: str, **options: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    eager = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).to(device)
    sample = (torch.randn(3, 4, device=device),)
    return eager, fxgraph.make_graphed_callables(copy.deepcopy(eager), sample, options=options)


def step(module: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    module.zero_grad()
    out = module(x)
    out.square().sum().backward()
    return [out.detach(), *[p.grad.clone() for p in module.parameters() if p.grad is not None]]


def assert_same(found: list[torch.Tensor], expected: list[torch.Tensor], device: str) -> None:
    tolerance = {"rtol": 0, "atol": 0} if device == "cpu" else {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(found, expected, **tolerance)


@pytest.mark.parametrize("grads", ["autograd", "in_graph"])
def test_what_is_filled_in_place_is_not_copied(grads: str, device: str, copies: list[int]) -> None:
    eager, graphed = pair(device, grads=grads)
    (x,) = graphed.forward.static_inputs
    assert graphed.forward.static_inputs[0] is x
    step(graphed, x)
    copies.clear()
    for _ in range(3):
        x.copy_(torch.randn(3, 4))
        assert_same(step(graphed, x), step(eager, x), device)
    assert copies == [0, 0, 0]
    assert fxgraph.stats(graphed).eager_calls == 0


def test_a_call_with_other_arguments_copies_them_and_leaves_the_buffer_alone(device: str, copies: list[int]) -> None:
    eager, graphed = pair(device)
    (x,) = graphed.forward.static_inputs
    x.fill_(3.0)
    for k in range(24):  # more than places are learned in
        other = x if k % 3 == 0 else torch.randn(3, 4, device=device)
        assert_same(step(graphed, other), step(eager, other), device)
    assert torch.equal(x, torch.full_like(x, 3.0))
    assert copies[-3:] == [0, 1, 1]
    (capture,) = next(graphed.forward.programs()).captures.values()
    assert len(capture.slots) == 2


def test_a_change_between_forward_and_backward_is_autograds_error(device: str) -> None:
    _, graphed = pair(device)
    (x,) = graphed.forward.static_inputs
    out = graphed(x)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_two_forwards_with_the_buffer_wait_for_their_backwards(device: str) -> None:
    eager, graphed = pair(device)
    (x,) = graphed.forward.static_inputs
    x.copy_(torch.randn(3, 4))
    results = []
    for module in (eager, graphed):
        module.zero_grad()
        first, second = module(x), module(x)
        first.sum().backward()
        second.square().sum().backward()
        results.append([first.detach(), second.detach(), *[p.grad for p in module.parameters()]])
    assert_same(results[1], results[0], device)


def test_weights_in_other_memory_read_the_same_buffer(device: str, copies: list[int]) -> None:
    eager, graphed = pair(device)
    (x,) = graphed.forward.static_inputs
    doubled = {name: 2 * value for name, value in eager.state_dict().items()}
    for module in (eager, graphed):
        module.load_state_dict({name: value.clone() for name, value in doubled.items()}, assign=True)
    x.copy_(torch.randn(3, 4))
    for _ in range(2):
        assert_same(step(graphed, x), step(eager, x), device)
    assert copies[-1] == 0


def test_containers_constants_and_tensors_that_are_none_of_these(device: str, copies: list[int]) -> None:
    def f(pair: dict[str, torch.Tensor], factor: float, *, shift: torch.Tensor) -> torch.Tensor:
        return (pair["a"] * factor + pair["b"]).sin() + shift

    def tensor() -> torch.Tensor:
        return torch.randn(5, device=device)

    graphed = fxgraph.make_graphed_callables(
        f, ({"a": tensor(), "b": tensor()}, 2.0), sample_kwargs={"shift": tensor()}
    )
    arguments, factor = graphed.static_inputs
    assert factor == 2.0 and set(arguments) == {"a", "b"}
    for value in arguments.values():
        value.copy_(tensor())
    shift = tensor()
    for _ in range(2):
        assert_same([graphed(arguments, 2.0, shift=shift)], [f(arguments, 2.0, shift=shift)], device)
    assert copies[-1] == 1  # the keyword argument


def test_a_copy_has_buffers_of_its_own(device: str) -> None:
    _, graphed = pair(device)
    (x,) = graphed.forward.static_inputs
    (other,) = copy.deepcopy(graphed).forward.static_inputs
    assert other.data_ptr() != x.data_ptr()


def changes_its_argument(x: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    return x * 2


def has_a_break(x: torch.Tensor) -> torch.Tensor:
    x = x.sin().cos().sin()
    if x.sum() > 100:
        x = x + 1
    return x.sin().cos().sin()


def runs_an_op_eagerly(x: torch.Tensor) -> torch.Tensor:
    return x.sin().cos().sin()[x > 0].sin().cos().sin()


@pytest.mark.filterwarnings("ignore::fxgraph.EagerFallbackWarning")
@pytest.mark.parametrize(
    ("function", "why"),
    [(changes_its_argument, "changed in place"), (has_a_break, "in parts"), (runs_an_op_eagerly, "in parts")],
)
def test_where_there_are_none_it_says_why(function: Any, why: str, device: str) -> None:
    graphed = fxgraph.make_graphed_callables(function, (torch.randn(4, device=device),))
    with pytest.raises(fxgraph.ReplayError, match=why) as error:
        _ = graphed.static_inputs
    assert error.value.id == "no-static-inputs"


def test_under_another_grad_mode_than_the_samples_there_are_none(device: str) -> None:
    _, graphed = pair(device)
    with torch.no_grad(), pytest.raises(fxgraph.ReplayError, match="no capture fits"):
        _ = graphed.forward.static_inputs
