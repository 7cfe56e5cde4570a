"""passes/views_again.py: what is changed in place on the other side of a break is captured, and equal to eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fxgraph

BROKEN = "ignore:.*captured in parts:fxgraph.EagerFallbackWarning"


def a_break(y: torch.Tensor) -> torch.Tensor:
    """One, as a tensor: nothing is below the bound."""
    return torch.nonzero(y.detach().reshape(-1)[:1] > -1e6).sum() + 1


def a_view_made_before(x: torch.Tensor) -> Any:
    y = x.sin() * 2
    v = y[1:]
    n = a_break(y)
    v.mul_(2)
    return y + n


def changed_on_both_sides(x: torch.Tensor) -> Any:
    y = x.sin() * 2
    v = y[1:]
    v.mul_(2)
    n = a_break(y)
    v.add_(n)
    return y * 2


def read_and_changed(x: torch.Tensor) -> Any:
    y = x.sin() * 2
    v = y.view(-1)
    v.mul_(3)
    n = a_break(y)
    z = v + n
    v.add_(1)
    return z + y.view(-1)


def two_parts(x: torch.Tensor) -> Any:
    y = x.clone()
    a, b = y[:2], y[2:]
    n = a_break(y)
    c = a.clone() * n
    a.copy_(b)
    return c.sum() + y


def a_view_of_a_view(x: torch.Tensor) -> Any:
    y = x * 2
    row = y.t()[0]
    part = row[1:3]
    n = a_break(y)
    part.mul_(n * 3)
    return row.square() + y[:, 0]


def two_breaks(x: torch.Tensor) -> Any:
    y = x * 2
    v = y[0]
    n = a_break(y)
    v.zero_()
    w = y[1]
    m = a_break(w)
    w.mul_(m + n)
    return y


def without_grad(x: torch.Tensor) -> Any:
    with torch.no_grad():
        y = x.clone()
        v = y[0]
        n = a_break(y)
        v.add_(n)
    return y * x


def detached(x: torch.Tensor) -> Any:
    y = x * 3
    v = y.detach()
    n = a_break(y)
    v.mul_(n * 2)
    return y + 1, v


def an_input(x: torch.Tensor) -> Any:
    y = x * 1
    v = y.unsqueeze(0)
    w = y.flatten()
    n = a_break(y)
    v.mul_(n * 2)
    return w.exp(), v.sum()


@pytest.mark.filterwarnings(BROKEN)
@pytest.mark.parametrize(
    "function",
    [
        a_view_made_before,
        changed_on_both_sides,
        read_and_changed,
        two_parts,
        a_view_of_a_view,
        two_breaks,
        without_grad,
        detached,
        an_input,
    ],
)
def test_views_that_are_changed_across_a_break_are_captured(function: Callable[..., Any], device: str) -> None:
    """With ``torch.compile`` Dynamo breaks the graph itself, and hands over what it has cut."""
    sample = torch.randn(4, 4, device=device, requires_grad=True)
    graphed = fxgraph.make_graphed_callables(function, (sample,))
    for _ in range(3):
        x = torch.randn(4, 4, device=device, requires_grad=True)
        results = []
        for call in (function, graphed):
            out = call(x)
            leaves = out if isinstance(out, tuple) else (out,)
            loss = sum(leaf.square().sum() for leaf in leaves if leaf.requires_grad)
            results.append([*leaves, *torch.autograd.grad(loss, x)])
        for one, other in zip(*results, strict=True):
            assert one.requires_grad == other.requires_grad
            torch.testing.assert_close(other, one, rtol=0, atol=0)
    reasons = [reason for reason in fxgraph.stats().eager_reasons if "data-dependent-shape" not in reason]
    assert not reasons, "every part but the break is captured"


def turned(x: torch.Tensor) -> Any:
    y = x * 2
    v = y[1:3]
    v.t_()
    n = a_break(y)
    v.mul_(n)
    return y + 1, v.exp()


def turned_on_the_other_side(x: torch.Tensor) -> Any:
    y = x * 2
    v = y[1:3]
    n = a_break(y)
    v.mul_(n)
    v.t_()
    m = a_break(y)
    v.add_(m)
    return y * 1, v.exp()


def squeezed(x: torch.Tensor) -> Any:
    y = x * 2
    v = y[1:2]
    n = a_break(y)
    v.squeeze_(0)
    v.mul_(n)
    y.add_(1)
    return y, v.exp()


def what_unsqueeze_gives_back(x: torch.Tensor) -> Any:
    y = x * 2
    v = y[1].unsqueeze_(0)
    n = a_break(y)
    v.mul_(n)
    y.add_(1)
    return y, v.exp()


@pytest.mark.filterwarnings("ignore:.*:fxgraph.EagerFallbackWarning")
@pytest.mark.parametrize("function", [turned, turned_on_the_other_side, squeezed, what_unsqueeze_gives_back])
def test_a_tensor_that_is_reshaped_in_place_stays_that_tensor(function: Callable[..., Any], device: str) -> None:
    x = torch.randn(4, 4, device=device, requires_grad=True)
    graphed = fxgraph.make_graphed_callables(function, (x,))
    for _ in range(2):
        results = []
        for call in (function, graphed):
            out = call(x)
            results.append([*out, *torch.autograd.grad(sum(leaf.square().sum() for leaf in out), x)])
        for one, other in zip(*results, strict=True):
            torch.testing.assert_close(other, one, rtol=0, atol=0)
