"""Faults that the state machine (``test_stateful.py``) has found, each reduced to a few lines."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fxgraph


def test_a_copy_whose_samples_do_not_fit_any_more(device: str) -> None:
    x = torch.randn(3, 4, device=device)
    graphed = fxgraph.make_graphed_callables(nn.Linear(4, 2).to(device), (x,))
    graphed.double()
    copied = copy.deepcopy(graphed)
    torch.testing.assert_close(copied(x.double()), fxgraph.ungraph(graphed)(x.double()), rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:.*max_in_flight:fxgraph.EagerFallbackWarning")
@pytest.mark.parametrize("max_in_flight", [1, 2])
@pytest.mark.parametrize("outstanding", [0, 1, 2])
def test_checkpoint_past_max_in_flight(max_in_flight: int, outstanding: int, device: str) -> None:
    eager = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).to(device)
    x = torch.randn(3, 4, device=device)
    graphed = fxgraph.make_graphed_callables(copy.deepcopy(eager), (x,), options={"max_in_flight": max_in_flight})
    for module in (eager, graphed):
        held = [module(x) for _ in range(outstanding)]
        checkpoint(module, x, use_reentrant=False).square().sum().backward()
        for out in held:
            out.sum().backward()
    for mine, its in zip(graphed.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, its.grad, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:.*max_in_flight:fxgraph.EagerFallbackWarning")
def test_a_replay_of_batch_norm_counts_no_version_that_eager_does_not(device: str) -> None:
    eager = nn.BatchNorm1d(4).to(device)
    x = torch.randn(3, 4, device=device, requires_grad=True)
    graphed = fxgraph.make_graphed_callables(copy.deepcopy(eager), (x,), options={"max_in_flight": 1})
    results = []
    for module in (eager, graphed):
        waiting = module(x)
        ran_eagerly = module(x)  # graphed: the one slot waits for its backward
        of_another_shape = module(x[:2])
        grads = [
            torch.autograd.grad(out.square().sum(), [x, *module.parameters()])
            for out in (ran_eagerly, waiting, of_another_shape)
        ]
        results.append((grads, [buffer._version for buffer in module.buffers()]))
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)


class Raises(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.bad = nn.BatchNorm1d(4), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        if self.bad:
            raise ValueError("the user's own")
        return y


def test_the_first_call_of_a_copy_raises_as_in_eager(device: str) -> None:
    eager = Raises().to(device)
    x = torch.randn(3, 4, device=device)
    copied = copy.deepcopy(fxgraph.make_graphed_callables(copy.deepcopy(eager), (x,)))
    for module in (eager, copied):
        module.bad = True
        with pytest.raises(ValueError, match="the user's own"):
            module(x)
    torch.testing.assert_close(list(copied.buffers()), list(eager.buffers()), rtol=0, atol=0)
