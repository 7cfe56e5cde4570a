"""Uses that are legitimate but rare: each was wrong, or said something wrong, at some time."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fxgraph
from fxgraph import ContractError, EagerFallbackWarning, TraceError, make_graphed_callables


@torch.library.custom_op("fxgraph_unusual::without_fake", mutates_args=())
def without_fake(x: torch.Tensor) -> torch.Tensor:
    return x * 2


class Checkpointed(nn.Module):
    def __init__(self, dropout: float, norm: bool, reentrant: bool) -> None:
        super().__init__()
        self.linear, self.dropout, self.reentrant = nn.Linear(4, 4), nn.Dropout(dropout), reentrant
        self.norm = nn.BatchNorm1d(4) if norm else nn.Identity()

    def block(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.norm(self.linear(x))).tanh()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.block, x, use_reentrant=self.reentrant).sin()


def both_entries(module: nn.Module, x: torch.Tensor) -> list[Callable[..., Any]]:
    """The module graphed in both ways, each on its own copy."""
    return [
        make_graphed_callables(copy.deepcopy(module), (x,)),
        torch.compile(copy.deepcopy(module), backend="graphed"),
    ]


# Eager runs the part twice and counts BatchNorm's statistics twice; with statistics the graph therefore runs eagerly.
@pytest.mark.filterwarnings("ignore:.*eager runs twice:fxgraph.EagerFallbackWarning")
@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_inside_of_the_callable(dropout: float, norm: bool, reentrant: bool, device: str) -> None:
    """Outputs, gradients and statistics are eager's, whether the random part is run again or not."""
    eager = Checkpointed(dropout, norm, reentrant).to(device)
    x = torch.randn(6, 4, device=device)
    for graphed in both_entries(eager, x):
        reference = copy.deepcopy(eager)
        results = []
        for module in (reference, graphed):
            torch.manual_seed(1)
            given = x.clone().requires_grad_()
            outputs = [module(given) for _ in range(2)]
            sum(outputs).sum().backward()
            results.append([*outputs, given.grad, *[p.grad for p in module.parameters()], *module.buffers()])
        for got, want in zip(results[1], results[0], strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore::fxgraph.EagerFallbackWarning")
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_checkpoint_in_a_graph_that_runs_eagerly(dropout: float, device: str) -> None:
    """Past ``max_in_flight`` the graph runs by itself; its checkpoint draws the same mask again."""
    eager = Checkpointed(dropout, norm=False, reentrant=False).to(device)
    x = torch.randn(6, 4, device=device)
    graphed = make_graphed_callables(copy.deepcopy(eager), (x,), options={"max_in_flight": 1})
    gradients = []
    for module in (eager, graphed):
        torch.manual_seed(2)
        losses = [module(x).sum() for _ in range(3)]
        for loss in losses:
            loss.backward()
        gradients.append([p.grad for p in module.parameters()])
    for got, want in zip(gradients[1], gradients[0], strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore::fxgraph.EagerFallbackWarning")
def test_an_embedding_that_renormalises_its_weight(device: str) -> None:
    """``max_norm`` writes the parameter in place behind autograd's back."""
    eager = nn.Embedding(10, 4, max_norm=0.5).to(device)
    graphed = make_graphed_callables(copy.deepcopy(eager), (torch.randint(10, (3,), device=device),))
    for _ in range(3):
        index = torch.randint(10, (3,), device=device)
        want, got = eager(index), graphed(index)
        torch.testing.assert_close(got, want, rtol=0, atol=0)
        torch.testing.assert_close(graphed.weight, eager.weight, rtol=0, atol=0)
        want.sum().backward()
        got.sum().backward()
        torch.testing.assert_close(graphed.weight.grad, eager.weight.grad, rtol=0, atol=0)


def test_a_custom_op_without_a_fake_implementation(device: str) -> None:
    """It is named as that, not as an op that fails."""
    x = torch.randn(2, device=device)
    with pytest.raises(TraceError) as caught:
        make_graphed_callables(lambda x: without_fake(x) + 1, (x,))
    assert caught.value.id == "no-fake-impl"
    assert "without_fake" in caught.value.observed
    assert fxgraph.check(lambda x: without_fake(x) + 1, (x,)).ids == ("no-fake-impl",)


def generator(x: torch.Tensor) -> Any:
    yield x


async def coroutine(x: torch.Tensor) -> torch.Tensor:
    return x


@pytest.mark.parametrize(
    ("target", "observed"),
    [(generator, "a generator function"), (coroutine, "a coroutine function"), (nn.Linear, "the class Linear")],
)
def test_what_a_call_does_not_run(target: Any, observed: str, device: str) -> None:
    """Calling these gives an object, not a result."""
    with pytest.raises(ContractError) as caught:
        make_graphed_callables(target, (torch.ones(2, device=device),))
    assert (caught.value.id, caught.value.observed) == ("not-callable", observed)


def test_an_argument_that_the_contract_refuses_does_not_change_the_callable(device: str) -> None:
    """The call runs eagerly, with eager's own error; the captures stay, and later errors are as clear as before."""
    graphed = make_graphed_callables(nn.Linear(4, 4).to(device), (torch.randn(2, 4, device=device),))
    with pytest.warns(EagerFallbackWarning, match="unsupported-argument"), pytest.raises(TypeError):
        graphed(object())
    with pytest.raises(TraceError, match="op-failed"):
        graphed(torch.ones(2, 5, device=device))
    before = fxgraph.stats(graphed).replays
    graphed(torch.ones(2, 4, device=device))
    assert fxgraph.stats(graphed).replays == before + 1


@pytest.mark.filterwarnings("ignore::fxgraph.EagerFallbackWarning")
def test_another_dtype_than_the_callable_takes(device: str) -> None:
    """Fake tensors do not see it, the first run does; the error is the one of a wrong shape."""
    module = nn.Linear(4, 4).to(device)
    with pytest.raises(TraceError, match="op-failed"):
        make_graphed_callables(module, (torch.ones(2, 4, dtype=torch.long, device=device),))
    graphed = make_graphed_callables(module, (torch.ones(2, 4, device=device),))
    with pytest.raises(TraceError, match="op-failed"):
        graphed(torch.ones(2, 4, dtype=torch.float64, device=device))
    assert graphed(torch.ones(2, 4, device=device)).shape == (2, 4)


def test_the_users_own_exception_at_a_call_has_a_note(device: str) -> None:
    """It comes through as itself and says who ran what."""

    class Net(nn.Module):
        broken = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.broken:
                raise LookupError("my own")
            return x * 2

    graphed = make_graphed_callables(Net(), (torch.ones(2, device=device),))
    graphed.broken = True
    with pytest.raises(LookupError, match="my own") as caught:
        graphed(torch.ones(2, device=device))
    assert any("fxgraph" in note for note in caught.value.__notes__)
    graphed.broken = False
    assert torch.equal(graphed(torch.ones(2, device=device)), torch.full((2,), 2.0, device=device))


def test_a_mode_of_torch_compile_is_refused_by_name(device: str) -> None:
    """``mode=`` belongs to Inductor."""
    compiled = torch.compile(lambda x: x + 1, backend="graphed", mode="max-autotune")
    with warnings.catch_warnings(), pytest.raises(Exception, match="has no modes"):
        warnings.simplefilter("ignore")
        compiled(torch.ones(2, device=device))


@pytest.mark.filterwarnings("ignore::fxgraph.EagerFallbackWarning")
def test_graphing_a_callable_that_cannot_be_traced_does_not_run_it(device: str) -> None:
    """Tracing runs no Python of the user's, in parts neither."""
    seen: list[int] = []

    def f(x: torch.Tensor) -> torch.Tensor:
        seen.append(1)
        if x.sum() > 1e9:
            return x
        return x * 2

    graphed = make_graphed_callables(f, (torch.ones(2, device=device),))
    assert seen == []
    assert torch.equal(graphed(torch.ones(2, device=device)), torch.full((2,), 2.0, device=device))
    assert seen == [1]


@pytest.mark.filterwarnings("ignore::fxgraph.EagerFallbackWarning")
def test_an_error_that_the_callable_catches_itself(device: str) -> None:
    """Eager works, so graphing does too."""
    layer = nn.Linear(4, 4).to(device)

    def f(x: torch.Tensor) -> torch.Tensor:
        try:
            return layer(x) @ torch.ones(3, 3, device=device)
        except RuntimeError:
            return layer(x) * 3

    x = torch.randn(2, 4, device=device)
    graphed = make_graphed_callables(f, (x,))
    torch.testing.assert_close(graphed(x), f(x), rtol=0, atol=0)
