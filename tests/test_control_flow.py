"""Control flow of torch's own (``torch.cond`` and its like): runs eagerly, with what is around it captured."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch._higher_order_ops import map, scan, while_loop

import fxgraph

Function = Callable[[torch.Tensor], torch.Tensor]


def cond(x: torch.Tensor) -> torch.Tensor:
    y = x.sin().exp()
    return torch.cond(y.sum() > 0, lambda y: y.sin(), lambda y: y.cos(), (y,)).tanh() * 2


def nested(x: torch.Tensor) -> torch.Tensor:
    def inner(y: torch.Tensor) -> torch.Tensor:
        return torch.cond(y.mean() > 0.5, lambda y: y.sin(), lambda y: y.tan(), (y,))

    y = x.sin().exp()
    return torch.cond(y.sum() > 0, inner, lambda y: y.cos(), (y,)).tanh() * 2


def loop(x: torch.Tensor) -> torch.Tensor:
    y, count = x.sin().exp(), torch.zeros((), dtype=torch.int64, device=x.device)
    return while_loop(lambda i, _: i < 3, lambda i, y: (i + 1, y.sin()), (count, y))[1].tanh() * 2


def mapped(x: torch.Tensor) -> torch.Tensor:
    return map(lambda row: row.sin() + row.cos(), x.sin().exp()).tanh() * 2


def scanned(x: torch.Tensor) -> torch.Tensor:
    return scan(lambda carry, row: (carry + row, carry * row), x[0].sin(), x.sin().exp())[1].tanh() * 2


OF_ALL: list[Function] = [cond, nested, loop, mapped, scanned]


@pytest.mark.parametrize("entry", ["compile", "make_graphed_callables"])
@pytest.mark.parametrize("function", OF_ALL)
def test_it_runs_eagerly_with_one_warning_and_what_is_around_it_is_captured(
    function: Function, entry: str, device: str, capfd: pytest.CaptureFixture[str]
) -> None:
    torch._dynamo.reset()
    x = torch.rand(3, 4, device=device)
    expected = function(x)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        if entry == "compile":
            graphed = torch.compile(function, backend="graphed")
        else:
            graphed = fxgraph.make_graphed_callables(function, (x,))
        before = fxgraph.stats().replays
        for _ in range(3):
            torch.testing.assert_close(graphed(x), expected)
    ours = [warning for warning in said if issubclass(warning.category, fxgraph.EagerFallbackWarning)]
    assert len(ours) == 1, [str(warning.message) for warning in ours]
    assert "[higher-order-op]" in str(ours[0].message) and "test_control_flow.py" in str(ours[0].message)
    assert fxgraph.stats().replays - before == 6  # before and after it, three times
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.filterwarnings("ignore:.*captured in parts:fxgraph.EagerFallbackWarning")
@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)  # Dynamo looks, in eager's cond
@pytest.mark.parametrize("function", [cond, nested])
def test_gradients_go_through_a_branch(function: Function, device: str) -> None:
    x = torch.rand(3, 4, device=device, requires_grad=True)
    graphed = fxgraph.make_graphed_callables(function, (x,))
    results = [torch.autograd.grad(call(x).sum(), x) for call in (function, graphed)]
    torch.testing.assert_close(results[1], results[0])
