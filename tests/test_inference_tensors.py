"""Inference tensors as arguments, parameters and buffers, which eager refuses to save for a backward, or to write."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from twins import assert_same

import fxgraph

# Where gradients are to be computed such a call runs eagerly: eager alone knows what is saved.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*an inference tensor is among its inputs:fxgraph.EagerFallbackWarning"),
    pytest.mark.filterwarnings("ignore:.*captured in parts:fxgraph.EagerFallbackWarning"),
    pytest.mark.filterwarnings("ignore:.*Inplace update to inference tensor:fxgraph.EagerFallbackWarning"),
]


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), 0.5))

    def forward(self, x: torch.Tensor) -> Any:
        return x.sin() * self.weight * x


class Shifted(Scaled):
    """Saves nothing."""

    def forward(self, x: torch.Tensor) -> Any:
        return x + self.weight, x.t(), x


class Changing(Scaled):
    def forward(self, x: torch.Tensor) -> Any:
        x.add_(1)
        return x * 2


class Counting(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> Any:
        self.steps.add_(1)
        return x * self.weight + self.steps


class InParts(Scaled):
    """The second part has no guards of Dynamo's on its inputs."""

    def forward(self, x: torch.Tensor) -> Any:
        kept = x[x > 0].sum()
        return ((x + kept).sin() * self.weight).cos()


MODES = (torch.enable_grad, torch.no_grad, torch.inference_mode)


def call(module: nn.Module, x: torch.Tensor, mode: Any) -> Any:
    """What a call gives and leaves, or the first line of its error."""
    try:
        with mode():
            out = module(x)
    except RuntimeError as error:
        return type(error).__name__, str(error).partition("\n")[0]
    outs = out if isinstance(out, tuple) else (out,)
    if outs[0].requires_grad:
        outs[0].sum().backward()
    return outs, [parameter.grad for parameter in module.parameters()], list(module.buffers())


@pytest.mark.parametrize("entry", ["callables", "compile"])
@pytest.mark.parametrize("kind", [Scaled, Shifted, Changing, Counting, InParts, nn.BatchNorm1d])
def test_as_an_argument(kind: Any, entry: str, device: str) -> None:
    eager = (kind(4) if kind is nn.BatchNorm1d else kind()).to(device)
    graphed: Any = copy.deepcopy(eager)
    if entry == "callables":
        graphed = fxgraph.make_graphed_callables(graphed, (torch.ones(3, 4, device=device),), allow_unused_input=True)
    else:
        graphed = torch.compile(graphed, backend="graphed")
    for mode in (*MODES, *MODES):
        for inference in (False, True):
            results = []
            for module in (graphed, eager):
                with torch.inference_mode(inference):
                    x = torch.ones(3, 4, device=device)
                results.append(call(module, x, mode))
            assert_same(*results, f"{mode.__name__}, inference tensor: {inference}")


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("what", ["weight", "steps", "running_mean"])
@pytest.mark.parametrize("mode", MODES)
def test_in_the_module(mode: Any, what: str, when: str, device: str) -> None:
    eager = (nn.BatchNorm1d(4) if what == "running_mean" else Counting()).to(device)
    graphed = copy.deepcopy(eager)

    def replace(module: nn.Module) -> None:
        with torch.inference_mode():
            if what == "weight":
                module.weight = nn.Parameter(torch.full((4,), 2.0, device=device))
            else:
                setattr(module, what, torch.ones_like(getattr(module, what)))

    if when == "before":
        replace(graphed)
    fxgraph.make_graphed_callables(graphed, (torch.ones(3, 4, device=device),))
    for module in (graphed, eager) if when == "after" else (eager,):
        replace(module)
    for autograd in (False, True, False):
        results = [
            call(module, torch.ones(3, 4, device=device, requires_grad=autograd), mode) for module in (graphed, eager)
        ]
        assert_same(*results, f"requires_grad={autograd}")
